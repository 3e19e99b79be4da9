"""`dsec job`: sandboxes that are paused, resumed and stopped together, and have a lease."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.completion import one_of
from dsec.cli.console import (
    Json,
    age,
    clean,
    client,
    complain,
    for_each,
    put_json,
    run_async,
    say,
    settings,
    table,
    when,
    without,
)
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.reports import JobReport
    from dsec.wire.jobs import JobInfo

app = typer.Typer(help="Jobs: sandboxes that live and end together.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the job.", show_default=False)]


def create(
    name: Name,
    lease: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Without heartbeat, until it is missed.", show_default=False),
    ] = None,
    on_missed: Annotated[
        str, typer.Option(metavar="WHAT", help="When it is: pause or stop.", autocompletion=one_of("pause", "stop"))
    ] = "pause",
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Until those are stopped that cannot be paused.")
    ] = 300.0,
    json: Json = False,
) -> None:
    """Make a job."""

    async def work() -> None:
        async with client() as c:
            job = await c.jobs.create(name, lease_s=lease, on_missed=on_missed, grace_s=grace)
        if settings.json:
            put_json(job.info)
        else:
            print(job.name)

    run_async(work())


def list_(json: Json = False) -> None:
    """List the jobs; stopped ones for a day."""

    async def work() -> None:
        async with client() as c:
            found = await c.jobs.list()
        if settings.json:
            put_json(found)
            return
        table(("NAME", "PROJECT", "STATE", "LEASE", "HEARTBEAT", "AGE"), [_row(job) for job in found])

    run_async(work())


def _row(job: JobInfo) -> tuple[str, ...]:
    now = time.time()
    return (
        job.name,
        job.project,
        _state(job),
        "" if job.lease_s is None else f"{job.lease_s:g}s",
        "" if job.lease_s is None else age(max(now - job.heartbeat_at, 0.0)),
        age(max(now - job.created_at, 0.0)),
    )


def _state(job: JobInfo) -> str:
    missed = " (lease missed)" if job.because == "lease" and job.state != "running" else ""
    return f"{job.state}{missed}{'' if job.settled else ' (on its way)'}"


def show(name: Name, json: Json = False) -> None:
    """Show one job, and its sandboxes by state."""

    async def work() -> None:
        async with client() as c:
            info = (await c.jobs.get(name)).info
        if settings.json:
            put_json(info)
            return
        print(f"name: {clean(info.name)}\nproject: {clean(info.project)}\nmade by: {clean(info.principal)}")
        print(f"state: {_state(info)}\ncreated: {when(info.created_at)}")
        if info.lease_s is not None:
            print(f"lease: {info.lease_s:g} s, then {info.on_missed}; grace {info.grace_s:g} s")
            print(f"last heartbeat: {when(info.heartbeat_at)}")
        for state, count in sorted((info.sandboxes or {}).items()):
            print(f"sandboxes {clean(state)}: {count}")
        if info.missing:
            say(without(info.missing))

    run_async(work())


def extend(
    name: Name,
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="From now on.", show_default=False)],
    json: Json = False,
) -> None:
    """Make its lease last for so long from now on, without heartbeats."""

    async def work() -> None:
        async with client() as c:
            info = await (await c.jobs.get(name)).extend(seconds)
        if settings.json:
            put_json(info)
        else:
            say(f"the lease of {name} is good for {seconds:g} s")

    run_async(work())


def pause(name: Name, json: Json = False) -> None:
    """Pause all its sandboxes."""
    _order(name, "pause", "paused")


def resume(name: Name, json: Json = False) -> None:
    """Let all its sandboxes go on."""
    _order(name, "resume", "resumed")


def stop(name: Name, json: Json = False) -> None:
    """Destroy all its sandboxes, for good."""
    _order(name, "stop", "stopped")


def _order(name: str, verb: str, done: str) -> None:
    async def work() -> JobReport:
        async with client() as c:
            job = await c.jobs.get(name)
            report: JobReport = await getattr(job, verb)()
            return report

    report = run_async(work())
    if settings.json:
        put_json(report)
    else:
        say(f"{done} {report.done} sandboxes of {name}")
        for item in report.failed:
            complain(f"{item.sandbox}: {clean(item.error.message if item.error else '')}")
        for node, why in report.missing.items():
            complain(f"node {node}: {clean(why)}")
    if not report.ok:
        raise typer.Exit(1)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Of jobs that are stopped.")],
    json: Json = False,
) -> None:
    """Forget jobs that are stopped."""

    async def act(c: AsyncClient, name: str) -> None:
        await (await c.jobs.get(name)).remove()

    for_each(names, act)


command(app, create, of="job")
command(app, list_, "ls", of="job")
command(app, show, of="job")
command(app, extend, of="job")
command(app, pause, of="job")
command(app, resume, of="job")
command(app, stop, of="job")
command(app, rm, of="job")
