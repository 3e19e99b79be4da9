"""`dsec gc`: what nothing needs any more goes."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.console import Json, client, put_json, run_async, say, settings, table
from dsec.cli.pages import command


def register(app: typer.Typer) -> None:
    command(app, gc)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False, json: Json = False
) -> None:
    """Remove what nothing needs any more from the node's disk."""
    from dsec.core.units import format_size

    async def work() -> None:
        async with client() as c:
            report = await c.collect_garbage(dry_run=dry_run)
        if settings.json:
            put_json(report)
            return
        if report.items:
            table(
                ("KIND", "NAME", "SIZE", "WHY"),
                [
                    (i.kind, i.name[:40], format_size(i.bytes), i.reason if i.error is None else f"stays: {i.error}")
                    for i in report.items
                ],
            )
        say(f"{format_size(report.bytes)} {'would be' if dry_run else 'are'} free again")

    run_async(work())
