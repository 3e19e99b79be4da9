"""`dsec create`, `dsec ls`, `dsec pause`, `dsec resume`, `dsec rm`: which sandboxes there are."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.completion import complete_environment, complete_sandbox
from dsec.cli.console import (
    Json,
    age,
    client,
    find_id,
    parse_pairs,
    put_json,
    run_async,
    say,
    settings,
    table,
    warn_of,
)
from dsec.cli.options import (
    Cpu,
    Datasets,
    Disk,
    Egress,
    Env,
    Job,
    Labels,
    Memory,
    Name,
    Network,
    Pids,
    Queue,
    Substrate,
    TtlIdle,
    TtlRunning,
    User,
    Volumes,
    egress_of,
)
from dsec.cli.pages import command
from dsec.cli.volumes import mounts

if TYPE_CHECKING:
    from dsec.sdk.sandbox import AsyncSandbox
    from dsec.wire.records import Sandbox as SandboxInfo

_STATES = ("creating", "running", "pausing", "paused", "resuming", "destroying", "gone", "failed")


def register(app: typer.Typer) -> None:
    command(app, create)
    command(app, ls)
    command(app, pause)
    command(app, resume)
    command(app, rm)


def create(
    environment: Annotated[
        str | None,
        typer.Argument(
            help="What it starts from: base, unless it is another.",
            autocompletion=complete_environment,
            show_default=False,
        ),
    ] = None,
    backend: Substrate = "container",
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    pids: Pids = None,
    env: Env = None,
    volume: Volumes = None,
    dataset: Datasets = None,
    user: User = None,
    workdir: Annotated[
        str | None, typer.Option(metavar="DIR", help="In which its commands begin.", show_default=False)
    ] = None,
    network: Network = "none",
    egress: Egress = None,
    name: Name = None,
    label: Labels = None,
    job: Job = None,
    ttl_running: TtlRunning = None,
    ttl_idle: TtlIdle = None,
    privilege_gain: Annotated[
        bool, typer.Option("--privilege-gain", help="Let set-user-id programs such as sudo raise privileges.")
    ] = False,
    keepalive: Annotated[
        bool, typer.Option("--keepalive", help="Background processes are use, too, for --ttl-idle.")
    ] = False,
    start: Annotated[bool, typer.Option("--start", help="Run what the environment says: `dsec logs ID main`.")] = False,
    ready_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="With --start: wait until it accepts.", show_default=False)
    ] = None,
    ready_shell: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --start: wait until this shell command succeeds.", show_default=False),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="From a snapshot; what is not given is as in its sandbox.", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="To wait for it.")] = 60.0,
    queue: Queue = 0.0,
    json: Json = False,
) -> None:
    """Create a sandbox and say its id. It lives until `dsec rm`, or its time to live is over."""

    if snapshot is not None and environment is not None:
        raise typer.BadParameter("it starts from the snapshot: leave the environment out", param_hint="ENVIRONMENT")
    probe: dict[str, Any] = {"port": ready_port, "shell": ready_shell}

    async def work() -> None:
        async with client() as c:
            sandbox = await c.create(
                environment or "base",
                backend=backend,
                cpu=cpu,
                memory=memory,
                disk=disk,
                pids=pids,
                env=parse_pairs(env, "variable"),
                user=user,
                workdir=workdir,
                network=network,
                egress=egress_of(egress),
                name=name,
                labels=parse_pairs(label, "label"),
                job=job,
                ttl_running_s=ttl_running,
                ttl_idle_s=ttl_idle,
                privilege_gain=privilege_gain or None,
                keepalive=keepalive or None,
                start=start or None,
                ready=None if ready_port is None and ready_shell is None else probe,
                volumes=mounts(volume, dataset),
                snapshot=snapshot,
                timeout_s=timeout,
                queue_s=queue,
            )
            if settings.json:
                put_json(sandbox.info)
            else:
                print(sandbox.id)

    run_async(work())


def ls(
    label: Labels = None,
    name: Name = None,
    job: Job = None,
    all: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended within a day.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the ids.")] = False,
    json: Json = False,
) -> None:
    """List the sandboxes that live."""

    async def work() -> None:
        silent: set[str] = set()
        async with client() as c:
            states = _STATES if all else ()
            found = await c.list(labels=parse_pairs(label, "label"), name=name, job=job, states=states, missing=silent)
        warn_of(silent)
        if settings.json:
            put_json([sandbox.info for sandbox in found])
            return
        if quiet:
            for sandbox in found:
                print(sandbox.id)
            return
        now = time.time()
        rows = [
            (
                i.id,
                i.name or "",
                _state(i),
                i.environment,
                i.job or "",
                age(now - i.created_at),
                str(i.execs_live),
                ",".join(f"{k}={v}" for k, v in sorted(i.labels.items())),
            )
            for i in (sandbox.info for sandbox in found)
        ]
        table(("ID", "NAME", "STATE", "ENVIRONMENT", "JOB", "AGE", "EXECS", "LABELS"), rows)

    run_async(work())


def _state(info: SandboxInfo) -> str:
    more = info.cause or ("asleep" if info.asleep else None)
    return info.state if more is None else f"{info.state} ({more})"


_Some = Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Ids or names.", autocompletion=complete_sandbox)]


def pause(
    sandboxes: _Some,
    deep: Annotated[bool, typer.Option("--deep", help="Memory to the disk too (virtual machines).")] = False,
    json: Json = False,
) -> None:
    """Stop all that runs in sandboxes, and keep it."""
    run_async(_changed(sandboxes, lambda sandbox: sandbox.pause(deep=deep)))


def resume(sandboxes: _Some, json: Json = False) -> None:
    """Let paused sandboxes go on."""
    run_async(_changed(sandboxes, lambda sandbox: sandbox.resume()))


async def _changed(names: list[str], change: Callable[[AsyncSandbox], Awaitable[SandboxInfo]]) -> None:
    """One by one: what was done before one that fails has been told."""
    async with client() as c:
        infos = []
        for id in dict.fromkeys([await find_id(c, name) for name in names]):
            info = await change(await c.get(id))
            infos.append(info)
            if not settings.json:
                say(f"{id} is {info.state}")
        if settings.json:
            put_json(infos)


def rm(
    sandboxes: Annotated[
        list[str] | None, typer.Argument(metavar="SANDBOX…", help="Ids or names.", autocompletion=complete_sandbox)
    ] = None,
    label: Labels = None,
    all: Annotated[bool, typer.Option("--all", help="Every sandbox of yours.")] = False,
    json: Json = False,
) -> None:
    """Destroy sandboxes: by id or name, all that have labels, or all."""
    from dsec.core.errors import NotFoundError

    if not sandboxes and not label and not all:
        raise typer.BadParameter("name a sandbox, or use --label or --all")

    async def work() -> None:
        async with client() as c:
            try:
                ids = [await find_id(c, name) for name in sandboxes or []]
            except NotFoundError:
                if len(sandboxes or ()) > 1:
                    say("nothing was destroyed")
                raise
            if label or all:
                silent: set[str] = set()
                ids += [s.id for s in await c.list(labels=parse_pairs(label, "label"), missing=silent)]
                warn_of(silent)
            for id in dict.fromkeys(ids):
                await (await c.get(id)).destroy()
                if not settings.json:
                    say(f"destroyed {id}")
            if settings.json:
                gone = list(dict.fromkeys(ids))
                put_json({"removed": gone, "destroyed": gone})

    run_async(work())
