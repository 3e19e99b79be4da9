"""Task types: what the code of a call becomes and how it is run. Data, from `types.toml` and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from dsec.core.errors import InvalidArgumentError, UnsupportedError
from dsec.core.ids import parse_name
from dsec.core.spec import check_env
from dsec.wire.calls import TaskTypeInfo, check_args, check_call_path
from dsec.wire.codec import from_toml


class TaskType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: str  # the code's file
    run: tuple[str, ...]  # argv
    check: tuple[str, ...] | None = None  # argv of a checker, if `run` would tell its failures as verdicts
    compile: tuple[str, ...] | None = None  # argv; None: there is nothing to compile
    env: dict[str, str] = {}
    warm: str | None = None  # a Python interpreter that is up before a call comes; `run` names the same and a script

    def __post_init__(self) -> None:
        check_call_path(self.source)
        check_env(self.env)
        for words in (self.run, *(words for words in (self.compile, self.check) if words is not None)):
            if not words or not words[0]:
                raise InvalidArgumentError("a task type's commands must not be empty")
            check_args(words)
        if self.warm is not None and (self.run[0] != self.warm or len(self.run) < 2):
            raise InvalidArgumentError("with `warm`, `run` is that interpreter and a script")


class TaskTypes:
    """Those that a node offers. Raises InvalidArgumentError for a name that cannot be one."""

    def __init__(self, more: Mapping[str, TaskType] | None = None) -> None:
        self._types = {**_shipped(), **(more or {})}
        for name in self._types:
            parse_name(name, "task type")

    def get(self, name: str) -> TaskType:
        """Raises UnsupportedError."""
        found = self._types.get(name)
        if found is None:
            raise UnsupportedError(
                f"this node has no task type {name!r}", hint=f"it has {', '.join(sorted(self._types))}"
            )
        return found

    def list(self) -> list[TaskTypeInfo]:
        return [
            TaskTypeInfo(name=name, source=type.source, compiled=type.compile is not None, warm=type.warm is not None)
            for name, type in sorted(self._types.items())
        ]


@cache
def _shipped() -> dict[str, TaskType]:
    return from_toml(files(__package__).joinpath("types.toml").read_text(), dict[str, TaskType])
