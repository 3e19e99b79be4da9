"""`dsec run`, `dsec exec`: commands in sandboxes."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsec.cli.console import (
    Json,
    SandboxName,
    client,
    find,
    parse_pairs,
    put_json,
    run_async,
    say,
    settings,
)
from dsec.cli.egress import tell_refused
from dsec.cli.options import (
    Cpu,
    Datasets,
    Disk,
    Egress,
    Env,
    Environment,
    Memory,
    Network,
    Pids,
    Queue,
    Substrate,
    User,
    Volumes,
    egress_of,
)
from dsec.cli.pages import command as register_command
from dsec.cli.volumes import mounts

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.process import AsyncProcess
    from dsec.sdk.results import Chunk, ExecResult
    from dsec.sdk.sandbox import AsyncSandbox
    from dsec.sdk.sessions import AsyncSession

EXIT_TIMEOUT: Final = 124
EXIT_PLATFORM: Final = 125
_READ_BYTES: Final = 64 << 10

# Whatever comes after the command belongs to it.
_PASS_ON = {"allow_interspersed_args": False}
Command = Annotated[list[str], typer.Argument(metavar="COMMAND…", help="And its arguments.", show_default=False)]
Cwd = Annotated[
    str | None, typer.Option("--cwd", "-w", metavar="DIR", help="Directory to run it in.", show_default=False)
]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="Then its processes are ended.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Give it our standard input.")]
Shell = Annotated[bool, typer.Option("--shell", "-c", help="COMMAND is text for a shell.")]
Secrets = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="KEY=VALUE", help="As --env, but written nowhere. KEY takes it from here."),
]


def register(app: typer.Typer) -> None:
    register_command(app, run, context_settings=_PASS_ON)
    register_command(app, exec_, "exec", context_settings=_PASS_ON)


def run(
    command: Command,
    environment: Environment = "base",
    backend: Substrate = "container",
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    pids: Pids = None,
    volume: Volumes = None,
    dataset: Datasets = None,
    network: Network = "none",
    egress: Egress = None,
    env: Env = None,
    secrets: Secrets = None,
    user: User = None,
    cwd: Cwd = None,
    timeout: Timeout = None,
    stdin: Stdin = False,
    shell: Shell = False,
    queue: Queue = 0.0,
    keep: Annotated[bool, typer.Option("--keep", help="Do not destroy the sandbox; say its id.")] = False,
    json: Json = False,
) -> None:
    """Run a command in a sandbox of its own, and destroy that."""

    async def work() -> int:
        from dsec.core.errors import DsecError

        async with client() as c:
            sandbox = await c.create(
                environment,
                backend=backend,
                cpu=cpu,
                memory=memory,
                disk=disk,
                pids=pids,
                volumes=mounts(volume, dataset),
                network=network,
                egress=egress_of(egress),
                user=user,
                ttl_idle_s=3_600.0,
                queue_s=queue,
            )
            try:
                return await _exec(
                    c,
                    sandbox,
                    _command(command, shell),
                    stdin=stdin,
                    cwd=cwd,
                    env=parse_pairs(env, "variable"),
                    secrets=parse_pairs(secrets, "secret"),
                    timeout_s=timeout,
                )
            except DsecError as error:
                if error.detail.get("code") == "command_not_found":
                    error.hint = _not_there(command, environment)
                raise
            finally:
                if keep:
                    say(f"kept: {sandbox.id}")
                else:
                    await sandbox.destroy()

    raise typer.Exit(run_async(work()))


def _not_there(command: list[str], environment: str) -> str:
    if command[1:2] == ["--"]:
        return f"is {command[0]} an environment? dsec run -E {command[0]} -- {' '.join(command[2:])}"
    return (
        f"it is not in environment {environment}, or not in its PATH: `dsec run -E {environment} -- ls /usr/bin` lets "
        "you look, `dsec env build` makes an environment that has it, --shell takes the words as a shell does"
    )


def exec_(
    sandbox: SandboxName,
    command: Command,
    env: Env = None,
    secrets: Secrets = None,
    user: User = None,
    cwd: Cwd = None,
    timeout: Timeout = None,
    stdin: Stdin = False,
    shell: Shell = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it, say the exec's id, and go.")] = False,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In a lasting shell of this name; its directory, variables and user are those of its first command.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run a command in a sandbox; its output is shown as it comes."""
    if session is not None and (secrets or stdin or detach):
        raise typer.BadParameter("goes with none of --secret, --stdin and --detach", param_hint="--session")

    async def work() -> int:
        async with client() as c:
            found = await find(c, sandbox)
            own: dict[str, Any] = {"cwd": cwd, "env": parse_pairs(env, "variable"), "user": user}
            if session is not None:
                shell_of = found.session(session, **own)
                return await _in_session(c, found, shell_of, _command(command, shell), timeout_s=timeout)
            options = {**own, "secrets": parse_pairs(secrets, "secret"), "timeout_s": timeout}
            if detach:
                return await _detached(found, _command(command, shell), options)
            return await _exec(c, found, _command(command, shell), stdin=stdin, **options)

    raise typer.Exit(run_async(work()))


