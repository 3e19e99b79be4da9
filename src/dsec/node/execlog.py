"""The journal of one sandbox's execs: an append-only file, in the page cache when `append` returns.

Execs end with their sandbox, and sandboxes end with the host's power. So their journal need only survive kill -9 of the
node, and an exec costs a few microseconds here instead of an fsync. Small output is part of the end entry.

    entry = u32le length | u32le crc32 of the body | body (msgpack ExecEntry)
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsec.core.errors import GoneError, ProtocolError, StorageError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.node.host import hint_of
from dsec.node.rows import ExecEndEntry, ExecEntry
from dsec.wire.codec import pack, unpack

ENTRY_BYTES_MAX: Final = 1 * MIB
_HEAD: Final = struct.Struct("<II")


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


class ExecLog:
    """Owned by one sandbox's exec table. Errors of the disk are StorageErrors; the log is as before then."""

    __slots__ = ("_end", "_file", "_make", "ended", "path")

    def __init__(self, path: Path, make: Callable[[Path], None] = _make_directory) -> None:
        """`make`: makes the directory of `path`, when the first entry is written."""
        self.path = path
        self._make = make
        self.ended = False  # then it is read only now and then, by whoever still has it: no descriptor is kept
        self._file: int | None = None
        self._end = 0

    @property
    def size(self) -> int:
        return self._end

    def load(self) -> list[tuple[int, ExecEntry]]:
        """Every whole entry with its position. What a killed writer left half written is cut off."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"the exec log {self.path} cannot be read") from error
        found, self._end = _decode(data)
        if self._end < len(data):
            os.truncate(self.path, self._end)
        return found

    def append(self, entry: ExecEntry) -> int:
        """Returns the entry's position."""
        position = self._end
        data = _encode(entry)
        try:
            fault_point("node.execlog.append")
            file = self._open(create=True)
            written = os.pwrite(file, data, position)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as error:
            self._cut(position)
            raise StorageError(
                f"the exec log could not be written: {error.strerror or error}",
                hint=hint_of(error, "is the node's disk full?"),
            ) from error
        self._end = position + len(data)
        return position

    def read_end(self, position: int) -> ExecEndEntry:
        """The end entry at this position, with its output. Raises GoneError once the log is removed."""
        try:
            file = self._open(create=False)
            length, check = _HEAD.unpack(os.pread(file, _HEAD.size, position))
            body = os.pread(file, min(length, ENTRY_BYTES_MAX), position + _HEAD.size)
            if zlib.crc32(body) != check:
                raise ValueError("its check sum is wrong")
            entry: ExecEntry = unpack(body, ExecEntry)  # type: ignore[arg-type]
        except FileNotFoundError as error:
            raise GoneError("the sandbox has ended, and its output is no longer kept") from error
        except (OSError, struct.error, ValueError, ProtocolError) as error:
            raise StorageError(f"an entry of the exec log {self.path} cannot be read") from error
        finally:
            if self.ended:
                self.close()
        if not isinstance(entry, ExecEndEntry):
            raise StorageError(f"an entry of the exec log {self.path} is not the end of an exec")
        return entry

    def rewrite(self, entries: Iterable[ExecEntry]) -> list[int]:
        """Replace the log by these entries, atomically; returns their positions."""
        fresh = self.path.with_suffix(".new")
        positions: list[int] = []
        size = 0
        try:
            with open(fresh, "wb") as file:
                for entry in entries:
                    data = _encode(entry)
                    file.write(data)
                    positions.append(size)
                    size += len(data)
            fresh.rename(self.path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise StorageError("the exec log could not be rewritten") from error
        self.close()
        self._end = size
        return positions

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self, *, create: bool) -> int:
        """Only writing makes the file: a late reader must not bring an ended sandbox's directory back."""
        if self._file is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
            try:
                self._file = os.open(self.path, flags, 0o600)
            except FileNotFoundError:
                if not create:
                    raise
                self._make(self.path.parent)
                self._file = os.open(self.path, flags, 0o600)
        return self._file

    def _cut(self, position: int) -> None:
        try:
            if self._file is not None:
                os.ftruncate(self._file, position)
        except OSError:
            # The half-written tail is overwritten by the next entry, or cut off at the next start.
            pass


def _encode(entry: ExecEntry) -> bytes:
    body = pack(entry)
    if len(body) > ENTRY_BYTES_MAX:
        raise StorageError(f"an entry of {len(body)} bytes does not fit the exec log")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _decode(data: bytes) -> tuple[list[tuple[int, ExecEntry]], int]:
    found: list[tuple[int, ExecEntry]] = []
    position = 0
    while position + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        body = data[start : start + length]
        if length > ENTRY_BYTES_MAX or len(body) != length or zlib.crc32(body) != check:
            break
        try:
            found.append((position, unpack(body, ExecEntry)))  # type: ignore[arg-type]
        except ProtocolError:
            break
        position = start + length
    return found, position
