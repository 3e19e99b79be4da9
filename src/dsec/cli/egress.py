"""`dsec egress`: what a sandbox with a network reaches, while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.console import Json, SandboxName, client, find, put_json, run_async, settings
from dsec.cli.options import egress_of
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.records import Sandbox


def register(app: typer.Typer) -> None:
    command(app, egress)


def egress(
    sandbox: SandboxName,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="HOST[:PORTS]",
            help="This, and no more. May be repeated; none: nothing.",
            show_default=False,
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="All that is public.")] = False,
    json: Json = False,
) -> None:
    """Say what a sandbox reaches, or replace that."""
    if public and allow:
        raise typer.BadParameter("--public is all that there is to allow", param_hint="--allow")

    async def work() -> Sandbox:
        async with client() as c:
            found = await find(c, sandbox)
            return await found.set_egress(egress_of(allow)) if public or allow else found.info

    info = run_async(work())
    if settings.json:
        put_json(info)
        return
    for line in _lines(info):
        print(line)


def _lines(info: Sandbox) -> list[str]:
    if info.network != "proxied":
        return [f"nothing: its network is {info.network}"]
    if info.egress is None:
        return ["all that is public"]
    return info.egress or ["nothing"]
