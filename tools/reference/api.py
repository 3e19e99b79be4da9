"""docs/reference/api.md"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from dsec.api.openapi import document
from dsec.api.routes import ROUTES
from dsec.api.routing import Route
from dsec.wire import environments, errors, records
from tools.reference.text import NOTE, comments_of, join, kind_of, one_line, table


def page() -> str:
    described = document(ROUTES, version="0")["paths"]
    lines = ["# HTTP API", "", NOTE, ""]
    lines += [
        "The OpenAPI 3.1 document is at `/openapi.json` of each service. [The API](../internals/api.md) says what a"
    ]
    lines += ["schema cannot: streams, retries, errors. `right` is what the caller's token needs.", ""]
    lines += table(
        ("route", "right", "takes", "answers"),
        ((f"`{r.method} {r.path}`", str(r.right or "none"), _takes(r), _names(r.answer)) for r in ROUTES),
    )
    lines += ["", "## Routes", ""]
    for route in ROUTES:
        operation = described[route.path]["get" if route.method == "WS" else route.method.lower()]
        lines += [f"**{route.method} {route.path}** {one_line(route.summary)}", ""]
        parameters = [p for p in operation["parameters"] if p["in"] == "query"]
        if parameters:
            lines += table(
                ("parameter", "", "default"),
                ((f"`{p['name']}`", p["description"], _default(p["schema"])) for p in parameters),
            )
            lines.append("")
    lines += [
        "",
        "## Records",
        "",
        "Times are seconds since the epoch, durations seconds, sizes bytes. `bytes` are base64.",
    ]
    for record in _records():
        lines += _record(record)
    return join(lines)


def _takes(route: Route) -> str:
    return _names(route.body)


def _names(kind: Any) -> str:
    if kind is None:
        return ""
    if isinstance(kind, dict):
        return ", ".join(f"{_name(what)} ({media})" for media, what in kind.items())
    return _name(kind)


def _name(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {bytes: "bytes", str: "text", dict: "an object"}.get(kind, str(kind))


def _default(schema: dict[str, Any]) -> str:
    return f"`{schema['default']}`" if "default" in schema else ""


def _records() -> list[type[msgspec.Struct]]:
    found = {
        cls.__name__: cls
        for module in (records, environments, errors)
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__
    }
    for route in ROUTES:  # some belong to their route alone
        for media in (route.body, route.answer):
            for kind in media.values() if isinstance(media, dict) else (media,):
                if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
                    found.setdefault(kind.__name__, kind)
    internal = ("ListQuery", "SandboxRef", "ExecQuery")  # between API and node only
    return [found[name] for name in sorted(found) if name not in internal]


def _record(record: type[msgspec.Struct]) -> list[str]:
    comments = comments_of(record)
    described = inspect.getdoc(record) if record.__doc__ and not record.__doc__.startswith(record.__name__) else ""
    return [
        "",
        f"### {record.__name__}",
        "",
        one_line(described),
        "",
        *table(
            ("field", "type", "default", ""),
            (
                (f"`{f.encode_name}`", f"`{kind_of(f.type)}`", _field_default(f), comments.get(f.name, ""))
                for f in msgspec.structs.fields(record)
            ),
        ),
    ]


def _field_default(field: Any) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    return "required"
