"""Compose files as they are written: bounded YAML, and the variables in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.limits import COMPOSE_BYTES_MAX, COMPOSE_TEXT_MAX, YAML_DEPTH_MAX, YAML_ITEMS_MAX
from dsec.wire.codec import yaml_tree

_VARIABLE: Final = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|"
    r"\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<how>:?[-?+])(?P<word>[^{}]*))?\}|(?P<bad>))"
)
_ENV_LINE: Final = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_.]*)\s*=\s*(.*)\Z")


@dataclass(frozen=True, slots=True)
class Scope:
    """Where in the file: what an error names."""

    what: str

    def at(self, key: str) -> Scope:
        return Scope(f"{self.what}, {key}")


HINT: Final = "correct it in the file; docs/guides/groups.md says what a compose file may hold here"


def wrong(scope: Scope, text: str, hint: str | None = None) -> InvalidArgumentError:
    return InvalidArgumentError(f"{scope.what}: {text}", hint=hint or HINT)


def load(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """What the file says, with the variables in its texts filled in. Raises InvalidArgumentError, LimitError;
    UnsupportedError without PyYAML."""
    try:
        found = yaml_tree(_read(path), path.name)
    except InvalidArgumentError as error:
        error.hint = error.hint or HINT
        raise
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{path.name} is no compose file: it must be a mapping with services", hint=HINT)
    filled: dict[str, Any] = _filled(found, variables, Scope(path.name), _Budget())
    return filled


def read_env_file(path: Path, scope: Scope) -> dict[str, str]:
    """KEY=VALUE lines. Raises InvalidArgumentError."""
    found: dict[str, str] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _ENV_LINE.match(text)
        if match is None:
            raise wrong(scope, f"{path.name}, line {number}: it must be KEY=VALUE")
        found[match[1]] = _unquoted(match[2])
    return found


def _unquoted(value: str) -> str:
    for quote in "\"'":
        if value.startswith(quote):
            inner, end, _ = value[1:].partition(quote)
            if end:
                return inner
    return re.split(r"\s#", value, maxsplit=1)[0].strip()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(COMPOSE_BYTES_MAX + 1)
        if len(raw) > COMPOSE_BYTES_MAX:
            raise LimitError(f"{path.name} has more than {COMPOSE_BYTES_MAX} bytes")
        return raw.decode()
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be read: {error.strerror}", hint="give the path of a file that is there, from here or whole"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path.name} is not UTF-8", hint="save it as UTF-8") from error


class _Budget:
    """Values that are looked at: one that many aliases stand for is looked at for each."""

    def __init__(self) -> None:
        self.left = YAML_ITEMS_MAX
        self._text_left = COMPOSE_TEXT_MAX

    def take_text(self, scope: Scope, text: str) -> str:
        self._text_left -= len(text)
        if self._text_left < 0:
            raise LimitError(f"{scope.what[:200]}: all texts together have more than {COMPOSE_TEXT_MAX} characters")
        return text

    def take(self, scope: Scope, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > YAML_DEPTH_MAX:
            raise LimitError(f"{scope.what[:200]}: there are too many values, or they lie too deep")


def _filled(value: Any, variables: Mapping[str, str], scope: Scope, budget: _Budget, depth: int = 0) -> Any:
    budget.take(scope, depth)
    if isinstance(value, str):
        return budget.take_text(scope, fill(value, variables, scope))
    if isinstance(value, list):
        return [_filled(item, variables, scope, budget, depth + 1) for item in value]
    if isinstance(value, dict):
        return {
            key: _filled(item, variables, scope.at(str(key)[:60]), budget, depth + 1)
            for key, item in value.items()
            if not str(key).startswith("x-") or str(key).startswith("x-dsec-")
        }
    return value


def fill(text: str, variables: Mapping[str, str], scope: Scope) -> str:
    """`$NAME`, `${NAME}`, and with `:-`, `-`, `:?`, `?`, `:+`, `+` and a word; `$$` is a dollar."""
    room = COMPOSE_BYTES_MAX

    def bounded(match: re.Match[str]) -> str:
        nonlocal room
        found = one(match)
        room -= len(found)
        if room < 0:
            raise LimitError(f"{scope.what[:200]}: with its variables it has more than {COMPOSE_BYTES_MAX} characters")
        return found

    def one(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name, how, word = match["plain"] or match["braced"], match["how"] or "", match["word"] or ""
        if name is None:
            raise wrong(scope, f"{text[:60]!r} has a $ that names no variable", "write $$ for a dollar")
        value = variables.get(name)
        there = value is not None and (value != "" or not how.startswith(":"))
        if how.endswith("+"):
            return word if there else ""
        if there and value is not None:
            return value
        if how.endswith("-"):
            return word
        why = f": {word}" if word else ""
        raise wrong(scope, f"the variable {name} is not set{why}", f"set it, or write ${{{name}:-}}")

    return _VARIABLE.sub(bounded, text)
