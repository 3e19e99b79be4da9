"""`dsec top`: what the sandboxes use, now."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsec.cli.completion import check_words, one_of
from dsec.cli.console import (
    Json,
    age,
    clean,
    client,
    lay_out,
    parse_pairs,
    put_json,
    run_async,
    settings,
    warn_of,
    without,
)
from dsec.cli.options import Labels
from dsec.cli.pages import command

if TYPE_CHECKING:
    import asyncio

    from dsec.sdk.client import AsyncClient
    from dsec.wire.records import Metrics, Sandbox

_FIRST_LOOK_S: Final = 0.5  # between the two looks of --once
_SORTS: Final = ("cpu", "memory", "disk", "pids", "execs", "age", "name")
_HEADINGS: Final = ("SANDBOX", "NAME", "STATE", "CPU%", "MEMORY", "LIMIT", "DISK", "PIDS", "EXECS", "AGE", "PROJECT")
_ALTERNATE: Final = ("\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l")  # its own screen, without a cursor; and back


@dataclass(frozen=True, slots=True)
class Row:
    """None: the host cannot tell, or the sandbox is not in a state to be asked."""

    id: str
    name: str | None
    project: str
    state: str
    cpu_percent: float | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    disk_used_bytes: int | None
    pids: int | None
    execs_live: int
    age_s: float
    asleep: bool = False  # its memory is on the disk


def register(app: typer.Typer) -> None:
    command(app, top)


def top(
    sort: Annotated[
        str, typer.Option("--sort", "-s", metavar="WHAT", help=f"{', '.join(_SORTS)}.", autocompletion=one_of(*_SORTS))
    ] = "cpu",
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=0.2, help="Between looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Write the table once, and end.")] = False,
    label: Labels = None,
    json: Json = False,
) -> None:
    """Show what the sandboxes use: processor, memory, disk, processes and commands."""
    check_words([sort], _SORTS, "--sort")
    live = sys.stdout.isatty() and sys.stdin.isatty() and not once and not settings.json

    async def work() -> None:
        looks = Looks(labels=parse_pairs(label, "label"))
        async with client() as c:
            if live:
                await _live(c, looks, sort, interval)
                return
            await looks.look(c)
            await _pause(_FIRST_LOOK_S)
            rows = ordered(await looks.look(c), sort)
        warn_of(looks.silent)
        if settings.json:
            put_json([asdict(row) for row in rows])
            return
        for line in lay_out(_HEADINGS, map(_cells, rows)):
            print(line)

    run_async(work())


async def _pause(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


class Looks:
    """Successive looks at the sandboxes; from the second one on there is a rate of processor use."""

    def __init__(self, *, labels: dict[str, str]) -> None:
        self._labels = labels
        self._before: dict[str, Metrics] = {}
        self.silent: set[str] = set()  # nodes that did not answer the last look

    async def look(self, client: AsyncClient) -> list[Row]:
        self.silent = set()
        listed = await client.list(labels=self._labels, metrics=True, missing=self.silent)
        found = [sandbox.info for sandbox in listed]
        before = self._before
        self._before = {info.id: info.metrics for info in found if info.metrics is not None}
        at = time.time()
        return [_row(info, before.get(info.id), at) for info in found]


def _row(info: Sandbox, before: Metrics | None, at: float) -> Row:
    now = info.metrics
    return Row(
        id=info.id,
        name=info.name,
        project=info.project,
        state=str(info.state),
        cpu_percent=_percent(now, before),
        memory_bytes=now.memory_bytes if now else None,
        memory_limit_bytes=info.memory_bytes,
        disk_used_bytes=now.disk_used_bytes if now else None,
        pids=now.pids if now else None,
        execs_live=now.execs_live if now else info.execs_live,
        age_s=max(0.0, at - info.created_at),
        asleep=info.asleep,
    )


def _percent(now: Metrics | None, before: Metrics | None) -> float | None:
    """Of one core, between two looks."""
    if now is None or before is None or now.cpu_s is None or before.cpu_s is None or now.at <= before.at:
        return None
    return round(100 * max(0.0, now.cpu_s - before.cpu_s) / (now.at - before.at), 1)


def ordered(rows: list[Row], sort: str) -> list[Row]:
    """The most first; what is not known last; names from a to z."""
    if sort == "name":
        return sorted(rows, key=lambda row: (row.name is None, row.name or row.id))
    fields = {
        "cpu": "cpu_percent",
        "memory": "memory_bytes",
        "disk": "disk_used_bytes",
        "pids": "pids",
        "execs": "execs_live",
        "age": "age_s",
    }

    def key(row: Row) -> tuple[float, str]:
        value = getattr(row, fields[sort])
        return (1.0 if value is None else -value, row.id)

    return sorted(rows, key=key)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.id,
        row.name or "",
        f"{row.state} (asleep)" if row.asleep else row.state,
        "" if row.cpu_percent is None else f"{row.cpu_percent:.1f}",
        _size(row.memory_bytes),
        _size(row.memory_limit_bytes),
        _size(row.disk_used_bytes),
        "" if row.pids is None else str(row.pids),
        str(row.execs_live),
        age(row.age_s),
        row.project,
    )


def _size(count: int | None) -> str:
    from dsec.core.units import format_size

    return "" if count is None else format_size(count)


# ---- on a terminal -------------------------------------------------------------------------------


async def _live(client: AsyncClient, looks: Looks, sort: str, interval: float) -> None:
    """Until q. A look that fails is told in the heading, and the next one is tried."""
    import asyncio
    import signal

    from dsec.core.errors import UnavailableError

    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[str] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, "resized")
    rows: list[Row] = []
    said = ""
    with _screen():
        loop.add_reader(sys.stdin.fileno(), _read_key, keys)
        try:
            due = 0.0
            while True:
                if (left := due - time.monotonic()) <= 0:
                    try:
                        rows = await looks.look(client)
                        said = without(sorted(looks.silent)) if looks.silent else ""
                    except UnavailableError as error:
                        said = f"no answer: {error.message}"
                    left = interval if due else min(interval, _FIRST_LOOK_S)
                    due = time.monotonic() + left
                _draw(ordered(rows, sort), sort, said)
                with contextlib.suppress(TimeoutError):
                    key = await asyncio.wait_for(keys.get(), left)
                    if key in ("q", "Q", "\x03", "\x04", ""):
                        return
                    sort = next((name for name in _SORTS if name[0] == key), sort)
        finally:
            loop.remove_reader(sys.stdin.fileno())
            loop.remove_signal_handler(signal.SIGWINCH)


def _read_key(keys: asyncio.Queue[str]) -> None:
    import os

    for key in os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace") or [""]:
        keys.put_nowait(key)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Keys come at once and unseen, on a screen of its own. All is restored, whatever happens."""
    import termios
    import tty

    before: list[Any] = termios.tcgetattr(sys.stdin.fileno())
    try:
        tty.setcbreak(sys.stdin.fileno())
        sys.stdout.write(_ALTERNATE[0])
        yield
    finally:
        sys.stdout.write(_ALTERNATE[1])
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, before)


def _draw(rows: list[Row], sort: str, said: str) -> None:
    import shutil

    size = shutil.get_terminal_size()
    head = said or f"{len(rows)} sandboxes by {sort}; keys: {' '.join(name[0] for name in _SORTS)} sort, q ends"
    lines = [head, *lay_out(_HEADINGS, map(_cells, rows))][: max(size.lines, 2)]
    shown = "\x1b[K\r\n".join(clean(line)[: size.columns] for line in lines)
    sys.stdout.write(f"\x1b[H{shown}\x1b[K\x1b[J")
    sys.stdout.flush()
