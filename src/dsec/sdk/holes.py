"""Files without their zeroes: a run of them is left out, and reads the same."""

from __future__ import annotations

import os
from typing import Final

_HOLE_BYTES: Final = 64 << 10
_ZEROES: Final = bytes(_HOLE_BYTES)


def write_with_holes(file: int, data: bytes) -> None:
    """Writes at the file's position; whole runs of zeroes are skipped. The caller sets the length at the end.

    Only for files that are new: what is skipped must not hold anything.
    """
    view = memoryview(data)
    at = start = 0
    while at < len(data):
        step = min(_HOLE_BYTES, len(data) - at)
        # The ends first: they tell nearly everything else apart, and cost nothing.
        if data[at] == 0 and data[at + step - 1] == 0 and data[at : at + step] == _ZEROES[:step]:
            _write_all(file, view[start:at])
            os.lseek(file, step, os.SEEK_CUR)
            start = at + step
        at += step
    _write_all(file, view[start:])


def _write_all(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]
