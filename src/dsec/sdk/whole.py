"""Bytes that come in pieces and are wanted as one."""

from __future__ import annotations

import io
from typing import Final

_EXPECTED_BYTES_MIN: Final = 1 << 20  # below, memory for them twice is nothing


class Whole:
    """Put together as they come. What their number is known of before is in memory once, and not again to be joined:
    of large ones the pages that are touched first cost more than all the rest."""

    __slots__ = ("_buffer", "_max", "_size")

    def __init__(self, bytes_max: int) -> None:
        self._buffer = io.BytesIO()
        self._max = bytes_max
        self._size = 0

    def expect(self, size: int) -> None:
        """About so many will come. Says nothing once some have."""
        if self._size == 0 and size >= _EXPECTED_BYTES_MIN:
            self._buffer = io.BytesIO(bytes(min(size, self._max)))

    def add(self, piece: bytes) -> bool:
        """False when these are too many."""
        if self._size + len(piece) > self._max:
            return False
        self._buffer.write(piece)
        self._size += len(piece)
        return True

    def take(self) -> bytes:
        """All of them; nothing is added afterwards."""
        self._buffer.truncate(self._size)
        return self._buffer.getvalue()
