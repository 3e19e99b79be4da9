"""Whether guests run on the processor itself. Opening /dev/kvm proves nothing: a small guest is booted with it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.firecracker import Firecracker
from dsec.backends.vm.initramfs import cpio_entry
from dsec.backends.vm.kernel import GuestKernel
from dsec.backends.vm.qemu import Qemu
from dsec.binaries import find_binary
from dsec.core.errors import UnsupportedError
from dsec.wire.codec import to_json

_BOOT_S: Final = 6.0
_WORDS: Final = b"dsec-guest:"  # what the first program says when it finds no plan: it has run
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_DEVICE: Final = Path("/dev/kvm")
_LINE: Final = "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init"


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str  # kvm | tcg
    reason: str = ""  # why it is not kvm


async def choose_accelerator(wanted: str, qemu: Qemu, kernel: GuestKernel, *, cache: Path) -> Accelerator:
    """`wanted`: "kvm", "tcg", or "auto". The verdict is kept for as long as this machine runs. Raises
    UnsupportedError when KVM is asked for and does not work."""
    if wanted == "tcg":
        return Accelerator("tcg", "as configured")
    reason = await _why_not(qemu, kernel, cache)
    if reason is None:
        return Accelerator("kvm")
    if wanted == "kvm":
        raise UnsupportedError(f"KVM does not work here: {reason}", hint='set accelerator = "tcg" to emulate')
    return Accelerator("tcg", reason)


async def why_no_firecracker(firecracker: Firecracker, kernel: GuestKernel, *, cache: Path) -> str | None:
    """None: guests run under it. It has nothing but KVM. The verdict is kept as that on QEMU's."""

    def command(directory: Path, initramfs: Path) -> list[str]:
        source = {"kernel_image_path": str(kernel.vmlinux), "initrd_path": str(initramfs), "boot_args": _LINE}
        config = {"boot-source": source, "drives": [], "machine-config": {"vcpu_count": 1, "mem_size_mib": 128}}
        (directory / "config").write_bytes(to_json(config))
        return [str(firecracker.path), "--no-api", "--config-file", str(directory / "config"), "--level", "Error"]

    return await _verdict("firecracker", firecracker.text, kernel, cache, command)


async def _why_not(qemu: Qemu, kernel: GuestKernel, cache: Path) -> str | None:
    def command(directory: Path, initramfs: Path) -> list[str]:
        command = [str(qemu.path), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-L", str(qemu.firmware), "-M", "microvm", "-accel", "kvm", "-cpu", "host", "-bios", "qboot.rom"]
        command += ["-m", "128M", "-kernel", str(kernel.vmlinux), "-initrd", str(initramfs), "-serial", "stdio"]
        return [*command, "-append", _LINE]

    return await _verdict("kvm", qemu.text, kernel, cache, command)


async def _verdict(
    name: str, version: str, kernel: GuestKernel, cache: Path, command: Callable[[Path, Path], list[str]]
) -> str | None:
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return "there is no /dev/kvm that we may open"
    tried = hashlib.sha256(f"{_BOOT_ID.read_text()}{version}{kernel.name}".encode()).hexdigest()[:32]
    kept = cache / name
    if kept.exists() and (verdict := kept.read_text().splitlines()) and verdict[0] == tried:
        return "\n".join(verdict[1:]) or None
    reason = await _try_to_boot(command)
    early = cache / f"{name}.{os.getpid()}"
    early.write_text(f"{tried}\n{reason or ''}")
    early.rename(kept)
    return reason


async def _try_to_boot(command_of: Callable[[Path, Path], list[str]]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="dsec-kvm-") as directory:
        initramfs = Path(directory) / "initramfs"
        files = [cpio_entry(name, 0o040755) for name in ("dev", "proc", "sys", "modules")]
        files.append(cpio_entry("dev/console", 0o020600, device=(5, 1)))
        files.append(cpio_entry("init", 0o100755, find_binary("dsec-guest").read_bytes()))
        initramfs.write_bytes(b"".join(files) + cpio_entry("TRAILER!!!", 0))
        process = await asyncio.create_subprocess_exec(
            *command_of(Path(directory), initramfs),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = b""
        try:
            async with asyncio.timeout(_BOOT_S):
                said, _ = await process.communicate()
        except TimeoutError:
            said = b"it did not come up"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if _WORDS in said:
            return None
        words = said.decode("utf-8", "replace").strip().splitlines()
        return f"a guest does not run: {words[-1][:200] if words else 'it says nothing'}"
