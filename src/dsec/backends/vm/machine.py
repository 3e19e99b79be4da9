"""The machine that QEMU is told to be. Pure. A template and its clones have the same devices, in the same order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsec.backends.vm.network import card_arguments
from dsec.core.limits import GIB, MIB

GENERATION: Final = 1  # of what is below: state of another one does not fit
EMULATOR_BYTES: Final = 256 * MIB  # of host memory beside the guest's: code, translated code, buffers
_TRANSLATED_MIB: Final = 64
_CONSOLE_BYTES: Final = 64 * 1024

# In the jail.
SOCKETS: Final = "/vm"
DISK: Final = "/disk/disk.qcow2"
TEMPLATE: Final = "/template"
DEVICES: Final = "/dev/"

_KERNEL: Final = (
    "console=ttyS0 quiet panic=-1 oops=panic reboot=t mitigations=off random.trust_cpu=on 8250.nr_uarts=1 "
    "no_timer_check tsc=reliable init_on_alloc=0 cryptomgr.notests audit=0 apparmor=0 rcupdate.rcu_expedited=1 "
    "swiotlb=noforce rdinit=/init"
)
# Programs at the same addresses in each process: an emulator translates them once, and not for every process again (a
# command takes 20 ms instead of 54 then, and translated code fills no more than it needs). Root in a guest can turn it
# on again, in /proc/sys/kernel/randomize_va_space.
_EMULATED: Final = "norandmaps"


@dataclass(frozen=True, slots=True)
class Shape:
    """What two machines have in common that can be cloned from one template."""

    processors: int
    memory_bytes: int
    disk_bytes: int
    pids: int
    layers: tuple[tuple[str, bool], ...]  # digest, and whether its data is apart; lowest first
    network: bool = False  # it has a card; whether anything is behind it is another matter


@dataclass(frozen=True, slots=True)
class Drive:
    """A disk of the machine: `path` in the jail, found in the guest by `serial`."""

    serial: str
    path: str
    format: str = "raw"
    writable: bool = False
    below: tuple[str, ...] = ()  # what it stands on, topmost first: all are qcow2 but the last, which is raw


@dataclass(frozen=True, slots=True)
class Persistent:
    """A file that the guest sees as memory which is there already: all machines share its pages."""

    path: str  # in the jail
    size_bytes: int  # a multiple of 2 MiB


def drives_of(shape: Shape, *, disk: Drive) -> list[Drive]:
    drives: list[Drive] = []
    for number, (_, apart) in enumerate(shape.layers):
        drives.append(Drive(f"l{number}", f"/layers/{number}.meta"))
        if apart:
            drives.append(Drive(f"l{number}b", f"/layers/{number}.blob"))
    return [*drives, disk]


def machine_arguments(
    shape: Shape,
    *,
    accelerator: str,
    drives: Sequence[Drive],
    memory: str,
    firmware: str,
    persistent: Sequence[Persistent] = (),
) -> list[str]:
    """Everything but the program and what it starts from. `memory`: the backend object's arguments. `persistent`: files
    that the guest sees as memory; then it is a PC with a PCI bus, as that needs one.

    No balloon: on a clone it would reach into its template's memory (QEMU before 8.2) or give nothing back (since);
    a template has little to give: 94 MiB of 256 without, 92 after 5 s of reporting free pages.
    """
    tcg = accelerator == "tcg"
    accel = f"tcg,thread=multi,tb-size={_TRANSLATED_MIB}" if tcg else accelerator
    arguments = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-L", firmware]
    arguments += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    arguments += ["-object", memory]
    kind = "q35,sata=off,smbus=off,usb=off,vmport=off" if persistent else "microvm,rtc=on"
    bus = "pci" if persistent else "device"
    arguments += ["-M", f"{kind},memory-backend=ram0", "-accel", accel, "-bios", "qboot.rom"]
    arguments += ["-cpu", "max" if tcg else "host", "-smp", str(shape.processors)]
    arguments += ["-m", f"size={shape.memory_bytes // MIB}M{_room_for(shape, persistent)}"]
    for number, file in enumerate(persistent):
        memdev = f"memory-backend-file,id=pm{number},size={file.size_bytes},mem-path={file.path},share=on,readonly=on"
        arguments += ["-object", memdev, "-device", f"virtio-pmem-pci,memdev=pm{number},id=nv{number}"]
    arguments += ["-device", f"virtio-serial-{bus},max_ports=3"]
    for number, name in enumerate(("agent", "bell"), 1):
        arguments += ["-chardev", f"socket,id={name},path={SOCKETS}/{name},server=on,wait=off"]
        arguments += ["-device", f"virtserialport,chardev={name},nr={number},name={name}"]
    for drive in drives:
        arguments += ["-blockdev", _blockdev(drive)]
        # What cannot be read or written is an error to the guest: nobody looks after a machine that QEMU has stopped.
        errors = "rerror=report,werror=report"
        arguments += ["-device", f"virtio-blk-{bus},drive={drive.serial},serial={drive.serial},{errors}"]
    arguments += ["-device", f"virtio-rng-{bus}"]
    if shape.network:
        arguments += card_arguments(f"virtio-net-{bus}")
    arguments += ["-qmp", f"unix:{SOCKETS}/qmp,server=on,wait=off"]
    return [*arguments, "-serial", "chardev:console"]


def _room_for(shape: Shape, persistent: Sequence[Persistent]) -> str:
    """Addresses beside the memory, for files that are seen as memory."""
    if not persistent:
        return ""
    most = shape.memory_bytes + sum(file.size_bytes for file in persistent) + len(persistent) * GIB
    return f",slots={len(persistent)},maxmem={-(-most // GIB)}G"


def _blockdev(drive: Drive) -> str:
    if drive.below:
        *overlays, base = drive.below
        return json.dumps(
            disk_chain(drive.serial, [drive.path, *overlays], raw_file("base", base)), separators=(",", ":")
        )
    reads = "on" if not drive.writable else "off"
    more = ",discard=unmap,detect-zeroes=unmap" if drive.writable else ""
    # Layers lie where nobody changes them, and maybe on a file system without locks.
    file = f"file.driver=file,file.filename={drive.path},file.locking=off"
    return f"driver={drive.format},node-name={drive.serial},read-only={reads}{more},{file}"


def disk_chain(name: str, overlays: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """Formats and files are named down to the last: nothing that is written in a file names another. `overlays`: qcow2,
    topmost first; the machine writes to that."""
    node = base
    for number, path in reversed(list(enumerate(overlays))):
        top = number == 0
        node = {
            "driver": "qcow2",
            "node-name": name if top else f"below{number}",
            "read-only": not top,
            "file": plain_file(path),
            "backing": node,
        }
        if top:
            node |= {"discard": "unmap", "detect-zeroes": "unmap"}
    return node


def raw_file(name: str, path: str, *, writable: bool = False) -> dict[str, Any]:
    return {"driver": "raw", "node-name": name, "read-only": not writable, "file": plain_file(path)}


def plain_file(path: str) -> dict[str, Any]:
    """Of the jail; what is in its `/dev` is a block device."""
    driver = "host_device" if path.startswith(DEVICES) else "file"
    # What is below lies where nobody changes it, and maybe on a file system without locks.
    return {"driver": driver, "filename": path, "locking": "off"}


def incoming(*, bare: bool) -> list[str]:
    """Waits for a state. `bare`: of devices alone, without the head of a migration; it says that the machine ran, and
    what goes on is for the node to say."""
    return ["-incoming", "defer", *(["-S", "-global", "migration.send-configuration=off"] if bare else [])]


def console_ring() -> list[str]:
    """A guest that floods its console fills nothing but this."""
    return ["-chardev", f"ringbuf,id=console,size={_CONSOLE_BYTES}"]


def console_at(path: str) -> list[str]:
    """A FIFO that is read, while a template boots."""
    return ["-chardev", f"file,id=console,path={path}"]


def boot_arguments(*, kernel: str, initramfs: str, emulated: bool, tsc_khz: int | None) -> list[str]:
    line = f"{_KERNEL} {_EMULATED}" if emulated else _KERNEL
    if tsc_khz is not None:
        line = f"{line} tsc_early_khz={tsc_khz}"
    return ["-kernel", kernel, "-initrd", initramfs, "-append", line]


def template_memory(memory_bytes: int) -> str:
    """A file that its clones map."""
    return f"memory-backend-file,id=ram0,size={memory_bytes // MIB}M,mem-path={TEMPLATE}/ram.img,share=on"


def clone_memory(memory_bytes: int, *, read_only: bool) -> str:
    """A private view of the template's: what the clone writes is its own. Opened for reading only, nothing that the
    monitor does, or is made to do, reaches the file."""
    more = ",readonly=on,rom=off" if read_only else ""
    size = memory_bytes // MIB
    return f"memory-backend-file,id=ram0,size={size}M,mem-path={TEMPLATE}/ram.img,share=off{more}"
