"""`dsec group`: several sandboxes with private names, started and stopped as one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.console import (
    Json,
    age,
    clean,
    client,
    complain,
    for_each,
    lay_out,
    put_json,
    run_async,
    say,
    settings,
    table,
    without,
)
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.wire.groups import GroupInfo, GroupStep
    from dsec.wire.plans import GroupExplanation

app = typer.Typer(help="Groups: sandboxes that reach each other by name.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the group.", show_default=False)]
File = Annotated[Path | None, typer.Argument(metavar="FILE", help="A compose file; compose.yaml here without.")]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="The same, as others have it.")]
Named = Annotated[
    str | None, typer.Option("--name", "-n", metavar="NAME", help="Default: the file's, or its directory's.")
]
Profiles = Annotated[
    list[str] | None, typer.Option("--profile", metavar="NAME", help="Services of it, too. May be repeated.")
]
_FILES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")


def up(
    file: File = None,
    option: FileOption = None,
    name: Named = None,
    profile: Profiles = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each service to start, and be ready.")] = 60.0,
    json: Json = False,
) -> None:
    """Start a group from a compose file: all its services, or none."""
    path = _path(file, option)

    async def work() -> GroupInfo:
        async with client() as c:
            group = await c.groups.from_compose(
                path,
                name=name,
                profiles=profile or (),
                timeout_s=timeout,
                on_note=lambda note: say(clean(note)),
                on_step=_tell,
            )
            return group.info

    info = run_async(work())
    if settings.json:
        put_json(info)
        return
    for member, id in info.members.items():
        print(f"{member} {id}")


def _tell(step: GroupStep) -> None:
    """On stderr, also with --json: stdout has the result alone."""
    if settings.json:
        from dsec.wire.codec import to_json

        complain(to_json(step).decode())
        return
    say(clean(f"[{step.after_s:5.1f} s] {step.member + ': ' if step.member else ''}{' '.join(step.message.split())}"))


def _path(file: Path | None, option: Path | None) -> Path:
    if file is not None and option is not None:
        raise typer.BadParameter("name the file once", param_hint="--file")
    return file or option or next((Path(one) for one in _FILES if Path(one).is_file()), Path(_FILES[0]))


def explain(
    file: File = None,
    option: FileOption = None,
    name: Named = None,
    profile: Profiles = None,
    json: Json = False,
) -> None:
    """Say what would become of `group up` now, and why. Nothing happens."""
    path = _path(file, option)

    async def work() -> GroupExplanation:
        async with client() as c:
            return await c.groups.explain_compose(path, name=name, profiles=profile or ())

    found = run_async(work())
    if settings.json:
        put_json(found)
    else:
        for line in _explained(found):
            print(line)
    if not found.would_be_made:
        raise typer.Exit(1)


def _explained(found: GroupExplanation) -> list[str]:
    lines = [f"in {clean(found.project)}: {'it would be started' if found.would_be_made else 'it would be refused'}"]
    if found.why is not None:
        lines.append(clean(found.why))
    for member, one in found.members.items():
        if one.policy is not None:
            lines.append(f"{member}: {clean(one.policy.message)}")
    for cap in found.caps:
        if not cap.fits:
            lines.append(f"no room below the cap {cap.cap} of {clean(cap.project)}")
    rows = [(member, clean(found.nodes.get(member, "none"))) for member in found.members]
    return [*lines, *lay_out(("MEMBER", "NODE"), rows)]


def list_(json: Json = False) -> None:
    """List the groups."""

    async def work() -> list[GroupInfo]:
        async with client() as c:
            return await c.groups.list()

    found = run_async(work())
    if settings.json:
        put_json(found)
        return
    now = time.time()
    rows = [
        (one.name, one.project, one.state, age(max(now - one.created_at, 0.0)), ",".join(one.members)) for one in found
    ]
    table(("NAME", "PROJECT", "STATE", "AGE", "MEMBERS"), rows)


def show(name: Name, json: Json = False) -> None:
    """Show one group and its sandboxes."""

    async def work() -> GroupInfo:
        async with client() as c:
            return (await c.groups.get(name)).info

    info = run_async(work())
    if settings.json:
        put_json(info)
        return
    print(f"name: {clean(info.name)}\nproject: {clean(info.project)}\nstate: {clean(info.state)}")
    rows = [
        (one.member or "", one.id, one.state if one.cause is None else f"{one.state} ({one.cause})", one.environment)
        for one in info.sandboxes or []
    ]
    table(("MEMBER", "SANDBOX", "STATE", "ENVIRONMENT"), sorted(rows))
    if info.missing:
        say(without(info.missing))


def down(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Of groups.")],
    json: Json = False,
) -> None:
    """Destroy all sandboxes of groups, and forget them. Volumes stay."""

    async def act(c: AsyncClient, name: str) -> None:
        await (await c.groups.get(name)).down()

    for_each(names, act, said="group {} is gone")


command(app, up, of="group")
command(app, explain, of="group")
command(app, list_, "ls", of="group")
command(app, show, of="group")
command(app, down, of="group")
