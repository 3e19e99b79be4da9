"""Whether a case's output is what was expected. Pure; both may be anything."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Final

from dsec.wire.calls import Compare

_WITHIN: Final = 1e-6  # relative or absolute: what judges of numeric tasks usually grant
_NUMBER_BYTES_MAX: Final = 64  # longer words are not numbers that a float could tell apart


def is_right(output: bytes, expected: bytes, how: Compare) -> bool:
    if output == expected:
        return True
    match how:
        case Compare.EXACT:
            return False
        case Compare.LINES:
            return _lines(output) == _lines(expected)
        case Compare.TOKENS:
            return output.split() == expected.split()
        case Compare.NUMBERS:
            return all(
                ours is not None and theirs is not None and _same(ours, theirs)
                for ours, theirs in zip_longest(output.split(), expected.split())
            )


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


def _same(ours: bytes, theirs: bytes) -> bool:
    if ours == theirs:
        return True
    if max(len(ours), len(theirs)) > _NUMBER_BYTES_MAX or b"_" in ours + theirs:
        return False
    try:
        first, second = float(ours), float(theirs)
    except ValueError:
        return False
    return math.isclose(first, second, rel_tol=_WITHIN, abs_tol=_WITHIN)
