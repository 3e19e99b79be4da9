"""Several overlays of one disk become one that reads the same, without a program: theirs are read as they lie.

What machines and their monitors have written is hostile: a table that points anywhere costs what its own file is long,
and no more.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.copying import PIECE_BYTES, data_of
from dsec.backends.vm.qcow2 import CLUSTER, check_overlay, write_overlay
from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.core.faults import fault_point
from dsec.core.limits import DISK_BYTES_MAX

_ENTRIES: Final = CLUSTER // 8  # of one second-level table, which says where 512 MiB are
_COUNTS: Final = CLUSTER // 2  # of one block of reference counts, which are of 16 bits
_COUNTS_AT: Final = 2 * CLUSTER  # the first of those
_PLACE: Final = 0x00FF_FFFF_FFFF_FE00  # of an entry: where it points
_COMPRESSED: Final = 1 << 62
_OWN: Final = 1 << 63  # nobody else points there
_ZERO: Final = 1
_BLOCK: Final = 4096  # of a file system: what is not empty takes as much
_EMPTY_TABLES_MAX: Final = 2_048  # of a disk of 1 TiB; looked through in seconds
_CLUSTER_BITS: Final = CLUSTER.bit_length() - 1
_BITS_AT: Final = 20  # of the header
_TABLE_AT: Final = 36  # its entries, then where it is


@dataclass(frozen=True, slots=True)
class _Overlay:
    fd: int
    name: str
    size_bytes: int  # of the disk
    content_bytes: int  # of the file, without its holes
    table: array[int]  # where its second-level tables are

    @classmethod
    def open(cls, path: Path, held: ExitStack) -> _Overlay:
        try:
            size = check_overlay(path)
        except InvalidArgumentError as error:
            raise StorageError(f"{path.name} of a machine's disk cannot be read: {error.message}") from error
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, fd)
        head = os.pread(fd, 64, 0)
        (bits,) = struct.unpack_from(">I", head, _BITS_AT)
        entries, at = struct.unpack_from(">IQ", head, _TABLE_AT)
        needed = -(-size // (_ENTRIES * CLUSTER))
        if bits != _CLUSTER_BITS or entries < needed or size > DISK_BYTES_MAX:
            raise StorageError(f"{path.name} of a machine's disk is not as it was made")
        table = _words(fd, at, needed, path.name)
        content = sum(end - start for start, end in data_of(fd, os.fstat(fd).st_size))
        # Few tables are empty, and none is there twice: what lies costs no time, either.
        if sum(1 for entry in table if entry & _PLACE) > max(content // _BLOCK, _EMPTY_TABLES_MAX):
            raise StorageError(f"{path.name} of a machine's disk says more than there is in it")
        return cls(fd, path.name, size, content, table)

    def places(self, number: int) -> array[int] | None:
        """Of 512 MiB: what it says of each cluster, 0 for nothing. None for nothing at all."""
        at = self.table[number] & _PLACE
        return _words(self.fd, at, _ENTRIES, self.name) if at else None


def merge(files: Sequence[Path], target: Path) -> None:
    """`target`, which is new, reads as all of `files` (lowest first) above what the lowest stands on; they stay.

    Blocking. Raises OSError (nothing is overwritten), StorageError for what is no overlay of one disk.
    """
    with ExitStack() as held:
        overlays = [_Overlay.open(file, held) for file in files]
        if len({overlay.size_bytes for overlay in overlays}) != 1:
            raise StorageError("overlays of one disk are of several sizes")
        fault_point("vm.merge")
        try:
            write_overlay(target, backing="", backing_format="raw", size_bytes=overlays[0].size_bytes)
            with target.open("r+b", buffering=0) as file:
                _Merged(file.fileno(), overlays).write()
        except BaseException:
            target.unlink(missing_ok=True)
            raise


class _Merged:
    """In a new overlay, of which only tables are there."""

    def __init__(self, fd: int, overlays: Sequence[_Overlay]) -> None:
        self._fd = fd
        self._overlays = overlays
        self._table_at: int = struct.unpack(">Q", os.pread(fd, 8, _TABLE_AT + 4))[0]
        self.end = os.fstat(fd).st_size
        # Clusters of a file that lies can be the same ones over and over.
        self._left = sum(overlay.content_bytes for overlay in overlays)

    def write(self) -> None:
        table = array("Q", bytes(8 * len(self._overlays[0].table)))
        for number in range(len(table)):
            places = self._places(number)
            if places is not None:
                at = self._take(1)
                self._write_words(places, at)
                table[number] = at | _OWN
        fault_point("vm.merge.tables")
        self._write_words(table, self._table_at)
        self._write_counts()

    def _places(self, number: int) -> array[int] | None:
        """Of 512 MiB, after their clusters were copied."""
        found = [places for overlay in self._overlays if (places := overlay.places(number)) is not None]
        owners = [overlay for overlay in self._overlays if overlay.table[number] & _PLACE]
        if not found:
            return None
        above = list(zip(reversed(owners), reversed(found), strict=True))
        merged = array("Q", bytes(CLUSTER))
        run = _Run(self)
        for at in range(_ENTRIES):
            for overlay, places in above:
                if entry := places[at]:
                    merged[at] = self._copied(overlay, entry, run)
                    break
        run.end()
        return merged

    def _copied(self, overlay: _Overlay, entry: int, run: _Run) -> int:
        if entry & _COMPRESSED:
            raise StorageError(f"{overlay.name} of a machine's disk is not as it was made")
        if entry & _ZERO or not entry & _PLACE:
            return _ZERO if entry & _ZERO else 0
        return run.add(overlay.fd, entry & _PLACE) | _OWN

    def _take(self, clusters: int) -> int:
        at, self.end = self.end, self.end + clusters * CLUSTER
        return at

    def _write_counts(self) -> None:
        """One for each cluster; the first block of them is there, and those behind it count themselves."""
        more = 0
        while (more + 1) * _COUNTS < self.end // CLUSTER + more:
            more += 1
        at = self._take(more)
        blocks = array("Q", [_COUNTS_AT, *range(at, self.end, CLUSTER)])
        self._write_words(blocks, CLUSTER)
        counts = b"\0\1" * (self.end // CLUSTER)
        for number, place in enumerate(blocks):
            _write(self._fd, counts[number * CLUSTER : (number + 1) * CLUSTER], place)
        os.ftruncate(self._fd, self.end)

    def _write_words(self, words: array[int], at: int) -> None:
        _write(self._fd, _turned(words).tobytes(), at)

    def copy(self, source: int, at: int, length: int) -> None:
        """Behind what there is; what is behind the end of the source reads as zeros there, and does here."""
        to = self._take(length // CLUSTER)
        os.ftruncate(self._fd, self.end)
        for start, end in data_of(source, at + length, at):
            for place in range(start, end, PIECE_BYTES):
                piece = os.pread(source, min(PIECE_BYTES, end - place), place)
                self._left -= len(piece)
                if self._left < 0:
                    raise StorageError("a machine's disk says more than there is in it")
                _write(self._fd, piece, to + place - at)


class _Run:
    """Clusters that lie side by side are copied at once: places are given out before."""

    def __init__(self, merged: _Merged) -> None:
        self._merged = merged
        self._fd = -1
        self._at = self._length = self._to = 0

    def add(self, fd: int, at: int) -> int:
        if fd != self._fd or at != self._at + self._length:
            self.end()
            self._fd, self._at, self._to = fd, at, self._merged.end
        place = self._to + self._length
        self._length += CLUSTER
        return place

    def end(self) -> None:
        if self._length:
            self._merged.copy(self._fd, self._at, self._length)
        self._length = 0


def _words(fd: int, at: int, count: int, name: str) -> array[int]:
    content = os.pread(fd, count * 8, at)
    if len(content) != count * 8:
        raise StorageError(f"{name} of a machine's disk is damaged: a table is behind its end")
    return _turned(array("Q", content))


def _turned(words: array[int]) -> array[int]:
    """Between the order of this processor and that of the file. Changes them."""
    if sys.byteorder == "little":
        words = array("Q", words)
        words.byteswap()
    return words


def _write(fd: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count
