"""docs/reference/cli.md and dsec.1"""

from __future__ import annotations

from dsec import __version__
from dsec.cli import manual
from dsec.cli.main import app
from dsec.cli.pages import EXITS
from dsec.core.variables import VARIABLES
from tools.reference.text import NOTE, join, table


def page() -> str:
    entries = manual.entries(app)
    lines = ["# Command line", "", NOTE, ""]
    lines += ["`dsec help COMMAND` says the same. Data goes to stdout, talk to stderr; `--quiet` is without talk.", ""]
    lines += table(("command", ""), ((f"[dsec {e.name}](#{_anchor(e.name)})", e.summary) for e in entries))
    lines += ["", "## Exit status", "", "Beside these, `run`, `exec` and `shell` end with the command's own."]
    lines += ["", *table(("status", "means"), ((str(status), text) for status, text in EXITS.items()))]
    lines += ["", "## Environment", "", *table(("variable", "is"), ((f"`{k}`", v) for k, v in VARIABLES.items()))]
    lines += ["", "## JSON", ""]
    lines += [
        "With `--json` a command writes one JSON value to stdout (`logs EXEC`: one a line), and when dsec fails",
        '`{"error": …}` with `code`, `message`, `outcome`, `hint` and `detail`. Records are those of the',
        "[API](api.md#records): fields are added and never change their meaning, so ignore those that you do not know.",
    ]
    for entry in entries:
        lines += _entry(entry)
    return join(lines)


def man_page() -> str:
    return manual.man_page(app, __version__)


def _entry(entry: manual.Entry) -> list[str]:
    lines = ["", f"## dsec {entry.name}", "", entry.summary, "", f"    {entry.usage}", ""]
    for paragraph in entry.text.split("\n\n") if entry.text else ():
        lines += [paragraph.replace("\n", " "), ""]
    options = [(f"`{label}`", meaning) for label, meaning in (*entry.arguments, *entry.options)]
    lines += [*table(("", ""), options), ""] if options else []
    width = max(len(typed) for typed, _ in entry.examples)
    lines += [f"    {typed:<{width}}  # {meaning}" for typed, meaning in entry.examples]
    if entry.json:
        lines += ["", f"JSON: {entry.json}."]
    own = [(str(status), text) for status, text in entry.exits if status not in EXITS]
    return [*lines, "", *(table(("status", "means"), own) if own else [])]


def _anchor(name: str) -> str:
    return f"dsec-{name.replace(' ', '-')}"