def _command(words: list[str], shell: bool) -> str | list[str]:
    # `exec BOX -- make`: what ends our options comes after an argument, and is still there.
    if words[0].startswith("-") and words[0] != "--":
        raise typer.BadParameter(
            f"{words[0]!r} is no command: options come before it and before the sandbox; "
            "for a command of that name write `--` first",
            param_hint="COMMAND",
        )
    words = words[1:] if words[0] == "--" and len(words) > 1 else words
    return " ".join(words) if shell else words


async def _exec(c: AsyncClient, sandbox: AsyncSandbox, command: str | list[str], *, stdin: bool, **options: Any) -> int:
    """Runs it with live output; what ends us (Ctrl-C, say) kills it."""
    import asyncio

    process = await sandbox.start(command, stdin=stdin, **options)
    feeding = asyncio.create_task(_feed(process)) if stdin else None
    try:
        if not settings.json:
            await _show(process)
        result = await process.wait()
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.shield(asyncio.wait_for(process.kill(), 5.0))
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
    await tell_refused(c, sandbox, result)
    return _told(sandbox.id, result)


async def _detached(sandbox: AsyncSandbox, command: str | list[str], options: dict[str, Any]) -> int:
    process = await sandbox.start(command, **options)
    if settings.json:
        put_json({"sandbox": sandbox.id, "exec": process.id})
    else:
        print(process.id)
    return 0


async def _in_session(
    c: AsyncClient,
    sandbox: AsyncSandbox,
    session: AsyncSession,
    command: str | list[str],
    *,
    timeout_s: float | None,
) -> int:
    def out(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def err(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    live: dict[str, Any] = {} if settings.json else {"on_stdout": out, "on_stderr": err}
    result = await session.exec(command, timeout_s=timeout_s, **live)
    await tell_refused(c, sandbox, result)
    return _told(sandbox.id, result)


async def _feed(process: AsyncProcess) -> None:
    """Our standard input becomes the command's. A reader thread that waits for a terminal ends with the program."""
    import asyncio

    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()
    while data := await loop.run_in_executor(_daemon(), os.read, descriptor, _READ_BYTES):
        await process.write(data)
    await process.close_stdin()


def _daemon() -> Any:
    """An executor whose thread does not keep the program alive while it waits for input."""
    import concurrent.futures
    import threading

    class Daemon(concurrent.futures.Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()

            def work() -> None:
                try:
                    value = fn(*args, **kwargs)
                except OSError:
                    value = b""
                if not future.cancelled():
                    future.set_result(value)

            threading.Thread(target=work, daemon=True).start()
            return future

    return Daemon()


async def _show(process: AsyncProcess) -> None:
    async with contextlib.aclosing(process.output()) as chunks:
        async for chunk in chunks:
            put_chunk(chunk)


def put_chunk(chunk: Chunk) -> None:
    """stdout on stdout, stderr on stderr, as the bytes that they are."""
    stream = sys.stdout.buffer if chunk.stream == "stdout" else sys.stderr.buffer
    stream.write(chunk.data)
    stream.flush()


def _told(sandbox: str, result: ExecResult) -> int:
    """Says how it ended where the exit status alone does not; gives ours."""
    if settings.json:
        put_json(
            {
                "sandbox": sandbox,
                "exec": result.id,
                "status": result.status,
                "exit_code": result.exit_code,
                "signal": result.signal,
                "cause": result.cause,
                "timed_out": result.timed_out,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "truncated": result.truncated,
                "gaps": result.gaps,
                "usage": {
                    "wall_s": result.usage.wall_s,
                    "user_s": result.usage.user_s,
                    "system_s": result.usage.system_s,
                    "max_rss_bytes": result.usage.max_rss_bytes,
                },
            }
        )
    elif result.cause is not None or result.status != "exited":
        say(f"dsec: the command {result.summary()}")
    return exit_status(result)


def exit_status(result: ExecResult) -> int:
    if result.timed_out:
        return EXIT_TIMEOUT
    if result.status == "exited" and result.exit_code is not None:
        return result.exit_code
    if result.status == "signaled" and result.signal is not None:
        return 128 + result.signal
    return EXIT_PLATFORM
