"""docs/reference/sdk.md"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

import dsec
from tools.reference.text import NOTE, comments_of, join, kind_of, one_line, table

# In the order in which they are met; what is not named here comes after, by name.
_FIRST = (
    "Sandbox",
    "ExecResult",
    "Process",
    "Session",
    "Pty",
    "Files",
    "Connection",
    "Client",
    "Environments",
    "Tokens",
)
_WIDTH = 110


def page() -> str:
    names = [name for name in public_names() if not name.startswith("Async")]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    lines = ["# Python", "", NOTE, ""]
    lines += [
        "`import dsec`. Each class with blocking methods has one of the same name with `Async` in front, whose methods"
    ]
    lines += [
        'are coroutines. Errors are in [dsec.errors](errors.md). Sizes are bytes, or text such as `"4GiB"`; names that'
    ]
    lines += ["end in `_s` are seconds.", ""]
    for name in names:
        lines += ["", f"## {name}", "", *_thing(name, getattr(dsec, name))]
    return join(lines)


def public_names() -> list[str]:
    return [name for name in dsec._NAMES if name not in ("DsecError",)]


def _thing(name: str, thing: Any) -> list[str]:
    if inspect.isfunction(thing):
        return [*_call(name, thing), "", *_doc(thing)]
    if not inspect.isclass(thing):
        return [f"    {name} = {thing!r}"]
    lines = _doc(thing)
    if issubclass(thing, enum.Enum):
        return [*lines, "", ", ".join(f"`{member.value}`" for member in thing)]
    lines += _fields(thing)
    for label, member in members(thing):
        if isinstance(member, property):
            lines += ["", f"**{name}.{label}** {one_line(inspect.getdoc(member))}"]
        else:
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            lines += ["", f"### {name}.{label}", "", *_call(label, function), "", *_doc(function)]
    return lines


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """What is public and its own: methods, class methods and properties."""
    for base in (cls, *cls.__mro__[1:]):
        if base.__module__.partition(".")[0] != "dsec":
            continue
        for name, member in vars(base).items():
            own = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
            if own and not name.startswith("_") and (base is cls or name not in vars(cls)):
                yield name, member


def _fields(cls: type) -> list[str]:
    comments = comments_of(cls) if dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct) else {}
    fields: list[Any] = []
    if issubclass(cls, msgspec.Struct):
        fields = list(msgspec.structs.fields(cls))
    elif dataclasses.is_dataclass(cls):
        fields = [field for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    if not fields:
        return []
    rows = ((f"`{f.name}`", f"`{kind_of(f.type)}`", comments.get(f.name, "")) for f in fields)
    return ["", *table(("field", "type", ""), rows)]


def _call(name: str, function: Any) -> list[str]:
    """How it is called, as code: on one line where it fits."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    text = _unquoted(str(signature.replace(parameters=parameters)))
    if len(text) + len(name) <= _WIDTH:
        return [f"    {name}{text}"]
    answer = text.rpartition(")")[2]
    words = [_unquoted(str(p)) for p in parameters]
    star = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        words.insert(star, "*")
    return [f"    {name}(", *(f"        {word}," for word in words), f"    ){answer}"]


def _unquoted(text: str) -> str:
    """Annotations are kept as text; a default in quotes stays in them."""
    return kind_of(re.sub(r"(: |-> )'([^']*)'", r"\1\2", text))


def _doc(thing: Any) -> list[str]:
    text = inspect.getdoc(thing) or ""
    return [f"{line}" if not line.startswith("    ") else line for line in text.splitlines()]
