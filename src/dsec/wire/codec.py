"""Bytes become records here and nowhere else (msgspec).

Requests refuse unknown fields, replies and stored records ignore them (ruling 6): a record says which by
`forbid_unknown_fields`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from dsec.core.errors import DsecError, InvalidArgumentError, LimitError, ProtocolError, UnsupportedError
from dsec.core.limits import YAML_ALIASES_MAX, YAML_DEPTH_MAX, YAML_ITEMS_MAX

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


def yaml_tree(text: str, what: str) -> Any:
    """What a file of people says: nothing but data, bounded, and no key of it twice. `what` is for errors.

    Raises InvalidArgumentError, LimitError; UnsupportedError without PyYAML.
    """
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedError(
            f"reading {what} needs the package PyYAML", hint="pip install pyyaml, where dsec is installed"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        aliases = items = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            self.items += 1
            self.depth += 1
            if self.aliases > YAML_ALIASES_MAX or self.items > YAML_ITEMS_MAX or self.depth > YAML_DEPTH_MAX:
                raise LimitError(f"{what} has too many values, or aliases, or they lie too deep")
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

        def flatten_mapping(self, node: Any) -> None:
            # Merges of merges double what they merge each time.
            super().flatten_mapping(node)
            if len(node.value) > YAML_ITEMS_MAX:
                raise LimitError(f"{what} has too many values")

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # YAML's own reader lets the last of two win, and says nothing.
            seen = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                if str(key.value) in seen:
                    line = key.start_mark.line + 1
                    raise InvalidArgumentError(f"{what}, line {line}: {str(key.value)[:60]!r} is there twice")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"{what} is no YAML: {' '.join(str(error).split())[:200]}") from error
    except (RecursionError, ValueError) as error:  # such as a number or a date that is none
        raise InvalidArgumentError(f"{what} cannot be read: {str(error)[:200]}") from error


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
