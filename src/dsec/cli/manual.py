"""`dsec help`: what a command does, as text, and as the manual page dsec(1)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from dsec.cli.pages import EXITS, JSON, PAGES, command
from dsec.core.variables import VARIABLES

_WIDTH: Final = 90
_FILES: Final = {
    "/etc/dsec/dsec.toml": "settings of the service",
    "/run/dsec, /var/lib/dsec": "its run and state directories, as root",
    "$XDG_RUNTIME_DIR/dsec, $XDG_STATE_HOME/dsec": "the same for other users",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One command, as every form of the manual shows it."""

    name: str
    usage: str
    summary: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    examples: tuple[tuple[str, str], ...]
    json: str
    exits: tuple[tuple[int, str], ...]


def register(app: typer.Typer) -> None:
    command(app, help_, "help")


def help_(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND…]", help="Such as: exec, or env build.")
    ] = None,
) -> None:
    """Say all there is to say of a command; without one, of dsec as a whole."""
    from dsec.cli.main import app

    found = entries(app)
    name = " ".join(words or ())
    chosen = [entry for entry in found if entry.name == name or entry.name.startswith(f"{name} ")]
    if not name:
        print("\n".join(_overview(found)))
    elif not chosen:
        raise typer.BadParameter(f"there is no command {name[:80]!r}{_near(name, found)}", param_hint="COMMAND")
    else:
        print("\n\n".join("\n".join(_text(entry)) for entry in chosen))


