"""`dsec up`, `dsec down`, `dsec doctor`: the service of this machine. What they do is in `dsec.serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dsec.cli.console import Json, clean, client, put_json, run_async, say, settings, table

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    app.command(context_settings=_PASS_ON, add_help_option=False)(up)
    app.command(context_settings=_PASS_ON, add_help_option=False)(down)
    app.command()(doctor)


def up(context: typer.Context) -> None:
    """Start the service of this machine (`dsec up --help` shows its options)."""
    _become("up", context.args)


def down(context: typer.Context) -> None:
    """Stop the service of this machine."""
    _become("down", context.args)


def _become(command: str, arguments: list[str]) -> None:
    # The service belongs to another layer, which the command line does not import: it becomes that program.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "dsec.serve", command, *arguments])


def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also what is fine.")] = False, json: Json = False
) -> None:
    """Say what this machine can do, and what it lacks."""
    from dsec.wire.records import DoctorReport

    async def ask() -> DoctorReport:
        async with client() as c:
            return await c.doctor()

    report = run_async(ask())
    if settings.json:
        put_json(report)
        return
    for substrate, state in sorted(report.substrates.items()):
        print(f"{substrate}: {clean(state)}")
    shown = [f for f in report.findings if verbose or f.status != "ok"]
    if shown:
        table(("WHAT", "STATUS", "DETAIL"), [(f.what, f.status, f.detail) for f in shown])
    for finding in shown:
        if finding.hint:
            say(f"{finding.what}: {clean(finding.hint)}")
    say(f"dsec {report.version}, node {report.node}: {len(report.findings) - len(shown)} findings are fine")
