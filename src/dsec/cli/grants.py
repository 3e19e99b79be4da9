"""`dsec grant` and `dsec principal`: who may do what in which project."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dsec.cli.completion import RIGHTS, check_words, one_of
from dsec.cli.console import Json, age, client, for_each, put_json, run_async, say, settings, table
from dsec.cli.pages import command

app = typer.Typer(help="Grants: who may do what in which project.", no_args_is_help=True)
principal_app = typer.Typer(help="Principals: who tokens are for.", no_args_is_help=True)


def add(
    principal: Annotated[str, typer.Argument(help="NAME@/PROJECT, or a NAME in the project.", show_default=False)],
    project: Annotated[str, typer.Argument(metavar="PATH", help="This project and those below.", show_default=False)],
    right: Annotated[
        str, typer.Option(metavar="RIGHT", help="read, use, manage or admin.", autocompletion=one_of(*RIGHTS))
    ] = "use",
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Give a right over a project: at most what you have, for no longer."""
    check_words([right], RIGHTS, "--right")

    async def work() -> None:
        async with client() as c:
            made = await c.grants.create(principal, project=project, right=right, ttl_s=ttl)
        if settings.json:
            put_json(made)
        else:
            say(f"grant {made.id}: {made.principal} has {made.right} over {made.project}")

    run_async(work())


def list_(json: Json = False) -> None:
    """List the grants over your projects, and your own."""

    async def work() -> None:
        async with client() as c:
            found = await c.grants.list()
        if settings.json:
            put_json(found)
            return
        now = time.time()
        rows = [
            (
                g.id,
                g.principal,
                g.right,
                g.project,
                g.created_by,
                "over" if not g.in_force else "valid" if g.expires_at is None else f"for {age(g.expires_at - now)}",
            )
            for g in found
        ]
        table(("ID", "PRINCIPAL", "RIGHT", "PROJECT", "GIVEN BY", "STATE"), rows)

    run_async(work())


def rm(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Of grants, as `dsec grant ls` shows them.")],
    json: Json = False,
) -> None:
    """Take grants back, and all that was given by them."""

    for_each(ids, lambda c, id: c.grants.revoke(id), said="took back {}", key="revoked")


def principals(json: Json = False) -> None:
    """List the principals of your projects."""

    async def work() -> None:
        async with client() as c:
            found = await c.grants.principals()
        if settings.json:
            put_json(found)
            return
        now = time.time()
        rows = [(p.id, age(now - p.created_at), p.created_by, str(p.tokens), str(p.grants)) for p in found]
        table(("ID", "AGE", "MADE BY", "TOKENS", "GRANTS"), rows)

    run_async(work())


def remove(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Such as ci@/team.")], json: Json = False
) -> None:
    """Remove principals: their tokens, their grants, and all that they have given."""

    async def work() -> None:
        async with client() as c:
            for id in ids:
                await c.grants.remove_principal(id)
                if not settings.json:
                    say(f"removed {id}")
        if settings.json:
            put_json({"removed": ids})

    run_async(work())


command(app, add, of="grant")
command(app, list_, "ls", of="grant")
command(app, rm, of="grant")
command(principal_app, principals, "ls", of="principal")
command(principal_app, remove, "rm", of="principal")
