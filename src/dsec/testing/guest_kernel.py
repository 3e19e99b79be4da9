"""A kernel to boot this machine's own root with in a guest, and a shell that needs nothing of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.kernel import GuestKernel, fetch_kernel, find_kernel, run_tool
from dsec.core.errors import HostError

PACKAGE: Final = "linux-image-6.12-amd64"
# What the first user space needs before it has modules of its own: the share, its overlay, a disk, layers, and block
# devices that a program serves.
_MODULES: Final = ("9p", "9pnet_virtio", "overlay", "virtio_blk", "ext4", "erofs", "loop", "quota_v2", "ublk_drv")


class GuestUnavailableError(Exception):
    """Why no guest can be booted here, and what would help."""


@dataclass(frozen=True, slots=True)
class HostLikeKernel:
    """`modules` in the order in which they must be loaded."""

    name: str
    vmlinux: Path
    busybox: Path
    modules: tuple[Path, ...]


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsec" / "guest"


def guest_kernel(package: str = PACKAGE) -> HostLikeKernel:
    """The one in the cache, else a new one. Raises GuestUnavailableError.

    Whatever is there is used for ever: a run tomorrow is a run on the same kernel, until its folder is removed.
    """
    cache = cache_directory()
    try:
        kernel = find_kernel(cache, package, _MODULES) or fetch_kernel(cache, package, _MODULES)
        return HostLikeKernel(kernel.name, kernel.vmlinux, _busybox(cache, kernel), kernel.modules)
    except HostError as error:
        raise GuestUnavailableError(f"{error.message}; {error.hint or ''}".rstrip("; ")) from error


def _busybox(cache: Path, kernel: GuestKernel) -> Path:
    target = kernel.vmlinux.parent / "busybox"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as name:
            work = Path(name)
            run_tool("apt-get", "download", "-qq", "busybox-static", cwd=work)
            run_tool("dpkg-deb", "-x", str(next(work.glob("*.deb"))), str(work / "tree"))
            shutil.move(work / "tree" / "bin" / "busybox", target)
    return target
