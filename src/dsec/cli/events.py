"""`dsec events`: what happens to sandboxes."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.completion import EVENTS, one_of
from dsec.cli.console import Json, clean, client, find_id, parse_pairs, put_json, run_async, settings
from dsec.cli.options import Job, Labels
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.events import Event


def events(
    sandbox: Annotated[
        str | None, typer.Argument(metavar="SANDBOX", help="Only of this one.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, from now.")] = False,
    after: Annotated[
        str | None, typer.Option(metavar="POSITION", help="Go on after it; `oldest`: all that is kept.")
    ] = None,
    label: Labels = None,
    job: Job = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only these; may be repeated.", autocompletion=one_of(*EVENTS)),
    ] = None,
    of: Annotated[str | None, typer.Option("--of", metavar="PROJECT", help="This project, and those below it.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to sandboxes: made, paused, ended, and why."""

    async def work() -> None:
        async with client() as c:
            id = None if sandbox is None else await find_id(c, sandbox)
            found = c.events(
                after,
                follow=follow,
                project=of,
                labels=parse_pairs(label, "label"),
                sandbox=id,
                job=job,
                kinds=tuple(kind or ()),
            )
            async with aclosing(found) as items:
                async for event in items:
                    if settings.json:
                        put_json(event)
                    else:
                        print(clean(_line(event)), flush=True)

    run_async(work())


def _line(event: Event) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    name = f"({event.name})" if event.name else ""
    why = ": ".join(part for part in (event.cause, event.detail) if part)
    about = (event.sandbox or event.node, name, event.project, event.snapshot, why)
    return f"{moment} {event.kind:11} " + " ".join(" ".join(word.split()) for word in about if word)


def register(app: typer.Typer) -> None:
    command(app, events)
