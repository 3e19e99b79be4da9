"""Where the bytes of an output record are: in memory while they are few, then in one sparse file of a fixed layout."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from dsec.core.errors import StorageError
from dsec.core.limits import RECORD_HOLES_MAX
from dsec.wire.frames import Channel

OUT: Final = int(Channel.OUT)
ERR: Final = int(Channel.ERR)
Bytes = bytes | bytearray | memoryview

_MAGIC: Final = b"DSECREC\x01"  # the last byte is the format's version
_HEADER_BYTES: Final = 4096
_FIXED: Final = struct.Struct("<8s3Q7QI")
_HOLE: Final = struct.Struct("<BQQ")


class Layout(NamedTuple):
    """How a budget is divided. The sum is the budget."""

    head: int
    ring_out: int
    ring_err: int

    def ring(self, channel: int) -> int:
        return self.ring_out if channel == OUT else self.ring_err


class Position(NamedTuple):
    """Where a record stands. Pairs are (stdout, stderr)."""

    sequence: int
    produced: tuple[int, int]
    head: tuple[int, int]
    dirty: tuple[int, int]  # above `produced` while a ring is being written: what that overwrites is not to be trusted
    holes: tuple[tuple[int, int, int], ...]  # (channel, start, end)


class Store(Protocol):
    """Heads and rings of both channels, each a stretch of bytes from position 0."""

    def write_head(self, channel: int, position: int, data: Bytes) -> None: ...

    def write_ring(self, channel: int, position: int, data: Bytes) -> None: ...

    def read_head(self, channel: int, position: int, size: int) -> bytes: ...

    def read_ring(self, channel: int, position: int, size: int) -> bytes: ...


class MemoryStore:
    __slots__ = ("_heads", "_rings")

    def __init__(self) -> None:
        self._heads = {OUT: bytearray(), ERR: bytearray()}
        self._rings = {OUT: bytearray(), ERR: bytearray()}

    def write_head(self, channel: int, position: int, data: Bytes) -> None:
        _write(self._heads[channel], position, data)

    def write_ring(self, channel: int, position: int, data: Bytes) -> None:
        _write(self._rings[channel], position, data)

    def read_head(self, channel: int, position: int, size: int) -> bytes:
        return bytes(self._heads[channel][position : position + size])

    def read_ring(self, channel: int, position: int, size: int) -> bytes:
        return bytes(self._rings[channel][position : position + size])

    def copy_to(self, other: Store) -> None:
        for channel in (OUT, ERR):
            other.write_head(channel, 0, self._heads[channel])
            other.write_ring(channel, 0, self._rings[channel])


class FileStore:
    """Header, both heads, both rings, at fixed places of a sparse file: only what was written takes room.

    The descriptor may be closed at any time; the next use opens the file again.
    """

    __slots__ = ("_file", "_heads", "_path", "_rings")

    def __init__(self, path: Path, layout: Layout, file: int | None) -> None:
        self._path = path
        self._file = file
        self._heads = {OUT: _HEADER_BYTES, ERR: _HEADER_BYTES + layout.head}
        rings = _HEADER_BYTES + 2 * layout.head
        self._rings = {OUT: rings, ERR: rings + layout.ring_out}

    @classmethod
    def create(cls, path: Path, layout: Layout) -> FileStore:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return cls(path, layout, os.open(path, flags, 0o600))

    @classmethod
    def open(cls, path: Path, layout: Layout) -> tuple[FileStore, Position]:
        """Raises StorageError when `path` is not a record of this layout."""
        try:
            store = cls(path, layout, None)
            header = os.pread(store._open(), _HEADER_BYTES, 0)
        except OSError as error:
            raise StorageError(f"the record {path.name} cannot be read") from error
        try:
            return store, _decode_header(header, layout)
        except (struct.error, ValueError) as error:
            store.close()
            raise StorageError(f"{path.name} is not a record: {error}") from error

    def write_header(self, layout: Layout, position: Position) -> None:
        _write_at(self._open(), _encode_header(layout, position), 0)

    def write_head(self, channel: int, position: int, data: Bytes) -> None:
        _write_at(self._open(), data, self._heads[channel] + position)

    def write_ring(self, channel: int, position: int, data: Bytes) -> None:
        _write_at(self._open(), data, self._rings[channel] + position)

    def read_head(self, channel: int, position: int, size: int) -> bytes:
        return self._read(self._heads[channel] + position, size)

    def read_ring(self, channel: int, position: int, size: int) -> bytes:
        return self._read(self._rings[channel] + position, size)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _read(self, position: int, size: int) -> bytes:
        try:
            data = os.pread(self._open(), size, position)
        except OSError as error:
            raise StorageError(f"the record {self._path.name} cannot be read") from error
        if len(data) != size:
            raise StorageError(f"the record {self._path.name} is shorter than its header says")
        return data

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._file


def _encode_header(layout: Layout, position: Position) -> bytes:
    holes = position.holes[-2 * RECORD_HOLES_MAX :]
    return _FIXED.pack(
        _MAGIC, *layout, position.sequence, *position.produced, *position.head, *position.dirty, len(holes)
    ) + b"".join(_HOLE.pack(*hole) for hole in holes)


def _decode_header(data: bytes, layout: Layout) -> Position:
    magic, *numbers = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("its beginning is another's")
    if tuple(numbers[:3]) != layout:
        raise ValueError("its budget is another's")
    sequence, out, err, head_out, head_err, dirty_out, dirty_err, count = numbers[3:]
    if count > 2 * RECORD_HOLES_MAX or head_out > out or head_err > err or dirty_out < out or dirty_err < err:
        raise ValueError("its numbers contradict each other")
    holes = tuple(_HOLE.unpack_from(data, _FIXED.size + index * _HOLE.size) for index in range(count))
    return Position(sequence, (out, err), (head_out, head_err), (dirty_out, dirty_err), holes)


def _write(into: bytearray, position: int, data: Bytes) -> None:
    if position > len(into):
        into.extend(bytes(position - len(into)))
    into[position : position + len(data)] = data


def _write_at(file: int, data: Bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
