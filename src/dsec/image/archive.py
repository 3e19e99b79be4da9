"""Reading tar archives that may be hostile: one pass, bounded memory, any of four compressions."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final, Protocol, cast

import zstandard

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.image.stage import Attributes, Content, Stage

_READ_BYTES: Final = 1 << 20
_XZ_MEMORY_BYTES: Final = 256 << 20
_ZSTD_WINDOW_BYTES: Final = 128 << 20
_XATTR_PREFIX: Final = "SCHILY.xattr."
WHITEOUT_MARK: Final = b".wh."
OPAQUE_MARK: Final = b".wh..wh..opq"
_TRAILER_BYTES_MAX: Final = 64 << 20
_STREAM_BYTES_MAX: Final = 2 * limits.IMAGE_BYTES_MAX  # content, headers and what is skipped
_TAKEN: Final = "a tar file is taken plain or compressed by gzip, xz or zstd"
_UNDECODABLE: Final = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError)
# tarfile lets many kinds through when headers are nonsense; long names nest, hence the recursion.
_MALFORMED: Final = (tarfile.TarError, ValueError, LookupError, ArithmeticError, TypeError, RecursionError)


def unpack(raw: _Source, stage: Stage) -> None:
    """Put the members of an archive into `stage`. Raises InvalidArgumentError or LimitError."""
    with _members(raw) as (archive, reader):
        for member in _each(archive, reader):
            _put(member, _path(member), archive, stage)


def unpack_layer(raw: _Source, stage: Stage) -> None:
    """As `unpack`, for a layer of an image whose whiteouts have been applied: they are not files."""
    with _members(raw) as (archive, reader):
        for member in _each(archive, reader):
            path = _path(member)
            if not path.rpartition(b"/")[2].startswith(WHITEOUT_MARK):
                _put(member, path, archive, stage)


def unpack_upper(raw: _Source, stage: Stage) -> None:
    """As `unpack`, for a layer of an image that lies above others here, too: what it hides of them stays hidden.

    Raises InvalidArgumentError or LimitError.
    """
    hidden: set[bytes] = set()
    opaque: set[bytes] = set()
    with _members(raw) as (archive, reader):
        for member in _each(archive, reader):
            path = _path(member)
            directory, _, name = path.rpartition(b"/")
            if not name.startswith(WHITEOUT_MARK):
                _put(member, path, archive, stage)
            elif name == OPAQUE_MARK:
                opaque.add(directory)
            elif not name.startswith(WHITEOUT_MARK + WHITEOUT_MARK):
                hidden.add(_hidden(directory, name))
            if len(hidden) + len(opaque) > limits.IMAGE_ENTRIES_MAX:
                raise LimitError(f"the archive hides more than {limits.IMAGE_ENTRIES_MAX} files")
    if b"" in opaque:
        raise InvalidArgumentError("the archive hides all that could lie below it", hint="build it as an image")
    for path in sorted(opaque):
        stage.opaque(path)
    for path in sorted(hidden):
        if not stage.has(path):  # its own files stay
            stage.whiteout(path)


def _hidden(directory: bytes, mark: bytes) -> bytes:
    name = mark.removeprefix(WHITEOUT_MARK)
    if name in (b"", b".", b".."):
        raise InvalidArgumentError(f"the archive hides a file called {os.fsdecode(name)!r}")
    return directory + b"/" + name if directory else name


def apply_whiteouts(raw: _Source, stage: Stage) -> None:
    """Remove from `stage` what this layer hides of those below it.

    A pass of its own before `unpack_layer`: a layer may name a file first and hide its directory's old content after.
    """
    with _members(raw) as (archive, reader):
        for member in _each(archive, reader):
            directory, _, name = _path(member).rpartition(b"/")
            if name == OPAQUE_MARK:
                stage.clear(directory)
            elif name.startswith(WHITEOUT_MARK + WHITEOUT_MARK):
                continue  # other marks of old storage drivers: nothing to hide
            elif name.startswith(WHITEOUT_MARK):
                stage.remove(_hidden(directory, name))


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A member of an archive that is looked into, not unpacked."""

    name: str
    size: int
    content: Content  # read it before the next member is asked for
    target: str | None = None  # of a link: the member that it stands for


