"""`dsec snapshot`, `dsec fork`, `dsec rollback`: what sandboxes have on their disks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dsec.cli.completion import complete_sandbox
from dsec.cli.console import (
    Json,
    age,
    clean,
    client,
    find_id,
    for_each,
    of_cluster,
    put_json,
    run_async,
    say,
    settings,
    table,
    warn_of,
    when,
)
from dsec.cli.machines import export_disk
from dsec.cli.pages import command

app = typer.Typer(help="Snapshots: what sandboxes had on their disks, kept by name.", no_args_is_help=True)
Sandbox = Annotated[
    str, typer.Argument(metavar="ID", help="Of the sandbox, or its name.", autocompletion=complete_sandbox)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the snapshot, or its id.", show_default=False)]


def register(main: typer.Typer) -> None:
    command(main, fork)
    command(main, rollback)


def create(
    sandbox: Sandbox,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Unique in your project.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Keep what a sandbox has on its disk now; it goes on."""

    async def work() -> None:
        async with client() as c:
            found = await c.get(await find_id(c, sandbox))
            snapshot = await found.snapshot(name)
        if settings.json:
            put_json(snapshot.info)
            return
        print(snapshot.name)
        if snapshot.info.notes:
            say(clean(snapshot.info.notes))

    run_async(work())


def list_(
    of: Annotated[
        str | None, typer.Option("--sandbox", metavar="ID", help="Only those of this one.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the snapshots."""
    from dsec.core.units import format_size

    async def work() -> None:
        silent: set[str] = set()
        async with client() as c:
            found = await c.snapshots.list(sandbox=of, missing=silent)
            nodes = {snapshot.info.node for snapshot in found}
            several = bool(silent) or len(nodes) > 1 or await of_cluster(c)
        warn_of(silent)
        if settings.json:
            put_json([snapshot.info for snapshot in found])
            return
        rows = [
            (
                info.name,
                info.sandbox,
                format_size(info.size_bytes),
                age(time.time() - info.created_at),
                *([info.node or ""] if several else []),
            )
            for info in (snapshot.info for snapshot in found)
        ]
        table(("NAME", "SANDBOX", "SIZE", "AGE", *(["NODE"] if several else [])), rows)

    run_async(work())


def show(name: Name, json: Json = False) -> None:
    """Show one snapshot."""

    async def work() -> None:
        import msgspec

        from dsec.core.units import format_size

        async with client() as c:
            info = (await c.snapshots.get(name)).info
        if settings.json:
            put_json(info)
            return
        shown = msgspec.structs.asdict(info) | {"size": format_size(info.size_bytes)}
        del shown["layers"], shown["size_bytes"]
        shown |= {"created_at": when(info.created_at), "frozen_ms": f"{info.frozen_ms:.1f}"}
        for key, value in shown.items():
            if value not in (None, ""):
                print(f"{key}: {clean(str(value))}")
        for digest in info.layers:
            print(f"layer: {digest[:12]}")

    run_async(work())


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Of snapshots, or their ids.")],
    json: Json = False,
) -> None:
    """Remove snapshots that no living sandbox was made from."""

    for_each(names, lambda c, name: c.snapshots.remove(name))


def publish(
    snapshot: Name,
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Of the environment.", show_default=False)],
    toolkit: Annotated[bool, typer.Option("--toolkit", help="A toolkit rather than a workspace.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="RULE", help="A rule not to apply. May be repeated.", show_default=False),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Give the name to other content.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be left out.")] = False,
    json: Json = False,
) -> None:
    """Make a workspace or toolkit of a snapshot, without residue."""
    from dsec.core.units import format_size

    async def work() -> None:
        async with client() as c:
            found = await c.snapshots.get(snapshot)
            published = await found.publish(
                name,
                kind="toolkit" if toolkit else "workspace",
                keep=keep or [],
                replace=replace,
                dry_run=dry_run,
            )
        if settings.json:
            put_json(published)
            return
        rows = [
            (removed.rule, str(removed.entries), format_size(removed.size_bytes), clean(" ".join(removed.paths[:2])))
            for removed in published.removed
        ]
        if rows:
            table(("LEFT OUT", "ENTRIES", "SIZE", "SUCH AS"), rows)
        elif dry_run:
            say("nothing would be left out")
        if published.environment is not None:
            say(f"{published.environment.name}: {format_size(published.environment.size_bytes)}")

    run_async(work())


def fork(
    sandbox: Sandbox,
    count: Annotated[int, typer.Option("--count", "-n", metavar="COUNT", help="How many.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Make new sandboxes on what one has on its disk now: all of them, or none."""

    async def work() -> None:
        async with client() as c:
            found = await c.get(await find_id(c, sandbox))
            forks = await found.fork(count)
        if settings.json:
            put_json([made.info for made in forks])
            return
        for made in forks:
            print(made.id)

    run_async(work())


def rollback(sandbox: Sandbox, snapshot: Name, json: Json = False) -> None:
    """Take a sandbox back to a snapshot. All that runs in it ends."""

    async def work() -> None:
        async with client() as c:
            found = await c.get(await find_id(c, sandbox))
            info = await found.rollback(snapshot)
        if settings.json:
            put_json(info)
        else:
            say(f"{info.id} is as it was in {snapshot}")

    run_async(work())


def export(
    snapshot: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New, on the node.", show_default=False)],
    format: Annotated[str, typer.Option(metavar="NAME", help="raw or qcow2.")] = "raw",
    json: Json = False,
) -> None:
    """Write the disk of a machine's snapshot into a file."""
    export_disk(lambda c: c.machines.export_snapshot(snapshot, file, format=format), format)


command(app, create, of="snapshot")
command(app, list_, "ls", of="snapshot")
command(app, show, of="snapshot")
command(app, rm, of="snapshot")
command(app, publish, of="snapshot")
command(app, export, of="snapshot")
