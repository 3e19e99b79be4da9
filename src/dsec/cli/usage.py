"""`dsec usage`: what sandboxes have used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.completion import one_of
from dsec.cli.console import Json, age, client, lay_out, put_json, run_async, say, settings, when, without
from dsec.cli.options import Job
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.usage import UsagePage, UsageRecord, UsageTotal

_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_Moment = Annotated[
    str | None, typer.Option(metavar="WHEN", help="A day such as 2026-11-30, or ago: 7d, 12h.", show_default=False)
]


def usage(
    project: Annotated[
        str | None, typer.Argument(metavar="PATH", help="This project and those below; yours without.")
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="project, day, job or sandbox.",
            autocompletion=one_of("project", "day", "job", "sandbox"),
        ),
    ] = "project",
    job: Job = None,
    since: _Moment = None,
    until: _Moment = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", help="Of sandboxes, at most.")] = 100,
    json: Json = False,
) -> None:
    """Show what sandboxes have used: those that live, and those that have ended."""

    async def work() -> UsagePage:
        now = time.time()
        async with client() as c:
            return await c.usage(
                project, by=by, job=job, since=_moment(since, now) or 0.0, until=_moment(until, now), limit=limit
            )

    page = run_async(work())
    if settings.json:
        put_json(page)
        return
    for line in _sandboxes(page.records) if by == "sandbox" else _totals(page.totals):
        print(line)
    if page.next is not None:
        say(f"there are more than {limit}; --limit shows them")
    if page.missing:
        say(without(page.missing))


def _totals(totals: list[UsageTotal]) -> list[str]:
    days = any(total.day for total in totals)
    jobs = any(total.job for total in totals)
    rows = [
        (
            total.project,
            *([total.day or ""] if days else []),
            *([total.job or ""] if jobs else []),
            str(total.sandboxes),
            *_figures(total),
        )
        for total in totals
    ]
    return lay_out(("PROJECT", *(["DAY"] if days else []), *(["JOB"] if jobs else []), "SANDBOXES", *_HEADINGS), rows)


def _sandboxes(records: list[UsageRecord]) -> list[str]:
    rows = [
        (
            record.sandbox,
            record.project,
            record.principal,
            "lives" if record.ended_at is None else when(record.ended_at),
            *_figures(record),
        )
        for record in records
    ]
    return lay_out(("SANDBOX", "PROJECT", "MADE BY", "ENDED", *_HEADINGS), rows)


_HEADINGS: Final = ("CPU", "MEMORY GiB·h", "LIVED", "FROZEN", "OUTPUT", "SENT", "RECEIVED")


def _figures(of: UsageTotal | UsageRecord) -> tuple[str, ...]:
    from dsec.core.units import format_size

    return (
        f"{of.cpu_s:.1f}s",
        f"{of.memory_gib_s / 3600:.3f}",
        age(of.lived_s),
        age(of.frozen_s),
        format_size(of.output_bytes),
        format_size(of.sent_bytes),
        format_size(of.received_bytes),
    )


def _moment(text: str | None, now: float) -> float | None:
    from datetime import UTC, datetime

    from dsec.core.errors import InvalidArgumentError

    if text is None:
        return None
    try:
        if text[-1:] in _UNITS:
            return now - float(text[:-1]) * _UNITS[text[-1]]
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise InvalidArgumentError(f"{text[:40]!r} is no moment", hint="such as 2026-11-30, 7d or 12h") from error


def register(main: typer.Typer) -> None:
    command(main, usage)
