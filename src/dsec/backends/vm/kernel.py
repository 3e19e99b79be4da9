"""A kernel for guests: from a Debian package, fetched by apt, not installed, kept in a directory of the host."""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

from dsec.core.errors import HostError

# Its name goes on to the newest build, whose name the folder in the cache has.
PACKAGE: Final = "linux-image-6.12-cloud-amd64"
# What a guest drives and mounts; what is part of the kernel itself is passed over.
MODULES: Final = ("virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "virtio_balloon", "ext4",
                  "erofs", "overlay", "vmw_vsock_virtio_transport")  # fmt: skip
PERSISTENT: Final = ("nd_pmem", "virtio_pmem")  # where layers are memory to the guest
NETWORK: Final = ("virtio_net", "af_packet")  # where it has a network card
_FETCH_S: Final = 600
_BOUNDED: Final = ("-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20", "-o", "Acquire::Retries=2")
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_WANTED: Final = "wanted"  # which modules a folder was made for


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """`modules` in the order in which they must be loaded."""

    name: str
    vmlinux: Path
    modules: tuple[Path, ...]


def find_kernel(cache: Path, package: str = PACKAGE, modules: Sequence[str] = MODULES) -> GuestKernel | None:
    """One that was fetched before. The same one for ever, until its folder is removed."""
    kept = [folder for folder in sorted(cache.glob(f"{package}=*")) if _is_for(folder, modules)]
    return _kernel_in(kept[-1]) if kept else None


def fetch_kernel(cache: Path, package: str = PACKAGE, modules: Sequence[str] = MODULES) -> GuestKernel:
    """Raises HostError: why there is none, and what would help. Two that fetch at once do no harm."""
    if missing := [tool for tool in ("apt-get", "apt-cache", "dpkg-deb") if shutil.which(tool) is None]:
        raise HostError(
            f"the guest's kernel comes from a Debian package, and there is no {missing[0]}",
            hint=f"put vmlinux, modules.order and modules/ into a folder {cache}/{package}=VERSION",
        )
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
    try:
        # apt checks what it fetches against the hashes of its signed index.
        run_tool("apt-get", *_BOUNDED, "download", "-qq", _newest_build(package), cwd=work)
        deb = next(work.glob("linux-image*.deb"))
        run_tool("dpkg-deb", "-x", str(deb), str(work / "tree"))
        folder = work / "kernel"
        arrange_kernel(work / "tree", folder, modules)
        target = cache / f"{package}={deb.name.split('_')[1].replace('%3a', ':')}"
        if not _is_for(target, modules):
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        return _kernel_in(target)
    finally:
        shutil.rmtree(work)


def run_tool(*command: str, cwd: Path | None = None) -> str:
    """What it prints. Raises HostError with its own words."""
    try:
        done = subprocess.run(
            command, cwd=cwd, timeout=_FETCH_S, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()
        raise HostError(f"{' '.join(command)}: {said}", hint="`apt-get update` may help") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"{' '.join(command)}: {error}") from error
    return done.stdout


def arrange_kernel(tree: Path, folder: Path, modules: Sequence[str]) -> None:
    """From an unpacked package: `vmlinux`, `modules/` and `modules.order` in `folder`, with all that they need."""
    (folder / "modules").mkdir(parents=True)
    (folder / "vmlinux").write_bytes(cut_vmlinux(next((tree / "boot").glob("vmlinuz-*")).read_bytes()))
    (folder / "vmlinux").chmod(0o644)  # monitors read it, which are nobody's users
    packed = {
        path.name.partition(".ko")[0].replace("-", "_"): path
        for root in (tree / "lib" / "modules", tree / "usr" / "lib" / "modules")
        for path in root.rglob("*.ko*")
    }
    order: list[str] = []
    for name in modules:
        _add_module(name, packed, folder / "modules", order)
    (folder / _WANTED).write_text(" ".join(modules))
    (folder / "modules.order").write_text("".join(f"{name}\n" for name in order))


def cut_vmlinux(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (Documentation/arch/x86/boot.rst): it boots at once, by PVH, where unpacking
    itself takes an emulated processor longer than all the rest."""
    setup_sectors, offset, length = image[0x1F1] or 4, *struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if not payload.startswith(_ZSTD_MAGIC):
        raise HostError("the kernel is not packed by zstd", hint="use a kernel of 6.12 or newer")
    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)


def content_digest(kernel: GuestKernel) -> str:
    digest = hashlib.sha256()
    for path in (kernel.vmlinux, *kernel.modules):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _is_for(folder: Path, modules: Sequence[str]) -> bool:
    wanted = folder / _WANTED
    return wanted.exists() and wanted.read_text() == " ".join(modules)


def _kernel_in(folder: Path) -> GuestKernel:
    names = (folder / "modules.order").read_text().split()
    return GuestKernel(folder.name, folder / "vmlinux", tuple(folder / "modules" / name for name in names))


def _newest_build(package: str) -> str:
    """The package that the name without a build number depends on."""
    text = run_tool("apt-cache", "depends", "--important", package)
    found = re.search(r"Depends: (linux-image-\S+)", text)
    if found is None:
        raise HostError(
            f"apt knows no {package}", hint="add Debian's security or backports suite and run `apt-get update`"
        )
    return found.group(1)


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
