"""`dsec egress`: what a sandbox with a network reaches, while it runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.console import Json, SandboxName, clean, client, find, put_json, run_async, say, settings
from dsec.cli.options import egress_of
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.results import ExecResult
    from dsec.sdk.sandbox import AsyncSandbox
    from dsec.wire.events import Denied
    from dsec.wire.records import Sandbox

_GATHERED_S: Final = 0.4  # a node tells of refusals a moment after the first
_LATE_S: Final = 1.3  # of one that was refused something just before: it is told once a second
_HINT_S: Final = 3.0
_NAMED_MAX: Final = 3
_BOUNDS: Final = frozenset(("connections", "memory", "rate", "more"))
_NOT_PUBLIC: Final = (
    "what is private is not public, and no --allow alone opens it: only the operator does ([node.egress] private), "
    "and never what is the host's own"
)
_BOUNDED: Final = "what is of connections, memory or rate was too much at once, and no rule changes that"


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


async def tell_refused(client: AsyncClient, sandbox: AsyncSandbox, result: ExecResult) -> None:
    """After a command that failed: what its sandbox was refused meanwhile. On our stderr, and without --json."""
    if result.ok or settings.json or settings.quiet or sandbox.info.network != "proxied":
        return
    import asyncio

    from dsec.core.errors import DsecError

    with contextlib.suppress(DsecError, TimeoutError):
        async with asyncio.timeout(_HINT_S):
            began = next((one.started_at for one in await sandbox.execs() if one.id == result.id), None)
            if began is None:
                return
            for wait_s in (_GATHERED_S, _LATE_S):
                await asyncio.sleep(wait_s)
                found = client.events("oldest", sandbox=sandbox.id, kinds=["egress_denied"], follow=False)
                async with contextlib.aclosing(found) as events:
                    told = [event async for event in events]
                if denied := [one for event in told if event.at >= began for one in event.denied]:
                    say(clean(_refusal(sandbox, denied)))
                    return
                if not told:
                    return


def _refusal(sandbox: AsyncSandbox, denied: list[Denied]) -> str:
    what = dict.fromkeys(f"{one.host}{f':{one.port}' if one.port else ''} ({one.reason})" for one in denied)
    more = f" and {len(what) - _NAMED_MAX} more" if len(what) > _NAMED_MAX else ""
    named = ", ".join(list(what)[:_NAMED_MAX])
    name = sandbox.info.name or sandbox.id
    reasons = {one.reason for one in denied}
    hints = [f"`dsec egress {name}` says what is allowed, and --allow changes it"]
    if reasons <= {"private", *_BOUNDS}:
        hints.clear()
    hints += [_NOT_PUBLIC] if "private" in reasons else []
    hints += [_BOUNDED] if reasons & _BOUNDS else []
    return "; ".join([f"dsec: refused meanwhile: {named}{more}", *hints])


def _lines(info: Sandbox) -> list[str]:
    if info.network != "proxied":
        return [f"nothing: its network is {info.network}"]
    if info.egress is None:
        return ["all that is public"]
    return info.egress or ["nothing"]
