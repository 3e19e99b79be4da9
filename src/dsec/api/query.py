"""Queries are parsed from their raw bytes: a path in one need not be text."""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.limits import QUERY_ITEMS_MAX
from dsec.core.spec import check_path, shown_path

_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})?")
_NUMBER_DIGITS_MAX: Final = 19
_INT_MAX: Final = (1 << 63) - 1


class Kind(enum.Enum):
    TEXT = "text"
    PATH = "path"  # absolute, bytes
    TARGET = "target"  # bytes, of a symlink: may be relative
    INT = "int"
    SECONDS = "seconds"
    BOOL = "bool"
    MODE = "mode"  # octal
    BASE64 = "base64"  # URL-safe


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a query. `repeated` ones give a list."""

    name: str
    kind: Kind
    doc: str = ""
    required: bool = False
    default: Any = None
    repeated: bool = False
    maximum: float | None = None


def parse_query(raw: bytes, params: Iterable[Param]) -> dict[str, Any]:
    """Every declared parameter by its name, defaults filled in.

    Raises InvalidArgumentError for what is not declared, is there twice, is missing or is malformed.
    """
    values: dict[str, Any] = {param.name: [] if param.repeated else param.default for param in params}
    known = {param.name: param for param in params}
    seen: set[str] = set()
    for name, value in split_query(raw):
        param = known.get(name)
        if param is None:
            raise InvalidArgumentError(f"there is no parameter {name[:40]!r}", hint=_offer(known))
        if param.repeated:
            values[name].append(_value(param, value))
        elif name in seen:
            raise InvalidArgumentError(f"parameter {name} is there twice")
        else:
            values[name] = _value(param, value)
        seen.add(name)
    for param in params:
        if param.required and param.name not in seen:
            raise InvalidArgumentError(f"parameter {param.name} is missing", hint=param.doc or None)
    return values


def split_query(raw: bytes) -> list[tuple[str, bytes]]:
    """Names and values in order. As in forms, `+` is a space. Raises InvalidArgumentError or LimitError."""
    if not raw:
        return []
    items = raw.split(b"&")
    if len(items) > QUERY_ITEMS_MAX:
        raise LimitError(f"a query has at most {QUERY_ITEMS_MAX} parameters")
    return [_split_item(item) for item in items if item]


def unquote(raw: bytes) -> bytes:
    """Percent-decoded bytes. Raises InvalidArgumentError for an escape that is none."""
    if b"%" not in raw:
        return raw
    return _ESCAPE.sub(_byte, raw)


def _split_item(item: bytes) -> tuple[str, bytes]:
    name, _, value = item.partition(b"=")
    return text_of(unquote(name.replace(b"+", b" ")), "the name of a parameter"), unquote(value.replace(b"+", b" "))


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        raise InvalidArgumentError("a % in the URL is not followed by two hexadecimal digits", hint="write % as %25")
    return bytes((int(found[1], 16),))


def text_of(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{what} is not UTF-8") from error


def _value(param: Param, value: bytes) -> Any:
    match param.kind:
        case Kind.TEXT:
            return _text(param, value)
        case Kind.PATH:
            return _path(param, value)
        case Kind.TARGET:
            return check_path(value, param.name)
        case Kind.INT:
            return _int(param, value, base=10, most=_INT_MAX if param.maximum is None else int(param.maximum))
        case Kind.MODE:
            return _int(param, value, base=8, most=0o7777)
        case Kind.SECONDS:
            return _seconds(param, value)
        case Kind.BOOL:
            return _bool(param, value)
        case Kind.BASE64:
            return _base64(param, value)


def _text(param: Param, value: bytes) -> str:
    text = text_of(value, f"parameter {param.name}")
    if "\0" in text:
        raise InvalidArgumentError(f"parameter {param.name} holds NUL")
    return text


def _path(param: Param, value: bytes) -> bytes:
    path = check_path(value, param.name)
    if not path.startswith(b"/"):
        raise InvalidArgumentError(f"{param.name} must be absolute, and is {shown_path(path)}")
    return path


def _int(param: Param, value: bytes, *, base: int, most: int) -> int:
    # int() also takes signs, spaces, underscores and other scripts' digits.
    digits = b"0123456789"[:base]
    if not value or len(value) > _NUMBER_DIGITS_MAX or value.strip(digits):
        kind = "an octal number such as 0644" if base == 8 else "a number of digits only"
        raise InvalidArgumentError(f"parameter {param.name} must be {kind}, and is {value[:40]!r}")
    number = int(value, base)
    if number > most:
        shown = f"{most:o}" if base == 8 else most
        raise LimitError(f"parameter {param.name} must be at most {shown}")
    return number


def _seconds(param: Param, value: bytes) -> float:
    if not re.fullmatch(rb"[0-9]{1,10}(?:\.[0-9]{0,9})?", value):
        raise InvalidArgumentError(f"parameter {param.name} must be seconds such as 2.5, and is {value[:40]!r}")
    seconds = float(value)
    if param.maximum is not None and seconds > param.maximum:
        raise LimitError(f"parameter {param.name} must be at most {param.maximum:g}")
    return seconds


def _bool(param: Param, value: bytes) -> bool:
    if value in (b"true", b"1", b""):  # `?follow` alone means yes
        return True
    if value in (b"false", b"0"):
        return False
    raise InvalidArgumentError(f"parameter {param.name} must be true or false, and is {value[:40]!r}")


def _base64(param: Param, value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise InvalidArgumentError(f"parameter {param.name} is not URL-safe base64") from error


def _offer(known: dict[str, Param]) -> str:
    return f"there are {', '.join(sorted(known))}" if known else "this path takes none"
