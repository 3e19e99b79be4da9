"""`dsec call`: code that is run once; `dsec calls`: what can be called, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.console import Json, clean, client, complain, parse_pairs, put_json, run_async, say, table
from dsec.cli.options import Env, Environment
from dsec.cli.pages import command as register_command
from dsec.core import limits

if TYPE_CHECKING:
    from dsec.sdk.calls import CallResult

_EXITS: Final = {"time_limit": 124, "memory_limit": 137, "output_limit": 125, "platform_failure": 125}
_WALL_S_MIN: Final = 0.001
_READ_BYTES_MAX: Final = 16 << 20
_FILE_HINT: Final = "--file LOCAL, or PATH=LOCAL: PATH is its name beside the code"

app = typer.Typer(help="Task types and places of calls.", no_args_is_help=True, rich_markup_mode=None)


def register(main: typer.Typer) -> None:
    register_command(main, call)


def call(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="python, bash, c, cpp, …", show_default=False)],
    code: Annotated[str, typer.Argument(metavar="CODE", help="A file, or - for standard input.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS…", help="Its arguments.", show_default=False)
    ] = None,
    text: Annotated[bool, typer.Option("--code", "-c", help="CODE is the text itself.")] = False,
    environment: Environment = "base",
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it our standard input.")] = False,
    env: Env = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="[PATH=]LOCAL", help="A file beside the code.", show_default=False),
    ] = None,
    collect: Annotated[
        list[str] | None,
        typer.Option("--collect", metavar="PATH", help="A file to write here afterwards.", show_default=False),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="Of the run.", min=_WALL_S_MIN, max=limits.CALL_WALL_S_MAX),
    ] = 10.0,
    compile_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of the compiler.", min=_WALL_S_MIN, max=limits.CALL_WALL_S_MAX)
    ] = 30.0,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Such as "256MiB"; default: all of the place\'s.')
    ] = None,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long it may wait for a place.", min=0, max=limits.CALL_QUEUE_S_MAX),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Run code once in a container made before, and show what it says."""
    if stdin and code == "-" and not text:
        raise typer.BadParameter("standard input is the code's or the program's, not both")
    files = dict(_local(word) for word in file or ())

    async def work() -> CallResult:
        async with client() as c:
            return await c.call(
                type,
                code if text else _source(code),
                args=args or (),
                environment=environment,
                stdin=sys.stdin.buffer.read(_READ_BYTES_MAX) if stdin else b"",
                env=parse_pairs(env, "variable"),
                files=files,
                collect=collect or (),
                run_timeout_s=timeout,
                compile_timeout_s=compile_timeout,
                memory=memory,
                queue_timeout_s=wait,
            )

    result = run_async(work())
    if json:
        put_json(result)
    else:
        _show(result)
    for path, data in result.files.items():
        target = Path(path).name
        Path(target).write_bytes(data)
        say(f"{target}: {len(data)} bytes")
    raise typer.Exit(_exit(result))


def _show(result: CallResult) -> None:
    if result.compile is not None:
        sys.stderr.write(clean(result.compile.stderr.decode("utf-8", "replace")))
        sys.stderr.flush()
    if result.run is not None:
        sys.stdout.buffer.write(result.run.stdout)
        sys.stdout.buffer.flush()
        sys.stderr.buffer.write(result.run.stderr)
        sys.stderr.buffer.flush()
    for path in result.missing:
        complain(f"{path}: not there, no regular file, or too large")
    if result.status not in ("finished", "error"):
        phase = "the run" if result.run is not None else "the compiler"
        last = result.run or result.compile
        detail = f": {clean(last.detail)}" if last is not None and last.detail else ""
        complain(f"{phase}: {result.status.replace('_', ' ')}{detail}")


def _exit(result: CallResult) -> int:
    if result.status in _EXITS:
        return _EXITS[result.status]
    phase = result.run or result.compile
    if phase is None or result.ok:
        return 0
    return phase.exit_code if phase.exit_code is not None else 128 + (phase.signal or 0)


def _source(code: str) -> str:
    raw = sys.stdin.buffer.read(_READ_BYTES_MAX) if code == "-" else _read(code, "with -c, CODE is the text itself")
    return raw.decode("utf-8", "surrogateescape")


def _local(word: str) -> tuple[str, bytes]:
    path, equals, local = word.partition("=")
    return (path, _read(local, _FILE_HINT)) if equals else (Path(word).name, _read(word, _FILE_HINT))


def _read(path: str, hint: str) -> bytes:
    from dsec.core.errors import InvalidArgumentError

    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}", hint=hint) from error


def types(json: Json = False) -> None:
    """What calls can be of."""

    async def work() -> None:
        async with client() as c:
            found = await c.call_types()
        if json:
            put_json(found)
            return
        table(
            ("TYPE", "FILE", "COMPILED", "WARM"),
            [(t.name, t.source, "yes" if t.compiled else "no", "yes" if t.warm else "no") for t in found],
        )

    run_async(work())


def pools(json: Json = False) -> None:
    """The containers for calls, by environment and task type."""

    async def work() -> None:
        async with client() as c:
            found = await c.call_pools()
        if json:
            put_json(found)
            return
        rows = [
            (p.environment, p.type, *(str(n) for n in (p.idle, p.busy, p.starting, p.queued, p.calls, p.retired)))
            for p in found
        ]
        table(("ENVIRONMENT", "TYPE", "IDLE", "BUSY", "STARTING", "QUEUED", "CALLS", "RETIRED"), rows)

    run_async(work())


register_command(app, types, of="calls")
register_command(app, pools, of="calls")
