"""The machine that QEMU is told to be: a PC of 2009 with a disk, a screen, a keyboard and a tablet. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsec.backends.vm.machine import DEVICES, SOCKETS, TEMPLATE, disk_chain, plain_file, raw_file
from dsec.backends.vm.network import card_arguments
from dsec.core.limits import MIB
from dsec.core.machines import Agent, Bus, Firmware

GENERATION: Final = 1  # of what is below: state of another one does not fit
_TRANSLATED_MIB: Final = 128  # of an emulated processor's code: a desktop runs much
_CONSOLE_BYTES: Final = 64 * 1024
_VIDEO_MIB: Final = 16  # up to 2560x1600
VIEWERS_MAX: Final = 4  # of one screen by VNC at once

# In the jail.
BASE: Final = "/base/disk"
KERNEL: Final = "/base/kernel"
INITRD: Final = "/base/initrd"
FIRMWARE_CODE: Final = "/firmware/code.fd"
DISK_NAME: Final = "disk.qcow2"
VARIABLES_NAME: Final = "variables.fd"
OWN: Final = "/disk"
QGA: Final = "qga"
VNC: Final = "vnc"


@dataclass(frozen=True, slots=True)
class Shape:
    """What two machines have in common that can be cloned from one template."""

    image: str  # sha256 of the disk that they begin as
    format: str
    firmware: Firmware
    agent: Agent
    bus: Bus
    boot_wait_s: float
    command_line: str
    processors: int
    memory_bytes: int
    disk_bytes: int
    above: int = 0  # layers of the image above its lowest
    network: bool = False  # it has a card; whether anything is behind it is another matter


@dataclass(frozen=True, slots=True)
class Overlay:
    """A qcow2 above others."""

    path: str


def machine_arguments(
    shape: Shape,
    *,
    accelerator: str,
    disk: Sequence[Overlay],
    memory: str,
    data: Sequence[str],
    variables: str | None,
    base: str = BASE,
) -> list[str]:
    """Everything but the program and what it starts from. `disk`: topmost first, without the base. `memory`: the
    backend object's arguments. `data`: directories of firmware. `variables`: of UEFI, a file of its own."""
    tcg = accelerator == "tcg"
    accel = f"tcg,thread=multi,tb-size={_TRANSLATED_MIB}" if tcg else accelerator
    arguments = ["-nodefaults", "-no-user-config", "-display", "none", "-name", "machine"]
    for directory in data:
        arguments += ["-L", directory]
    arguments += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    if shape.agent is Agent.DSEC:
        # To the node, a machine that begins anew is another one.
        arguments += ["-no-reboot"]
    arguments += ["-object", memory]
    machine = "q35,vmport=off,memory-backend=ram0"
    if shape.firmware is Firmware.UEFI:
        assert variables is not None
        arguments += ["-blockdev", _json(raw_file("code", FIRMWARE_CODE))]
        arguments += ["-blockdev", _json(raw_file("variables", variables, writable=True))]
        machine += ",pflash0=code,pflash1=variables"
    arguments += ["-M", machine, "-accel", accel, "-cpu", "max" if tcg else "host", "-smp", str(shape.processors)]
    arguments += ["-m", f"size={shape.memory_bytes // MIB}M", "-rtc", "base=utc,clock=host"]
    arguments += ["-boot", "menu=off,strict=on"]
    arguments += ["-device", f"VGA,id=video,vgamem_mb={_VIDEO_MIB}"]
    arguments += ["-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0", "-device", "usb-kbd,bus=usb.0"]
    arguments += ["-blockdev", _json(_disk(shape, disk, base))]
    # Two drivers of one device: what a system has that knows nothing of virtual machines, and what is fast.
    driver = "virtio-blk-pci" if shape.bus is Bus.VIRTIO else "ide-hd,bus=ide.0"
    # What cannot be read or written is an error to the guest: nobody looks after a machine that QEMU has stopped.
    arguments += ["-device", f"{driver},drive=disk,serial=disk,bootindex=1,rerror=report,werror=report"]
    arguments += ["-device", "virtio-serial-pci,max_ports=4"]
    for number, (socket, name) in enumerate((("agent", "agent"), ("bell", "bell"), (QGA, "org.qemu.guest_agent.0")), 1):
        arguments += ["-chardev", f"socket,id={socket},path={SOCKETS}/{socket},server=on,wait=off"]
        arguments += ["-device", f"virtserialport,chardev={socket},nr={number},name={name}"]
    if shape.network:
        arguments += card_arguments("virtio-net-pci" if shape.bus is Bus.VIRTIO else "e1000e")
    # Tells a system that knows it (Linux from 5.18, Windows) that it is a clone, which then has its own randomness.
    arguments += ["-device", "virtio-rng-pci", "-device", "vmgenid,guid=auto"]
    arguments += ["-qmp", f"unix:{SOCKETS}/qmp,server=on,wait=off"]
    arguments += ["-vnc", f"unix:{SOCKETS}/{VNC},share=force-shared,connections={VIEWERS_MAX}"]
    return [*arguments, "-chardev", f"ringbuf,id=console,size={_CONSOLE_BYTES}", "-serial", "chardev:console"]


def boot_arguments(shape: Shape, *, tsc_khz: int | None) -> list[str]:
    """Of an image that has no boot loader. What is not needed once it runs is given to no clone."""
    if shape.firmware is not Firmware.KERNEL:
        return []
    line = shape.command_line if tsc_khz is None else f"{shape.command_line} tsc_early_khz={tsc_khz}"
    return ["-kernel", KERNEL, "-initrd", INITRD, "-append", line.strip()]


def template_disk(shape: Shape, devices: Collection[int] = ()) -> list[Overlay]:
    """`devices`: which files of the image are block devices."""
    image = [Overlay(layer_path(number, device=number in devices)) for number in range(shape.above, 0, -1)]
    return [Overlay(f"{TEMPLATE}/{DISK_NAME}"), *image]


def clone_disk(shape: Shape, overlays: Sequence[str] = (), devices: Collection[int] = ()) -> list[Overlay]:
    """`overlays`: above the template's, lowest first."""
    above = [Overlay(f"{TEMPLATE}/{name}") for name in reversed(overlays)]
    return [Overlay(f"{OWN}/{DISK_NAME}"), *above, *template_disk(shape, devices)]


def layer_path(number: int, *, device: bool = False) -> str:
    """In the jail, of a file of the image; 0 is the lowest."""
    if device:
        return f"{DEVICES}base{number}"
    return BASE if number == 0 else f"/base/{number}"


def _disk(shape: Shape, overlays: Sequence[Overlay], path: str) -> dict[str, Any]:
    if shape.format == "raw":
        base = raw_file("base", path)
    else:
        base = {"driver": "qcow2", "node-name": "base", "read-only": True, "backing": None, "file": plain_file(path)}
    return disk_chain("disk", [overlay.path for overlay in overlays], base)


def _json(node: dict[str, Any]) -> str:
    return json.dumps(node, separators=(",", ":"))
