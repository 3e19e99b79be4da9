"""`dsec cp`: files between here and a sandbox."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from dsec.cli.completion import complete_path
from dsec.cli.console import Json, client, find, put_json, run_async, say, settings
from dsec.cli.options import User
from dsec.cli.pages import command

_REMOTE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(.*)\Z", re.DOTALL)


def register(app: typer.Typer) -> None:
    command(app, cp)


def cp(
    source: Annotated[
        str, typer.Argument(help="PATH or SANDBOX:PATH", show_default=False, autocompletion=complete_path)
    ],
    target: Annotated[
        str, typer.Argument(help="PATH or SANDBOX:PATH", show_default=False, autocompletion=complete_path)
    ],
    user: User = None,
    json: Json = False,
) -> None:
    """Copy a file or a directory into a sandbox or out of it."""
    from dsec.core.units import format_size

    there, here = split_remote(target), split_remote(source)
    if (there is None) == (here is None):
        raise typer.BadParameter("exactly one of the two must be SANDBOX:PATH (write ./a:b for a local name with ':')")

    async def work() -> None:
        async with client() as c:
            if there is not None:
                done = await (await find(c, there[0])).upload(source, there[1], user=user)
            else:
                assert here is not None
                done = await (await find(c, here[0])).download(here[1], target, user=user)
        for skipped in done.skipped:
            say(f"left out: {skipped}")
        if settings.json:
            put_json({"bytes": done.bytes, "entries": done.entries, "skipped": done.skipped})
        else:
            say(f"copied {done.entries} {'entry' if done.entries == 1 else 'entries'}, {format_size(done.bytes)}")

    run_async(work())


def split_remote(text: str) -> tuple[str, str] | None:
    """(sandbox, path) of `SANDBOX:PATH`; None for a local path."""
    found = _REMOTE.match(text)
    return (found[1], found[2] or "/") if found else None
