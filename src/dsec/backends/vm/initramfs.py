"""The first files of a guest: its kernel's modules, the first program, the agent. In the kernel's own format."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from dsec.backends.vm.kernel import GuestKernel
from dsec.backends.vm.network import plan_line

_KEPT_MAX = 4  # of older kernels and agents


def build_initramfs(kernel: GuestKernel, *, guest: Path, agent: Path, cache: Path) -> Path:
    """A file in `cache` that is named after its content."""
    files = {
        "init": guest.read_bytes(),
        "dsec-agent": agent.read_bytes(),
        "modules.order": "".join(f"{module.name}\n" for module in kernel.modules).encode(),
        **{f"modules/{module.name}": module.read_bytes() for module in kernel.modules},
    }
    entries = [cpio_entry(name, 0o040755) for name in ("dev", "proc", "sys", "modules")]
    # The kernel gives the first program its console by this name, before anything is mounted.
    entries.append(cpio_entry("dev/console", 0o020600, device=(5, 1)))
    entries += [cpio_entry(name, 0o100755, content) for name, content in files.items()]
    content = b"".join(entries) + cpio_entry("TRAILER!!!", 0)
    path = cache / f"initramfs-{hashlib.sha256(content).hexdigest()[:32]}"
    if not path.exists():
        _forget_older(cache)
        _write(path, content)
    return path


def with_plan(initramfs: Path, plan: str, target: Path) -> None:
    """The same with the plan of one machine, which only that is given: the kernel unpacks one archive after the
    other."""
    archive = cpio_entry("dsec.plan", 0o100600, plan.encode()) + cpio_entry("TRAILER!!!", 0)
    head = initramfs.read_bytes()
    target.write_bytes(head + bytes(-len(head) % 4) + archive)


def plan_text(
    *,
    layers: Sequence[tuple[str, str | None]],
    disk: str,
    pids: int,
    vsock: int | None = None,
    network: bool = False,
) -> str:
    """As native/guest/src/plan.rs reads it: layers lowest first, each by the serial numbers or paths of its devices.
    `vsock`: the port where the agent listens, where there are no serial ports. `network`: its card is set up."""
    lines = [f"pids {pids}", *(f"layer {meta} {blob or ''}".rstrip() for meta, blob in layers), f"disk {disk}"]
    lines += [] if vsock is None else [f"vsock {vsock}"]
    lines += [plan_line()] if network else []
    return "".join(f"{line}\n" for line in lines)


def cpio_entry(name: str, mode: int, content: bytes = b"", *, device: tuple[int, int] = (0, 0)) -> bytes:
    """One file as the kernel reads it (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % number for number in fields) + path
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; who comes second writes the same."""
    early = path.with_suffix(f".{os.getpid()}")
    early.write_bytes(content)
    early.rename(path)


def _forget_older(cache: Path) -> None:
    older = sorted(cache.glob("initramfs-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in older[_KEPT_MAX:]:
        path.unlink(missing_ok=True)
