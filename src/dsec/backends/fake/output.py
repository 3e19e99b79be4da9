"""Output of an exec that is not acknowledged yet, and stdin that is not read yet."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import NamedTuple


class Piece(NamedTuple):
    sequence: int
    offset: int
    data: memoryview


class Retained:
    """One channel's output from the acknowledged offset on, findable by offset."""

    __slots__ = ("_chunks", "_first", "_offsets", "acked", "produced")

    def __init__(self) -> None:
        self.produced = 0
        self.acked = 0
        self._offsets: list[int] = []
        self._chunks: list[tuple[int, bytes]] = []
        self._first = 0  # chunks below are acknowledged and wait for the next clean-up

    def add(self, sequence: int, data: bytes) -> None:
        self._offsets.append(self.produced)
        self._chunks.append((sequence, data))
        self.produced += len(data)

    def ack(self, offset: int) -> None:
        self.acked = max(self.acked, min(offset, self.produced))
        while self._first < len(self._chunks):
            if self._offsets[self._first] + len(self._chunks[self._first][1]) > self.acked:
                break
            self._first += 1
        if self._first > 256 or self._first == len(self._chunks):
            del self._offsets[: self._first], self._chunks[: self._first]
            self._first = 0

    def at(self, offset: int) -> Piece | None:
        """What follows from an offset on, up to the end of its chunk; None when nothing has been produced there."""
        if offset >= self.produced:
            return None
        index = bisect_right(self._offsets, offset) - 1
        sequence, data = self._chunks[index]
        return Piece(sequence, offset, memoryview(data)[offset - self._offsets[index] :])


class Stdin:
    """Bytes that came for an exec. `taken` is the offset of the next byte that is accepted."""

    __slots__ = ("_buffer", "_changed", "eof", "on_read", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.eof = False
        self.on_read: object = None
        self._buffer = bytearray()
        self._changed = asyncio.Event()

    def feed(self, offset: int, data: bytes) -> bool:
        """False when the bytes would leave a hole. What is below `taken` is skipped."""
        if offset > self.taken:
            return False
        fresh = data[self.taken - offset :]
        if not self.eof:
            self._buffer += fresh
            self.taken += len(fresh)
            self._changed.set()
        return True

    def end(self) -> None:
        self.eof = True
        self._changed.set()

    async def read(self, size: int) -> bytes:
        while not self._buffer and not self.eof:
            self._changed.clear()
            await self._changed.wait()
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if piece and callable(self.on_read):
            self.on_read(len(piece))
        return piece