def files_of(raw: _Source) -> Iterator[ArchivedFile]:
    """The files and links of an archive, in order. Raises InvalidArgumentError or LimitError."""
    with _members(raw) as (archive, reader):
        for member in _each(archive, reader):
            name = os.fsdecode(_path(member))
            if member.isreg():
                yield ArchivedFile(name, member.size, _Content(archive, member))
            elif member.issym() or member.islnk():
                start = "" if member.islnk() else posixpath.dirname(name)
                yield ArchivedFile(name, 0, io.BytesIO(), posixpath.normpath(posixpath.join(start, member.linkname)))


def _put(member: tarfile.TarInfo, path: bytes, archive: tarfile.TarFile, stage: Stage) -> None:
    if member.isdir():
        stage.directory(path, _attributes(member))
        return
    if not path:
        raise InvalidArgumentError("the archive has a member without a name")
    if member.isreg():
        stage.file(path, _attributes(member), _Content(archive, member))
    elif member.issym():
        stage.symlink(path, _bytes(member.linkname), _attributes(member))
    elif member.islnk():
        stage.hardlink(path, _relative(_bytes(member.linkname), "hard link target"))
    elif member.isfifo():
        stage.fifo(path, _attributes(member))
    elif member.isdev():
        stage.dropped.devices += 1
    else:
        raise InvalidArgumentError(f"{os.fsdecode(path)!r} is of the unknown type {member.type!r}")


def _path(member: tarfile.TarInfo) -> bytes:
    return _relative(_bytes(member.name), "name")


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the archive holds text that is no text: {text[:80]!r}") from error


def _relative(raw: bytes, what: str) -> bytes:
    """`raw` from the top of the tree: leading "/" and "./" mean the top, ".." is refused."""
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in raw:
        raise InvalidArgumentError(f"the {what} {os.fsdecode(raw[:200])!r} in the archive leads out of it")
    return b"/".join(parts)


def _attributes(member: tarfile.TarInfo) -> Attributes:
    headers = member.pax_headers
    xattrs = {
        _bytes(key.removeprefix(_XATTR_PREFIX)): _bytes(value)
        for key, value in headers.items()
        if key.startswith(_XATTR_PREFIX)
    }
    return Attributes(member.mode & 0o7777, member.uid, member.gid, _mtime_ns(member), xattrs)


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """In whole nanoseconds from the text of the pax record: a float has not enough digits."""
    text = member.pax_headers.get("mtime")
    if text is None:
        return int(member.mtime) * 1_000_000_000
    seconds, _, fraction = text.partition(".")
    digits = (fraction + "0" * 9)[:9]
    if not seconds.isdecimal() or not digits.isdecimal() or len(seconds) > 20:
        return 0  # before 1970, or no number
    return int(seconds) * 1_000_000_000 + int(digits)


# ---- reading ---------------------------------------------------------------------------------------


@contextmanager
def _members(raw: _Source) -> Iterator[tuple[tarfile.TarFile, _Forward]]:
    reader = _Forward(_decompressed(raw))
    try:
        archive = tarfile.TarFile(
            fileobj=reader,  # type: ignore[arg-type]  # read, tell and seek are all that tarfile asks for
            mode="r",
            encoding="utf-8",
            errors="surrogateescape",
        )
    except _MALFORMED as error:
        raise InvalidArgumentError(f"not a tar archive: {error}", hint=_TAKEN) from error
    with archive:
        yield archive, reader
    reader.drain()


def _each(archive: tarfile.TarFile, reader: _Forward) -> Iterator[tarfile.TarInfo]:
    while True:
        reader.budget = limits.TAR_HEADER_BYTES_MAX
        try:
            member = archive.next()
        except _MALFORMED as error:
            raise InvalidArgumentError(f"the archive is damaged: {error}") from error
        if member is None:
            break
        reader.budget = None
        archive.members.clear()  # type: ignore[attr-defined]  # it would keep every member, to answer questions that nobody asks
        yield member
    # tarfile takes a damaged header for the end. The end is a block of zeros, or nothing more to read.
    if reader.last.strip(b"\0"):
        raise InvalidArgumentError(f"the archive is damaged near byte {reader.tell()}")


