"""A layer as the tar of an OCI image: whiteouts by name, times to the nanosecond, the same bytes for the same layer."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

import zstandard

from dsec.core.errors import StorageError, UnsupportedError
from dsec.image.archive import OPAQUE_MARK, WHITEOUT_MARK
from dsec.image.scan import OPAQUE_XATTR, Entry, is_whiteout, kept_xattrs, open_inside, walk
from dsec.storage.layers import LayerKind, LayerLocation
from dsec.storage.mounts import mount_erofs
from dsec.storage.space import require_free
from dsec.wire.images import Compression

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SPACE_CHECK_BYTES: Final = 64 << 20
_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
_XATTR_PREFIX: Final = "SCHILY.xattr."
_NS: Final = 1_000_000_000


@dataclass(slots=True)
class PackedFile:
    """What has been written: digests as the OCI has them, of the file and of the tar inside."""

    digest: str
    size: int
    diff_id: str
    dropped: int = 0  # device nodes and sockets, which an image does not hold


def pack_layer(layer: LayerLocation, blob: Path | None, target: Path, compression: Compression) -> PackedFile:
    """Write the new file `target`. `blob` is where the layer's data is, when it is loaded from a store.

    Raises UnsupportedError for names that an image cannot hold, StorageError when the layer cannot be read.
    """
    with _opened(layer, blob) as top, target.open("xb") as file:
        out = _Hashed(file, target.parent)
        inner = _Hashed(cast(IO[bytes], _compressor(out, compression)), None)
        # tarfile writes and tells, no more.
        with tarfile.open(
            fileobj=cast(Any, inner), mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            dropped = _write(top, archive)
        if compression is not Compression.NONE:
            inner.file.close()
        file.flush()
        os.fsync(file.fileno())
    return PackedFile(f"sha256:{out.hash.hexdigest()}", out.size, f"sha256:{inner.hash.hexdigest()}", dropped)


@contextmanager
def _opened(layer: LayerLocation, blob: Path | None) -> Iterator[int]:
    """The top of the layer's tree."""
    try:
        if layer.kind is LayerKind.DIRECTORY:
            fd = os.open(layer.meta, _DIRECTORY)
        else:
            fd = mount_erofs(layer.meta, blob or layer.blob)
    except OSError as error:
        raise StorageError(f"layer {layer.digest[:12]} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _write(top: int, archive: tarfile.TarFile) -> int:
    links: dict[int, bytes] = {}
    dropped = 0
    try:
        for entry in walk(top):
            dropped += _put(entry, links, archive)
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep every member, for nobody
    except OSError as error:
        raise StorageError(f"the layer cannot be read: {error.strerror}") from error
    return dropped


def _put(entry: Entry, links: dict[int, bytes], archive: tarfile.TarFile) -> bool:
    """Whether it was left out."""
    info, directory = entry.info, entry.path.rpartition(b"/")[0]
    if is_whiteout(info):
        archive.addfile(_mark(_joined(directory, WHITEOUT_MARK + entry.name)))
        return False
    if entry.name.startswith(WHITEOUT_MARK):
        raise UnsupportedError(f"{os.fsdecode(entry.path)[:200]!r} has a name that no image can hold")
    member = _member(entry)
    if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
        first = links.setdefault(info.st_ino, entry.path)
        if first != entry.path:
            member.type, member.linkname = tarfile.LNKTYPE, os.fsdecode(first)
            archive.addfile(member)
            return False
    if stat.S_ISLNK(info.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.fsdecode(os.readlink(entry.name, dir_fd=entry.directory))
        archive.addfile(member)
    elif stat.S_ISFIFO(info.st_mode):
        member.type = tarfile.FIFOTYPE
        archive.addfile(member)
    elif stat.S_ISDIR(info.st_mode):
        _put_directory(entry, member, archive)
    elif stat.S_ISREG(info.st_mode):
        _put_file(entry, member, archive)
    else:
        return True
    return False


def _put_directory(entry: Entry, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    fd = os.dup(entry.directory) if not entry.path else open_inside(entry.directory, entry.name, _DIRECTORY)
    try:
        xattrs = kept_xattrs(fd)
    finally:
        os.close(fd)
    member.type = tarfile.DIRTYPE
    opaque = xattrs.pop(OPAQUE_XATTR, None) == b"y"
    _add_xattrs(member, xattrs)
    archive.addfile(member)
    if opaque:
        archive.addfile(_mark(_joined(entry.path, OPAQUE_MARK)))


def _put_file(entry: Entry, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    fd = open_inside(entry.directory, entry.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as content:
        member.size = os.fstat(fd).st_size
        _add_xattrs(member, kept_xattrs(fd))
        archive.addfile(member, content)


def _member(entry: Entry) -> tarfile.TarInfo:
    info = entry.info
    member = tarfile.TarInfo(os.fsdecode(entry.path) or "./")
    member.mode = stat.S_IMODE(info.st_mode)
    member.uid, member.gid = info.st_uid, info.st_gid
    seconds, nanoseconds = divmod(info.st_mtime_ns, _NS)
    member.mtime = seconds
    if nanoseconds and seconds >= 0:
        member.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09d}"}
    return member


def _add_xattrs(member: tarfile.TarInfo, xattrs: dict[bytes, bytes]) -> None:
    found = {
        _XATTR_PREFIX + os.fsdecode(name): value.decode("utf-8", "surrogateescape") for name, value in xattrs.items()
    }
    member.pax_headers = {**member.pax_headers, **found}


def _mark(path: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(os.fsdecode(path))
    member.mode = 0
    return member


def _joined(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _compressor(out: _Hashed, compression: Compression) -> Any:
    if compression is Compression.GZIP:
        return gzip.GzipFile(filename="", fileobj=cast(Any, out), mode="wb", compresslevel=_GZIP_LEVEL, mtime=0)
    if compression is Compression.ZSTD:
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        return compressor.stream_writer(cast(Any, out), closefd=False)
    return out


@dataclass(slots=True)
class _Hashed:
    """A writer that hashes and counts what passes, and looks after the disk when it knows it."""

    file: IO[bytes]
    place: Path | None
    hash: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    unchecked: int = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        self.unchecked += len(data)
        if self.place is not None and self.unchecked >= _SPACE_CHECK_BYTES:
            self.unchecked = 0
            require_free(self.place)
        self.file.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""
