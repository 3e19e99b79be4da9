"""docs/reference/errors.md"""

from __future__ import annotations

import inspect

from dsec.core import errors
from tools.reference.text import NOTE, one_line


def page() -> str:
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].strip("\n")
    rows = [
        f"| `{cls.__name__}` | `{cls.code}` | {cls.outcome} | {one_line(inspect.getdoc(cls))} |"
        for cls in _classes(errors.DsecError)
    ]
    return "\n".join(
        [
            "# Errors",
            "",
            NOTE,
            "",
            "A failing command is a result; a failing platform is an exception. `code` is what travels in an answer,",
            "`outcome` what the world looks like afterwards: `unchanged`, `gone` or `unknown`. An error may state",
            "another outcome than its class does.",
            "",
            "```",
            tree,
            "```",
            "",
            "| class | code | outcome | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _classes(cls: type[errors.DsecError]) -> list[type[errors.DsecError]]:
    below = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    return [cls, *(found for child in below for found in _classes(child))]