class _Forward:
    """A decompressed stream as tarfile wants it: it only ever goes forward, and headers have a budget.

    tarfile reads pax records, long names and sparse maps into memory whole, however large they say they are.
    """

    def __init__(self, raw: _Source) -> None:
        self._raw = raw
        self._position = 0
        self.budget: int | None = limits.TAR_HEADER_BYTES_MAX
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if self.budget is not None:
            if not 0 <= size <= self.budget:
                raise LimitError(
                    f"a member of the archive has more than {limits.TAR_HEADER_BYTES_MAX} bytes of headers"
                )
            self.budget -= size
        data = self._read(size)
        # A decompressor may give less than asked before the end; tarfile takes that for the end.
        while 0 < len(data) < size and (more := self._read(size - len(data))):
            data += more
        self.last = data
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or position < self._position:
            raise tarfile.ReadError("it refers back to what was read before")
        while self._position < position and self._read(min(position - self._position, _READ_BYTES)):
            pass
        return self._position

    def drain(self) -> None:
        """To the end, so that a checksum over the whole is checked."""
        end = self._position + _TRAILER_BYTES_MAX
        while self._read(_READ_BYTES):
            if self._position > end:
                raise InvalidArgumentError("the archive goes on after its end")

    def _read(self, size: int) -> bytes:
        try:
            data = self._raw.read(size)
        except _UNDECODABLE as error:
            raise InvalidArgumentError(f"the archive is damaged: {error}") from error
        self._position += len(data)
        if self._position > _STREAM_BYTES_MAX:
            raise LimitError(f"the archive holds more than {_STREAM_BYTES_MAX} bytes")
        return data


class _Content:
    """The bytes of a member. Raises InvalidArgumentError where they are not what its header says."""

    def __init__(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        end = 0
        for offset, size in getattr(member, "sparse", None) or ():
            # tarfile searches a map that is out of order from the start, for each piece again.
            if offset < end or size < 0 or offset + size > member.size:
                raise InvalidArgumentError(f"the map of the sparse file {member.name[:200]!r} is not in order")
            end = offset + size
        content = archive.extractfile(member)
        assert content is not None  # regular files have one
        self._content = content

    def read(self, size: int, /) -> bytes:
        try:
            return self._content.read(size)
        except _MALFORMED as error:
            raise InvalidArgumentError(f"the archive is damaged: {error}") from error


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _decompressed(raw: _Source) -> _Source:
    """By content, never by name."""
    head = _Head(raw)
    magic = head.peek(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(_Source, gzip.GzipFile(fileobj=cast(IO[bytes], head), mode="rb"))
    if magic.startswith(b"\x28\xb5\x2f\xfd") or (magic[1:4] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F):
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        return cast(_Source, decompressor.stream_reader(cast(IO[bytes], head), read_across_frames=True))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return _Xz(head)
    return head


class _Head:
    """A stream whose first bytes can be looked at."""

    def __init__(self, raw: _Source) -> None:
        self._raw = raw
        self._seen = b""

    def peek(self, size: int) -> bytes:
        while len(self._seen) < size and (more := self._raw.read(size - len(self._seen))):
            self._seen += more
        return self._seen[:size]

    def read(self, size: int = -1) -> bytes:
        if self._seen:
            seen, self._seen = self._seen, b""
            if 0 <= size < len(seen):
                seen, self._seen = seen[:size], seen[size:]
            return seen
        return self._raw.read(size)


class _Xz:
    """lzma.LZMAFile without its hole: it has no bound for the memory that a stream may ask for."""

    def __init__(self, raw: _Source) -> None:
        self._raw = raw
        self._decoder: lzma.LZMADecompressor | None = None
        self._input = b""
        self._any = False

    def read(self, size: int, /) -> bytes:
        while True:
            if self._decoder is None and not self._next_stream():
                return b""
            assert self._decoder is not None
            if not self._input and self._decoder.needs_input:
                self._input = self._raw.read(_READ_BYTES)
                if not self._input:
                    raise EOFError("the xz stream ends in the middle")
            data, self._input = self._decoder.decompress(self._input, size), b""
            if self._decoder.eof:
                self._input, self._decoder = self._decoder.unused_data, None
            if data:
                return data

    def _next_stream(self) -> bool:
        """Streams may follow each other, with zeros between."""
        while True:
            if self._any:
                self._input = self._input.lstrip(b"\0")
            if self._input:
                break
            self._input = self._raw.read(_READ_BYTES)
            if not self._input:
                return False
        self._any = True
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
        return True
