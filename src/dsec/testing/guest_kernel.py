"""A kernel to boot in a guest: from a Debian package, fetched by apt, not installed, kept in the user's cache."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

# The kernel of backports: its name goes on to the newest build, whose name the folder in the cache has.
PACKAGE: Final = "linux-image-6.12-amd64"
_FETCH_S: Final = 600
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_VMLINUX_BYTES_MAX: Final = 512 << 20
# What the first user space needs before it has modules of its own: the share, its overlay, a disk, and layers.
_MODULES: Final = ("9p", "9pnet_virtio", "overlay", "virtio_blk", "ext4", "erofs", "loop", "quota_v2")
_WANTED: Final = "wanted"  # which modules a folder was made for


class GuestUnavailableError(Exception):
    """Why no guest can be booted here, and what would help."""


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """`modules` in the order in which they must be loaded."""

    name: str
    vmlinux: Path
    busybox: Path
    modules: tuple[Path, ...]


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsec" / "guest"


def guest_kernel(package: str = PACKAGE) -> GuestKernel:
    """The one in the cache, else a new one. Raises GuestUnavailableError.

    Whatever is there is used for ever: a run tomorrow is a run on the same kernel, until its folder is removed.
    """
    cache = cache_directory()
    if not (kept := [folder for folder in sorted(cache.glob(f"{package}=*")) if _is_for_us(folder)]):
        kept = [_fetch(package, cache)]
    folder = kept[-1]
    modules = (folder / "modules.order").read_text().split()
    return GuestKernel(
        folder.name, folder / "vmlinux", folder / "busybox", tuple(folder / "modules" / name for name in modules)
    )


def _fetch(package: str, cache: Path) -> Path:
    if missing := [tool for tool in ("apt-get", "apt-cache", "dpkg-deb") if shutil.which(tool) is None]:
        raise GuestUnavailableError(f"the guest's kernel comes from a Debian package, and there is no {missing[0]}")
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
    try:
        image = _newest_build(package)
        # apt checks what it fetches against the hashes of its signed index.
        _run("apt-get", "download", "-qq", image, "busybox-static", cwd=work)
        debs = sorted(work.glob("*.deb"))
        for deb in debs:
            _run("dpkg-deb", "-x", str(deb), str(work / "tree"))
        version = next(deb for deb in debs if deb.name.startswith("linux-image")).name.split("_")[1]
        folder = work / "kernel"
        _arrange(work / "tree", folder)
        target = cache / f"{package}={version.replace('%3a', ':')}"
        if not _is_for_us(target):
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        return target
    finally:
        shutil.rmtree(work)


def _is_for_us(folder: Path) -> bool:
    wanted = folder / _WANTED
    return wanted.exists() and wanted.read_text() == " ".join(_MODULES)


def _newest_build(package: str) -> str:
    """The package that the name without a build number depends on."""
    text = _run("apt-cache", "depends", "--important", package)
    found = re.search(r"Depends: (linux-image-\S+)", text)
    if found is None:
        raise GuestUnavailableError(f"apt knows no {package}: add Debian's backports and run `apt-get update`")
    return found.group(1)


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, timeout=_FETCH_S, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()
        raise GuestUnavailableError(f"{' '.join(command)}: {said}; `apt-get update` may help") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GuestUnavailableError(f"{' '.join(command)}: {error}") from error
    return done.stdout


def _arrange(tree: Path, folder: Path) -> None:
    (folder / "modules").mkdir(parents=True)
    shutil.copy2(tree / "bin" / "busybox", folder / "busybox")
    (folder / "vmlinux").write_bytes(cut_vmlinux(next((tree / "boot").glob("vmlinuz-*")).read_bytes()))
    packed = {
        path.name.partition(".ko")[0].replace("-", "_"): path
        for root in (tree / "lib" / "modules", tree / "usr" / "lib" / "modules")
        for path in root.rglob("*.ko*")
    }
    order: list[str] = []
    for name in _MODULES:
        _add_module(name, packed, folder / "modules", order)
    (folder / _WANTED).write_text(" ".join(_MODULES))
    (folder / "modules.order").write_text("".join(f"{name}\n" for name in order))


def _add_module(name: str, packed: dict[str, Path], folder: Path, order: list[str]) -> None:
    """Those that it depends on first. One that is not there is part of the kernel itself."""
    if f"{name}.ko" in order or name not in packed:
        return
    content = packed[name].read_bytes()
    content = lzma.decompress(content) if packed[name].suffix == ".xz" else content
    for needed in _needs(content):
        _add_module(needed.replace("-", "_"), packed, folder, order)
    (folder / f"{name}.ko").write_bytes(content)
    order.append(f"{name}.ko")


def _needs(module: bytes) -> list[str]:
    """From its .modinfo; "softdep: pre:" names algorithms that are looked up by their alias."""
    depends = re.search(rb"\0depends=([^\0]*)\0", module)
    soft = re.findall(rb"\0softdep=pre: ([^\0]*)\0", module)
    names = (depends.group(1).decode().split(",") if depends else []) + " ".join(s.decode() for s in soft).split()
    aliases = {"crypto-crc32c": "crc32c_generic"}
    return [aliases.get(name, name) for name in names if name]


def cut_vmlinux(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (Documentation/arch/x86/boot.rst): it boots at once, by PVH, where unpacking
    itself takes an emulated processor longer than all the rest."""
    setup_sectors, offset, length = image[0x1F1] or 4, *struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if not payload.startswith(_ZSTD_MAGIC):
        raise GuestUnavailableError("the kernel is not packed by zstd")
    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)
