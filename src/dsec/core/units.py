"""Text such as "4GiB" or "5m" becomes a number once, at the border."""

from __future__ import annotations

import math
import re

from dsec.core.errors import InvalidArgumentError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?B?|B)?\s*\Z", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*\Z")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


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


def parse_duration(value: float | int | str, what: str = "duration") -> float:
    """Seconds from a number, or from text: "250ms", "10s", "5m", "2h", "1d". Raises InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidArgumentError(f"{what} must be seconds or text such as '5m', not {type(value).__name__}")
    if isinstance(value, (int, float)):
        seconds = float(value)
    else:
        match = _DURATION.match(value)
        if not match:
            raise InvalidArgumentError(f"{what} {value[:40]!r} is not a duration", hint="write 10, 250ms, 5m or 2h")
        seconds = float(match.group(1)) * _SECONDS[match.group(2)]
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgumentError(f"{what} must be a finite number of seconds, not {seconds}")
    return seconds


def format_size(size_bytes: int) -> str:
    """For people: 1536 → "1.5 KiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
