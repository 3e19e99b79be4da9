"""What QEMU is told: files and formats down to the last, whatever an image's owner has written into them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dsec.backends.fullvm import machine
from dsec.backends.fullvm.machine import Shape, boot_arguments, clone_disk, machine_arguments, template_disk
from dsec.core.limits import GIB, MIB
from dsec.core.machines import Agent, Bus, Firmware

SHAPE = Shape(
    image="0" * 64,
    format="qcow2",
    firmware=Firmware.BIOS,
    agent=Agent.NONE,
    bus=Bus.VIRTIO,
    boot_wait_s=0.0,
    command_line="root=/dev/vda",
    processors=2,
    memory_bytes=512 * MIB,
    disk_bytes=GIB,
)


def arguments(shape: Shape = SHAPE, *, clone: bool = True, accelerator: str = "tcg") -> list[str]:
    return machine_arguments(
        shape,
        accelerator=accelerator,
        disk=clone_disk(shape) if clone else template_disk(shape),
        memory="memory-backend-ram,id=ram0,size=512M",
        data=["/data"],
        variables="/disk/variables.fd" if shape.firmware is Firmware.UEFI else None,
    )


def blockdevs(given: list[str]) -> dict[str, dict[str, Any]]:
    nodes = [json.loads(given[at + 1]) for at, word in enumerate(given) if word == "-blockdev"]
    return {node["node-name"]: node for node in nodes}


def chain(node: dict[str, Any] | None) -> list[tuple[str, str, bool]]:
    found = []
    while node is not None:
        assert node["file"]["driver"] == "file"
        found.append((node["driver"], node["file"]["filename"], node["read-only"]))
        node = node.get("backing")
    return found


def test_a_clone_writes_its_own_disk_only_and_every_format_is_named() -> None:
    disk = blockdevs(arguments())["disk"]

    assert chain(disk) == [
        ("qcow2", "/disk/disk.qcow2", False),
        ("qcow2", "/template/disk.qcow2", True),
        ("qcow2", machine.BASE, True),
    ]


def test_a_base_of_qcow2_is_told_to_stand_on_nothing() -> None:
    base = blockdevs(arguments(clone=False))["disk"]["backing"]

    assert base["backing"] is None
    assert "backing" in base


def test_a_raw_base_is_never_taken_for_anything_else() -> None:
    disk = blockdevs(arguments(replace(SHAPE, format="raw")))["disk"]

    assert chain(disk)[-1] == ("raw", machine.BASE, True)


def test_layers_that_are_block_devices_are_read_as_such_and_nothing_else_changes() -> None:
    shape = replace(SHAPE, format="raw", above=2)
    plain = arguments(shape)
    devices = machine_arguments(
        shape,
        accelerator="tcg",
        disk=clone_disk(shape, devices={0, 2}),
        memory="memory-backend-ram,id=ram0,size=512M",
        data=["/data"],
        variables=None,
        base=machine.layer_path(0, device=True),
    )

    files = []
    node = blockdevs(devices)["disk"]
    while node is not None:
        files.append((node["file"]["driver"], node["file"]["filename"]))
        node = node.get("backing")
    assert files == [
        ("file", "/disk/disk.qcow2"),
        ("file", "/template/disk.qcow2"),
        ("host_device", "/dev/base2"),
        ("file", "/base/1"),
        ("host_device", "/dev/base0"),
    ]
    assert [word for word in plain if "blockdev" not in word and "filename" not in word] == [
        word for word in devices if "blockdev" not in word and "filename" not in word
    ]


def test_a_template_and_its_clones_have_the_same_devices() -> None:
    def devices(given: list[str]) -> list[str]:
        return [given[at + 1] for at, word in enumerate(given) if word in ("-device", "-M", "-chardev")]

    assert devices(arguments()) == devices(arguments(clone=False))


def test_the_monitor_may_start_nothing_and_reads_no_configuration() -> None:
    given = arguments()

    sandbox = given[given.index("-sandbox") + 1]
    assert sandbox == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    assert {"-nodefaults", "-no-user-config"} <= set(given)
    assert not any("netdev" in word or "exec:" in word for word in given)


def test_only_a_machine_with_our_agent_ends_with_its_system() -> None:
    assert "-no-reboot" in arguments(replace(SHAPE, agent=Agent.DSEC))
    assert "-no-reboot" not in arguments()


def test_the_machine_keeps_its_system_management_mode() -> None:
    """Without it the text of a clone's screen is not to be seen under QEMU 10."""
    assert not any("smm=off" in word for word in arguments())


def test_uefi_is_flash_whose_code_is_read_only() -> None:
    given = arguments(replace(SHAPE, firmware=Firmware.UEFI))

    nodes = blockdevs(given)
    assert (nodes["code"]["read-only"], nodes["variables"]["read-only"]) == (True, False)
    assert "pflash0=code,pflash1=variables" in given[given.index("-M") + 1]


def test_a_kernel_is_given_to_what_boots_it_alone() -> None:
    shape = replace(SHAPE, firmware=Firmware.KERNEL)

    assert boot_arguments(SHAPE, tsc_khz=1) == []
    assert boot_arguments(shape, tsc_khz=5)[-1] == "root=/dev/vda tsc_early_khz=5"
    assert "-kernel" not in arguments(shape)


@pytest.mark.parametrize(("bus", "driver"), [(Bus.VIRTIO, "virtio-blk-pci"), (Bus.SATA, "ide-hd,bus=ide.0")])
def test_the_disk_is_connected_as_its_system_can_drive_it(bus: Bus, driver: str) -> None:
    given = arguments(replace(SHAPE, bus=bus))

    assert any(word.startswith(f"{driver},drive=disk") for word in given)


def test_layers_of_an_image_lie_between_its_lowest_and_the_template_and_are_read_only() -> None:
    disk = blockdevs(arguments(replace(SHAPE, above=2)))["disk"]

    assert chain(disk) == [
        ("qcow2", "/disk/disk.qcow2", False),
        ("qcow2", "/template/disk.qcow2", True),
        ("qcow2", "/base/2", True),
        ("qcow2", "/base/1", True),
        ("qcow2", "/base/disk", True),
    ]


@pytest.mark.parametrize("bus", list(Bus))
def test_what_cannot_be_read_or_written_is_an_error_in_the_guest_and_stops_no_machine(bus: Bus) -> None:
    (device,) = [word for word in arguments(replace(SHAPE, bus=bus)) if "drive=disk" in word]

    assert device.endswith(",rerror=report,werror=report")
