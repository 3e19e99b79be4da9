"""Bytes become records here and nowhere else (msgspec).

Requests refuse unknown fields, replies and stored records ignore them (ruling 6): a record says which by
`forbid_unknown_fields`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from dsec.core.errors import DsecError, InvalidArgumentError, ProtocolError, UnsupportedError

T = TypeVar("T")

_msgpack_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


@cache
def _msgpack_decoder(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(cast(Any, kind))


@cache
def _json_decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, kind))


def pack(record: Any) -> bytes:
    return _msgpack_encoder.encode(record)


def unpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """A msgpack body from a peer. Raises ProtocolError; errors of a record's own checks pass through."""
    try:
        return cast(T, _msgpack_decoder(cast(Hashable, kind)).decode(data))
    except DsecError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {_name(kind)}: {error}") from error


def to_json(record: Any) -> bytes:
    return _json_encoder.encode(record)


def from_yaml(data: bytes, kind: type[T]) -> T:
    """A file of another program. Raises InvalidArgumentError; UnsupportedError without PyYAML."""
    try:
        return msgspec.yaml.decode(data, type=kind)
    except ImportError as error:
        raise UnsupportedError("reading YAML needs PyYAML", hint="pip install pyyaml, or give it as JSON") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"not a {_name(kind)}: {error}") from error


def from_json(data: bytes | str, kind: type[T]) -> T:
    """A JSON body from a caller. Raises InvalidArgumentError."""
    try:
        return cast(T, _json_decoder(cast(Hashable, kind)).decode(data))
    except DsecError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the body is not a {_name(kind)}: {error}") from error


def from_toml(data: str | dict[str, Any], kind: type[T]) -> T:
    """A configuration, as text or as the tables of it. Raises InvalidArgumentError."""
    import tomllib  # `import dsec` comes by here, and needs no configuration

    try:
        tables = tomllib.loads(data) if isinstance(data, str) else data
        return msgspec.convert(tables, kind)
    except DsecError:
        raise
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the configuration is wrong: {error}") from error


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
