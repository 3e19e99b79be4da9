"""What may stand in a log line: no secrets, no control characters, nothing without bound.

Much of what is logged was said by a sandbox, and a sandbox is hostile: a newline would forge a line, an escape sequence
would reach the terminal of whoever reads the log, and size would fill the disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

HIDDEN: Final = "[hidden]"

TEXT_CHARS_MAX: Final = 2_000  # of one field; a message and the start of what went wrong
ITEMS_MAX: Final = 64  # of one list or map
DEPTH_MAX: Final = 4  # of nested lists and maps

_SECRET_NAME: Final = re.compile(
    r"secret|password|passwd|passphrase|token|credential|authorization|cookie|api_?key|private_?key|access_?key", re.I
)
# Also in text, where a header or a URL is quoted: "Authorization: Bearer abc", "https://user:abc@host", "token=abc".
_SECRET_TEXT: Final = (
    re.compile(r"(?i)(\bauthorization[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?:[a-z]{1,20}\s+)?)[^\s\"',]{1,2000}"),
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://[^\s/:@]{0,200}:)[^\s/@]{1,500}(?=@)"),
    re.compile(
        r"(?i)(\b(?:[\w-]{0,40}(?:secret|password|passwd|token|api_?key))[\"']?\s{0,4}[=:]\s{0,4}[\"']?)[^\s\"',;&]{1,2000}"
    ),
)
# Controls of C0 and C1, DEL, line and paragraph separators, direction overrides, and what is no character at all.
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
# Ids, names, paths, times: most of what is logged. Nothing of the above can be in it, and one look is enough.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+-]{0,200}\Z")


def safe_text(text: str) -> str:
    """`text` on one line, without secrets that can be told from their surroundings, and bounded."""
    if _PLAIN.match(text):
        return text
    cut = len(text) - TEXT_CHARS_MAX
    if cut > 0:
        text = text[:TEXT_CHARS_MAX]
    for pattern in _SECRET_TEXT:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    text = _CONTROL.sub(_escape, text)
    return f"{text}… ({cut} more)" if cut > 0 else text


def safe_value(name: str, value: Any, depth: int = 0) -> Any:
    """`value` of the field `name` as something to print: text, number, bool, None, or a bounded list or map of them."""
    if value is None or isinstance(value, bool):
        return value
    if names_secret(name):
        return HIDDEN
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else safe_text(hex(value))
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return safe_text(bytes(value[: TEXT_CHARS_MAX + 1]).decode("utf-8", "backslashreplace"))
    if depth < DEPTH_MAX and isinstance(value, Mapping):
        return _safe_map(value, depth)
    if depth < DEPTH_MAX and isinstance(value, (list, tuple, set, frozenset)):
        return _safe_list(name, value, depth)
    return _safe_object(value)


@lru_cache(1_024)
def names_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _safe_map(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    safe: dict[str, Any] = {}
    for key, inner in value.items():
        if len(safe) == ITEMS_MAX:
            safe["…"] = f"{len(value) - ITEMS_MAX} more"
            break
        name = key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key)
        safe[safe_text(name)] = safe_value(name, inner, depth + 1)
    return safe


def _safe_list(name: str, value: Any, depth: int) -> list[Any]:
    safe: list[Any] = []
    for inner in value:
        if len(safe) == ITEMS_MAX:
            safe.append(f"… {len(value) - ITEMS_MAX} more")
            break
        safe.append(safe_value(name, inner, depth + 1))
    return safe


def _safe_object(value: object) -> str:
    try:
        return safe_text(str(value))
    except Exception as error:  # a log line is no place to fail, whatever __str__ does
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(found[0]) or (
        rf"\x{code:02x}" if code < 256 else rf"\u{code:04x}"
    )
