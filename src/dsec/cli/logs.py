"""`dsec logs`: what commands say, and said before."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.completion import complete_exec
from dsec.cli.console import Json, SandboxName, age, client, put_json, run_async, settings, table
from dsec.cli.pages import command
from dsec.cli.processes import put_chunk

if TYPE_CHECKING:
    from dsec.sdk.process import AsyncProcess
    from dsec.sdk.results import Chunk
    from dsec.sdk.sandbox import AsyncSandbox
    from dsec.wire.records import ExecInfo

_SINCE: Final = re.compile(r"(?P<count>[0-9]+(?:\.[0-9]+)?)(?P<unit>[smhd]?)\Z")
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_TAIL_BYTES_MAX: Final = 16 << 20  # of lines without an end, so that a tail stays small


def register(app: typer.Typer) -> None:
    command(app, logs)


def logs(
    sandbox: SandboxName,
    exec: Annotated[
        str | None,
        typer.Argument(
            metavar="EXEC",
            help="Its id, main, or latest; without it the commands are listed.",
            autocompletion=complete_exec,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the command's end; without EXEC, of the latest.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="LINES", min=0, help="Only the last lines on record.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGO", help="Only commands started since, such as 90s, 10m, 2h, 1d.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the output of a command that was started before, or list a sandbox's commands."""
    began = None if since is None else time.time() - _seconds(since)

    async def work() -> None:
        async with client() as c:
            found = await (c.get(sandbox) if sandbox.startswith("sbx_") else c.find(sandbox, ended=True))
            if exec is None and not follow and tail is None:
                _list(await _execs(found, began))
                return
            process = await _process(found, exec or "latest", began)
            await _show(found, process, follow=follow, tail=tail)

    run_async(work())


def _seconds(text: str) -> float:
    found = _SINCE.match(text)
    if found is None:
        raise typer.BadParameter(f"{text[:40]!r} is no time ago: write 90s, 10m, 2h or 1d", param_hint="--since")
    return float(found["count"]) * _UNITS[found["unit"]]


async def _execs(sandbox: AsyncSandbox, began: float | None) -> list[ExecInfo]:
    return [info for info in await sandbox.execs() if began is None or info.started_at >= began]


async def _process(sandbox: AsyncSandbox, exec: str, began: float | None) -> AsyncProcess:
    from dsec.core.errors import ExecNotFoundError

    if exec == "main":
        return sandbox.main
    if exec != "latest":
        return await sandbox.attach(exec)
    found = await _execs(sandbox, began)
    if not found:
        raise ExecNotFoundError(
            f"{sandbox.id} has no command on record" + ("" if began is None else " that was started since"),
            hint="`dsec exec` starts one; old records make room for new ones",
        )
    return await sandbox.attach(max(found, key=lambda info: info.started_at).id)


async def _show(sandbox: AsyncSandbox, process: AsyncProcess, *, follow: bool, tail: int | None) -> None:
    offsets = {"stdout": 0, "stderr": 0}
    if tail is not None:
        for chunk in await _tail(process, tail, offsets):
            _put(chunk)
        if not follow:
            return
        process = await sandbox.attach(process.id, offsets["stdout"], stderr_offset=offsets["stderr"])
    async with contextlib.aclosing(process.output(follow=follow)) as chunks:
        async for chunk in chunks:
            _put(chunk)


async def _tail(process: AsyncProcess, lines: int, offsets: dict[str, int]) -> list[Chunk]:
    """The last `lines` of what is on record; `offsets` become where it ends."""
    kept: deque[Chunk] = deque()
    ends = size = 0  # line ends, and bytes, in what is kept
    async with contextlib.aclosing(process.output(follow=False)) as chunks:
        async for chunk in chunks:
            offsets[chunk.stream] = max(offsets[chunk.stream], chunk.offset + len(chunk.data))
            kept.append(chunk)
            ends, size = ends + chunk.data.count(b"\n"), size + len(chunk.data)
            while kept and (ends - kept[0].data.count(b"\n") > lines or size > _TAIL_BYTES_MAX) and len(kept) > 1:
                dropped = kept.popleft()
                ends, size = ends - dropped.data.count(b"\n"), size - len(dropped.data)
    return _cut(list(kept), lines)


def _cut(kept: list[Chunk], lines: int) -> list[Chunk]:
    """Without what comes before the last `lines` lines."""
    from dataclasses import replace

    joined = b"".join(chunk.data for chunk in kept)
    start = len(joined) - joined.endswith(b"\n")  # the last line's own end begins no other line
    for _ in range(lines):
        if start >= 0:
            start = joined.rfind(b"\n", 0, start)
    skip = start + 1 if lines else len(joined)
    wanted = []
    for chunk in kept:
        data = chunk.data[min(skip, len(chunk.data)) :]
        if len(data) == len(chunk.data):
            wanted.append(chunk)
        elif data:
            text = data.decode("utf-8", "replace")
            wanted.append(replace(chunk, offset=chunk.offset + skip, data=data, text=text))
        skip = max(0, skip - len(chunk.data))
    return [chunk for chunk in wanted if chunk.data]


def _put(chunk: Chunk) -> None:
    if settings.json:
        put_json({"stream": chunk.stream, "offset": chunk.offset, "data": chunk.data, "text": chunk.text})
    else:
        put_chunk(chunk)


def _list(execs: list[ExecInfo]) -> None:
    if settings.json:
        put_json(execs)
        return
    rows = [
        (
            e.name or e.id,
            e.state if e.state == "running" else (e.cause or e.status or e.state),
            "" if e.exit_code is None else str(e.exit_code),
            age(time.time() - e.started_at),
            e.command,
        )
        for e in execs
    ]
    table(("EXEC", "STATE", "CODE", "AGE", "COMMAND"), rows)
