"""Pieces become one, whatever was said of their number before."""

from __future__ import annotations

import tracemalloc

import pytest

from dsec.sdk.whole import Whole

MIB = 1 << 20


@pytest.mark.parametrize("expected", [None, 0, 5, 3 * MIB, 4 * MIB, 64 * MIB])
def test_what_was_added_is_what_is_taken(expected: int | None) -> None:
    whole = Whole(100 * MIB)
    if expected is not None:
        whole.expect(expected)
    pieces = [bytes([number]) * (MIB + number) for number in range(3)] + [b"end"]

    assert all(whole.add(piece) for piece in pieces)
    whole.expect(9 * MIB)  # a file that is taken up in its middle

    assert whole.take() == b"".join(pieces)


def test_nothing_is_empty() -> None:
    whole = Whole(10)
    whole.expect(2 * MIB)

    assert whole.take() == b""


def test_too_many_are_not_taken() -> None:
    whole = Whole(5)

    assert whole.add(b"12345")
    assert not whole.add(b"6")


def test_what_is_known_to_come_is_in_memory_once() -> None:
    piece = b"x" * MIB
    tracemalloc.start()
    try:
        whole = Whole(64 * MIB)
        whole.expect(32 * MIB)
        for _ in range(32):
            whole.add(piece)
        taken = whole.take()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(taken) == 32 * MIB
    assert peak < 40 * MIB
