"""What is wrong with a setting, in the words of who wrote it: which one, where it stands, what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.spec import Substrate

_PLACE: Final = re.compile(r" - at `\$\.?(?P<name>[^`\[]*)(?:\[[^`]*)?`")
_KIND: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_KINDS: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_ENUM: Final = re.compile(r"Invalid enum value '(?P<value>.*)'")


def check_names(tables: Mapping[str, Any], kind: type[msgspec.Struct], where: str, table: str = "") -> None:
    """Raises InvalidArgumentError for the first name that `kind` does not have, or a table that is none."""
    kinds = get_type_hints(kind)
    for name, value in tables.items():
        if name not in kinds:
            raise InvalidArgumentError(_strange(name, kind, where, table), hint=_meant(name, list(kinds), kinds, value))
        if not isinstance(kinds[name], type) or not issubclass(kinds[name], msgspec.Struct):
            continue
        if not isinstance(value, dict):
            raise InvalidArgumentError(f"{where}: {name} is a table", hint=f"write [{name}] and its settings below it")
        check_names(value, kinds[name], where, f"{table}.{name}" if table else name)


def _strange(name: str, kind: type[msgspec.Struct], where: str, table: str) -> str:
    return f"{where}: there is no setting {name[:80]!r}" + (f" in [{table}]" if table else "")


def _meant(name: str, known: list[str], kinds: Mapping[str, Any], value: Any) -> str:
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    for table, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and name in kind.__struct_fields__:
            return f"it belongs into the table [{table}]"
    return f"there are {', '.join(known)}"


def in_place(error: InvalidArgumentError, origins: Mapping[str, str]) -> InvalidArgumentError:
    """`error` of a record, saying which setting it is about and where that was set."""
    text = error.message.removeprefix("the configuration is wrong: ")
    found = _PLACE.search(text)
    if found is None:
        return InvalidArgumentError(_sources(f"{text} {error.hint or ''}", origins) + text, hint=error.hint)
    name = found["name"]
    text = _PLACE.sub("", text)
    hint = error.hint or _HINT
    if value := _ENUM.match(text):  # the one setting of words from a list
        text, hint = f"there is no {value['value']!r}", f"there are {', '.join(Substrate)}"
    text = _KIND.sub(
        lambda found: f"it must be {_KINDS.get(found[1], found[1])}, and is {_KINDS.get(found[2], found[2])}", text
    )
    origin = origins.get(name)
    return InvalidArgumentError(f"{name}{f' (from {origin})' if origin else ''}: {text}", hint=hint)


def _sources(said: str, origins: Mapping[str, str]) -> str:
    """Where the settings were set that a text is about, by their names in it; where any were, if it names none."""
    words = set(re.findall(r"\w+", said))
    named = [f"{name} (from {origin})" for name, origin in origins.items() if name.rpartition(".")[2] in words]
    told = named[:_SOURCES_MAX] or sorted(set(origins.values()))[:_SOURCES_MAX]
    return f"{', '.join(told)}: " if told else ""


_SOURCES_MAX: Final = 4
_HINT: Final = "docs/reference/configuration.md says what each setting takes"
