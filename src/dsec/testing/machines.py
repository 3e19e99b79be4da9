"""Small disks for full machines: nothing but a boot sector, or a machine with our agent; and reading their screens."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import Final

from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest, checked_size, copy_disk
from dsec.backends.vm.initramfs import build_initramfs, plan_text, with_plan
from dsec.backends.vm.kernel import find_kernel
from dsec.binaries import find_binary
from dsec.core.errors import HostError
from dsec.core.limits import MIB
from dsec.core.machines import Agent, Bus, Firmware

PROMPT: Final = ">"
_SECTOR: Final = 512
_CELL: Final = (9, 16)
_CURSOR_FROM: Final = 13  # rows of a cell above it
_DISK_BYTES: Final = 64 * MIB
_PIDS: Final = 1_000
_COMMAND_LINE: Final = (
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on no_timer_check tsc=reliable "
    "init_on_alloc=0 cryptomgr.notests audit=0 apparmor=0 rcupdate.rcu_expedited=1 rdinit=/init"
)


def boot_sector() -> bytes:
    """A program of 16 bits that the BIOS starts: it shows a prompt, and echoes what is typed."""
    begin = bytes.fromhex("fa 31c0 8ed8 8ed0 bc007c fb")  # no interrupts while the stack is set
    begin += bytes.fromhex("b80300 cd10")  # text, 80x25, and an empty screen
    begin += bytes.fromhex("b0") + PROMPT.encode() + bytes.fromhex("b40e bb0700 cd10")  # show it
    echo = bytes.fromhex("30e4 cd16 b40e bb0700 cd10")  # wait for a key, show its character
    code = begin + echo + bytes.fromhex("eb") + (-(len(echo) + 2) & 0xFF).to_bytes(1, "little")
    return code + bytes(_SECTOR - 2 - len(code)) + b"\x55\xaa"


def add_boot_sector(
    images: MachineImages, name: str = "echo", *, bus: Bus = Bus.VIRTIO, wait_s: float = 1.5
) -> MachineImage:
    def make(directory: Path) -> Manifest:
        source = directory / "source"
        source.write_bytes(boot_sector() + bytes(MIB - _SECTOR))
        size, sha256 = copy_disk(source, directory / "disk", format="raw")
        source.unlink()
        return Manifest(
            format="raw", firmware=Firmware.BIOS, agent=Agent.NONE, bus=bus, boot_wait_s=wait_s, disk_bytes=size,
            sha256=sha256, created_at=time.time(),
        )  # fmt: skip

    return images.add(name, make)


def add_machine(images: MachineImages, name: str, root: Path | None, cache: Path) -> MachineImage:
    """One whose first program is that of microvms, and whose disk holds `root`. Raises HostError."""
    kernel = find_kernel(cache)
    if kernel is None:
        raise HostError("no kernel for guests has been fetched yet")
    initramfs = build_initramfs(kernel, guest=find_binary("dsec-guest"), agent=find_binary("dsec-agent"), cache=cache)

    def make(directory: Path) -> Manifest:
        shutil.copyfile(kernel.vmlinux, directory / "kernel")
        with_plan(initramfs, plan_text(layers=[], disk="disk", pids=_PIDS), directory / "initrd")
        with tempfile.TemporaryDirectory(prefix="dsec-machine-") as work:
            tree = Path(work) / "tree"
            (tree / "work").mkdir(parents=True)
            if root is None:
                (tree / "upper").mkdir()
            else:
                shutil.copytree(root, tree / "upper", symlinks=True)
            size = _DISK_BYTES + sum(path.lstat().st_size for path in tree.rglob("*")) * 2
            source = Path(work) / "disk"
            options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", str(tree)]
            subprocess.run(["mke2fs", *options, str(source), f"{size // MIB}m"], check=True, capture_output=True)
            disk_bytes, sha256 = copy_disk(source, directory / "disk", format="raw")
        return Manifest(
            format="raw", firmware=Firmware.KERNEL, agent=Agent.DSEC, command_line=_COMMAND_LINE,
            disk_bytes=checked_size(disk_bytes), sha256=sha256, created_at=time.time(),
        )  # fmt: skip

    return images.add(name, make)


def cells_of(png: bytes) -> list[bytes]:
    """The first line of a screen of text, 720x400: the picture of each of its 80 characters, without a cursor."""
    rows = _rows(png, _CELL[1])
    return [
        b"".join(bytes(row[at * 3 : (at + _CELL[0]) * 3]) for row in rows[:_CURSOR_FROM])
        for at in range(0, 720, _CELL[0])
    ]


def _rows(png: bytes, count: int) -> list[bytearray]:
    """The first rows of pixels of an RGB picture (PNG, 3rd edition, sections 9 and 11)."""
    width = struct.unpack_from(">I", png, 16)[0]
    assert png[24:29] == b"\x08\x02\x00\x00\x00", "eight bits of three colours, not interlaced"
    data, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    raw, stride = zlib.decompress(data), width * 3
    rows: list[bytearray] = []
    above = bytearray(stride)
    for number in range(count):
        begin = number * (stride + 1)
        row = _unfiltered(raw[begin], bytearray(raw[begin + 1 : begin + 1 + stride]), above)
        rows.append(row)
        above = row
    return rows


def _unfiltered(kind: int, row: bytearray, above: bytearray) -> bytearray:
    for i in range(len(row)):
        left, up, corner = (row[i - 3], above[i], above[i - 3]) if i >= 3 else (0, above[i], 0)
        nearest = min(
            (abs(up - corner), left), (abs(left - corner), up), (abs(left + up - 2 * corner), corner), key=_first
        )
        row[i] = (row[i] + (0, left, up, (left + up) // 2, nearest[1])[kind]) & 0xFF
    return row


def _first(pair: tuple[int, int]) -> int:
    return pair[0]