def _near(name: str, found: list[Entry]) -> str:
    import difflib

    near = difflib.get_close_matches(name, [entry.name for entry in found], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# ---- what there is -------------------------------------------------------------------------------


def entries(app: typer.Typer) -> list[Entry]:
    """Every command, as the command line itself declares it."""
    return list(_walk(typer.main.get_command(app), ""))


def _walk(group: Any, prefix: str) -> Iterator[Entry]:
    for name, found in group.commands.items():
        full = f"{prefix}{name}"
        if hasattr(found, "commands"):
            yield from _walk(found, f"{full} ")
        else:
            yield _entry(full, found)


def _entry(name: str, found: Any) -> Entry:
    page = PAGES[name]
    arguments = [p for p in found.params if p.param_type_name == "argument"]
    options = [p for p in found.params if p.param_type_name == "option"]
    names = [_argument(p) for p in arguments]
    summary, _, rest = (found.help or "").partition("\n\n")
    return Entry(
        name=name,
        usage=" ".join(["dsec", name, "[OPTIONS]" if options else "", *names]).replace("  ", " "),
        summary=_line(summary),
        text="\n\n".join(part for part in (rest.strip(), page.text) if part),
        arguments=tuple((label, _line(p.help or "")) for label, p in zip(names, arguments, strict=True)),
        options=tuple((_option(p), _meaning(p)) for p in options),
        examples=page.examples,
        json=page.json,
        exits=tuple(sorted({**EXITS, **page.exits}.items())),
    )


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return name if param.required or name.startswith("[") else f"[{name}]"


def _option(param: Any) -> str:
    names = ", ".join(sorted((*param.opts, *param.secondary_opts), key=len))
    if param.is_flag:
        return names
    return f"{names} {param.metavar or 'VALUE'}"


def _meaning(param: Any) -> str:
    text = _line(param.help or "")
    default = param.default
    shown = param.show_default and not param.is_flag and default not in (None, "", [], ())
    return (
        f"{text} (default: {default:g})"
        if shown and isinstance(default, float)
        else (f"{text} (default: {default})" if shown else text)
    )


def _line(text: str) -> str:
    return " ".join(text.split())


# ---- as text -------------------------------------------------------------------------------------


def _overview(found: list[Entry]) -> list[str]:
    width = max(len(entry.name) for entry in found)
    lines = [
        "dsec - sandboxes for AI agents",
        "",
        "Usage: dsec [--url URL] [--token TOKEN] [--quiet] COMMAND …",
        "",
        "Commands",
    ]
    lines += [f"  {entry.name:<{width}}  {entry.summary}" for entry in found]
    lines += ["", "Exit status", *_pairs([(str(status), text) for status, text in EXITS.items()])]
    lines += ["", "JSON", *textwrap.wrap(_line(JSON), _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += ["", "Environment", *_pairs(list(VARIABLES.items()))]
    lines += ["", "Files", *_pairs(list(_FILES.items()))]
    return [*lines, "", "`dsec help COMMAND` says all of a command, `dsec doctor` what this machine can do."]


def _text(entry: Entry) -> list[str]:
    lines = [f"dsec {entry.name} - {entry.summary}", "", f"Usage: {entry.usage}"]
    for paragraph in entry.text.split("\n\n") if entry.text else ():
        lines += ["", *textwrap.wrap(_line(paragraph), _WIDTH)]
    for heading, pairs in _sections(entry):
        lines += ["", heading, *_pairs(pairs)]
    return lines


def _sections(entry: Entry) -> list[tuple[str, list[tuple[str, str]]]]:
    sections = [
        ("Arguments", list(entry.arguments)),
        ("Options", list(entry.options)),
        ("Examples", list(entry.examples)),
        ("JSON", [("--json", entry.json)] if entry.json else []),
        ("Exit status", [(str(status), text) for status, text in entry.exits]),
    ]
    return [(heading, pairs) for heading, pairs in sections if pairs]


def _pairs(pairs: list[tuple[str, str]]) -> list[str]:
    width = min(max(len(left) for left, _ in pairs), 34)
    lines: list[str] = []
    for left, right in pairs:
        wrapped = textwrap.wrap(right, _WIDTH - width - 4) or [""]
        if len(left) > width:
            lines.append(f"  {left}")
            lines += [f"  {'':<{width}}  {line}" for line in wrapped]
            continue
        lines += [f"  {head:<{width}}  {line}".rstrip() for head, line in zip([left] + [""] * len(wrapped), wrapped)]  # noqa: B905
    return lines


# ---- as a manual page ----------------------------------------------------------------------------


def man_page(app: typer.Typer, version: str) -> str:
    """dsec(1), in the man macros."""
    lines = [f'.TH DSEC 1 "" "dsec {_roff(version)}" "User Commands"', ".SH NAME", "dsec \\- sandboxes for AI agents"]
    lines += [".SH SYNOPSIS", ".B dsec", "[\\-\\-url URL] [\\-\\-token TOKEN] [\\-\\-quiet] COMMAND \\&..."]
    lines += [".SH DESCRIPTION", "Data goes to stdout, talk to stderr. SANDBOX is an id or a name.", ".PP", _roff(JSON)]
    lines.append(".SH COMMANDS")
    for entry in entries(app):
        lines += [f".SS {_roff(entry.usage)}", _roff(entry.summary)]
        for paragraph in entry.text.split("\n\n") if entry.text else ():
            lines += [".PP", _roff(_line(paragraph))]
        for left, right in entry.options:
            lines += [".TP", f".B {_roff(left)}", _roff(right) or "\\&"]
        for typed, meaning in entry.examples:
            lines += [".PP", f"Example: {_roff(meaning)}", ".br", f".B {_roff(typed)}"]
        lines += [".PP", f"JSON: {_roff(entry.json)}"] if entry.json else []
    statuses = dict(sorted({**EXITS, **{k: v for page in PAGES.values() for k, v in page.exits.items()}}.items()))
    for heading, pairs in (
        ("EXIT STATUS", {str(k): v for k, v in statuses.items()}),
        ("ENVIRONMENT", VARIABLES),
        ("FILES", _FILES),
    ):
        lines.append(f".SH {heading}")
        for left, right in pairs.items():
            lines += [".TP", f".B {_roff(left)}", _roff(right)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "\\&...").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") else text
