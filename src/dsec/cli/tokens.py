"""`dsec token`: who may call over the network."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dsec.cli.completion import RIGHTS, check_words, one_of
from dsec.cli.console import Json, age, client, put_json, run_async, say, settings, table
from dsec.cli.pages import command

app = typer.Typer(help="Tokens: who may call over the network.", no_args_is_help=True)


def create(
    principal: Annotated[str, typer.Argument(help="Who it is for, in your words.", show_default=False)],
    project: Annotated[str, typer.Option(metavar="PATH", help="What it reaches: this project and those below.")] = "/",
    right: Annotated[
        list[str] | None,
        typer.Option(metavar="RIGHT", help="read, use (default), manage or admin.", autocompletion=one_of(*RIGHTS)),
    ] = None,
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long it lives.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Make a token. It is shown this once."""
    check_words(right, RIGHTS, "--right")

    async def work() -> None:
        async with client() as c:
            answer = await c.tokens.create(principal, project=project, rights=right or ["use"], ttl_s=ttl)
        if settings.json:
            put_json(answer)
            return
        say(f"token {answer.info.id} for {answer.info.principal} in {answer.info.project}; shown this once")
        print(answer.token)

    run_async(work())


def rotate(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of a token; `self` is the one that you show.")] = "self",
    overlap: Annotated[float, typer.Option(metavar="SECONDS", help="How long the old one stays good.")] = 3_600,
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long the new one lives.")] = None,
    json: Json = False,
) -> None:
    """Make a token in the place of another, which stays good for a while. It is shown this once."""

    async def work() -> None:
        async with client() as c:
            answer = await c.tokens.rotate(id, overlap_s=overlap, ttl_s=ttl)
        if settings.json:
            put_json(answer)
            return
        say(f"token {answer.info.id} for {answer.info.principal} in {answer.info.project}; shown this once")
        print(answer.token)

    run_async(work())


def list_(json: Json = False) -> None:
    """List the tokens, without their secrets."""

    async def work() -> None:
        async with client() as c:
            found = await c.tokens.list()
        if settings.json:
            put_json(found)
            return
        now = time.time()
        rows = [
            (t.id, t.principal, t.project, ",".join(t.rights), age(now - t.created_at), _state(t, now)) for t in found
        ]
        table(("ID", "PRINCIPAL", "PROJECT", "RIGHTS", "AGE", "STATE"), rows)

    def _state(token: object, now: float) -> str:
        if getattr(token, "revoked_at", None) is not None:
            return "revoked"
        expires = getattr(token, "expires_at", None)
        return "valid" if expires is None else ("expired" if expires < now else f"valid for {age(expires - now)}")

    run_async(work())


def rm(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Of tokens, as `dsec token ls` shows them.")],
    json: Json = False,
) -> None:
    """Revoke tokens, at once."""

    async def work() -> None:
        async with client() as c:
            for id in ids:
                await c.tokens.revoke(id)
                if not settings.json:
                    say(f"revoked {id}")
        if settings.json:
            put_json({"removed": ids, "revoked": ids})

    run_async(work())


command(app, create, of="token")
command(app, rotate, of="token")
command(app, list_, "ls", of="token")
command(app, rm, of="token")
