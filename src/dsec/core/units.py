"""Text such as "4GiB" becomes a number once, at the border."""

from __future__ import annotations

import re

from dsec.core.errors import InvalidArgumentError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?B?|B)?\s*\Z", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(value: int | str, what: str = "size") -> int:
    """Bytes from an int, or from text: "512", "64MiB", "1.5GiB", "2GB". Raises InvalidArgumentError.

    `KiB`, `MiB`, … and `K`, `M`, … are powers of 1024; `KB`, `MB`, … are powers of 1000.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidArgumentError(f"{what} must be bytes or text such as '4GiB', not {type(value).__name__}")
    if isinstance(value, int):
        if value < 0:
            raise InvalidArgumentError(f"{what} must not be negative, and is {value}")
        return value
    match = _SIZE.match(value)
    if not match:
        raise InvalidArgumentError(f"{what} {value[:40]!r} is not a size", hint="write 512, 64MiB or 1.5GiB")
    number, unit = match.group(1), (match.group(2) or "").upper()
    base = 1000 if len(unit) == 2 and unit[1] == "B" else 1024
    power = _POWERS[unit[0] if unit and unit != "B" else ""]
    return int(float(number) * base**power) if "." in number else int(number) * base**power


def format_number(value: float) -> str:
    """For people: 4194304.0 → "4194304", never "4.1943e+06"."""
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else f"{value:g}"


def format_size(size_bytes: int) -> str:
    """For people: 1536 → "1.5 KiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
