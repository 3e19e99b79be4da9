"""`dsec shell`: a terminal in a sandbox, on ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.console import SandboxName, client, find, run_async
from dsec.cli.options import User
from dsec.cli.pages import command as register_command
from dsec.cli.processes import exit_status

if TYPE_CHECKING:
    import asyncio

    from dsec.sdk.pty import AsyncPty


def register(app: typer.Typer) -> None:
    register_command(app, shell)


def shell(
    sandbox: SandboxName,
    command: Annotated[str | None, typer.Argument(help="Instead of a login shell.", show_default=False)] = None,
    user: User = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-w", metavar="DIR", help="Directory to begin in.", show_default=False)
    ] = None,
) -> None:
    """Open an interactive shell. It ends with the shell; hanging up kills what runs in it."""
    from dsec.core.errors import InvalidArgumentError

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidArgumentError("this is not a terminal", hint="use `dsec exec -i SANDBOX -- COMMAND`")

    async def work() -> int:
        async with client() as c:
            found = await find(c, sandbox)
            size = shutil.get_terminal_size()
            env = {"TERM": os.environ.get("TERM", "xterm-256color")}
            pty = await found.pty(command, cols=size.columns, rows=size.lines, user=user, cwd=cwd, env=env)
            async with pty:
                with raw_terminal(sys.stdin.fileno()):
                    await _connected(pty)
                return exit_status(await pty.wait())

    raise typer.Exit(run_async(work()))


@contextlib.contextmanager
def raw_terminal(descriptor: int) -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too. What was set before is restored, whatever happens."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


async def _connected(pty: AsyncPty) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)
    resized = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _take_keys, keys)
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    typing = asyncio.create_task(_type(pty, keys))
    sizing = asyncio.create_task(_resize(pty, resized))
    try:
        while data := await pty.read():
            await loop.run_in_executor(None, _put, data)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in (typing, sizing):
            task.cancel()
        await asyncio.gather(typing, sizing, return_exceptions=True)


def _take_keys(keys: asyncio.Queue[bytes]) -> None:
    if not keys.full():  # else they stay in the kernel until the sandbox has caught up
        with contextlib.suppress(OSError):
            keys.put_nowait(os.read(sys.stdin.fileno(), 4_096))


async def _type(pty: AsyncPty, keys: asyncio.Queue[bytes]) -> None:
    while data := await keys.get():
        await pty.write(data)


async def _resize(pty: AsyncPty, resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        size = shutil.get_terminal_size()
        await pty.resize(size.columns, size.lines)


def _put(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
