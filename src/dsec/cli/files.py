"""`dsec cp`: files between here and a sandbox."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.completion import complete_path
from dsec.cli.console import Json, client, find, put_json, run_async, say, settings
from dsec.cli.options import User
from dsec.cli.pages import command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dsec.sdk.sandbox import AsyncSandbox
    from dsec.sdk.transfer import Transfer

_STANDARD: Final = "-"  # our own input or output
_PIECE_BYTES: Final = 256 << 10
_REMOTE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(.*)\Z", re.DOTALL)


def register(app: typer.Typer) -> None:
    command(app, cp)


def cp(
    source: Annotated[
        str,
        typer.Argument(
            help="PATH, SANDBOX:PATH, or - for standard input", show_default=False, autocompletion=complete_path
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="PATH, SANDBOX:PATH, or - for standard output", show_default=False, autocompletion=complete_path
        ),
    ],
    user: User = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what a copy of the same file before has left.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a file or a directory into a sandbox or out of it.

    With - in place of a local path one file is taken from standard input, or its content is put to standard output.
    With --resume a large file that did not get through stays as a part, and the same command goes on with that.
    """
    from dsec.core.units import format_size

    there, here = split_remote(target), split_remote(source)
    if (there is None) == (here is None):
        raise typer.BadParameter("exactly one of the two must be SANDBOX:PATH (write ./a:b for a local name with ':')")

    if resume and _STANDARD in (source, target):
        raise typer.BadParameter("what comes from standard input, or goes to standard output, cannot be gone on with")

    async def work() -> None:
        async with client() as c:
            if there is not None:
                done = await _in(await find(c, there[0]), source, there[1], user, resume)
            else:
                assert here is not None
                done = await _out(await find(c, here[0]), here[1], target, user, resume)
        for skipped in done.skipped:
            say(f"left out: {skipped}")
        if settings.json and target != _STANDARD:
            put_json({"bytes": done.bytes, "entries": done.entries, "skipped": done.skipped})
        else:
            say(f"copied {done.entries} {'entry' if done.entries == 1 else 'entries'}, {format_size(done.bytes)}")

    run_async(work())


async def _in(sandbox: AsyncSandbox, source: str, remote: str, user: str | None, resume: bool) -> Transfer:
    from dsec.sdk.files import write_pieces
    from dsec.sdk.transfer import Transfer

    if source != _STANDARD:
        return await sandbox.upload(source, remote, user=user, resume=resume)
    if remote.endswith("/"):
        raise typer.BadParameter("standard input has no name: write SANDBOX:PATH with that of the file")
    return Transfer(await write_pieces(sandbox.files, remote, _standard_input(), user=user))


async def _out(sandbox: AsyncSandbox, remote: str, target: str, user: str | None, resume: bool) -> Transfer:
    import contextlib

    from dsec.core.errors import InvalidArgumentError
    from dsec.sdk.transfer import Transfer

    if target != _STANDARD:
        return await sandbox.download(remote, target, user=user, resume=resume)
    kind = (await sandbox.files.stat(remote, user=user)).kind
    if kind != "file":
        raise InvalidArgumentError(f"{remote} is a {kind}; only a file goes to standard output")
    size = 0
    async with contextlib.aclosing(sandbox.files.stream(remote, user=user)) as pieces:
        async for piece in pieces:
            sys.stdout.buffer.write(piece)
            size += len(piece)
    sys.stdout.buffer.flush()
    return Transfer(size)


async def _standard_input() -> AsyncIterator[bytes]:
    import asyncio

    while piece := await asyncio.to_thread(os.read, sys.stdin.fileno(), _PIECE_BYTES):
        yield piece


def split_remote(text: str) -> tuple[str, str] | None:
    """(sandbox, path) of `SANDBOX:PATH`; None for a local path."""
    found = _REMOTE.match(text)
    return (found[1], found[2] or "/") if found else None
