"""What has happened to the sandboxes of this node, written in one transaction with the change that it is about."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from dsec.core.limits import EVENTS_KEPT_S, EVENTS_NODE_BYTES_MAX, EVENTS_READ_MAX
from dsec.core.states import EndCause, SandboxState
from dsec.node.rows import SandboxRow, Tombstone
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Event, EventKind, Figures
from dsec.wire.following import Bell, EventPage, Place

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body BLOB NOT NULL);
"""
_EXPIRED: Final = frozenset((EndCause.TTL_RUNNING, EndCause.TTL_IDLE))
_STEADY: Final = frozenset((SandboxState.CREATING, SandboxState.RUNNING, SandboxState.PAUSED))
_DROPPED: Final = 8  # this part of them goes when they are too many

Read = Callable[[str, tuple[Any, ...]], list[Any]]


class EventTable:
    """Of a journal: what it writes says in what state each sandbox is, and here is kept what readers know of that."""

    def __init__(self, node: str, read: Read) -> None:
        self.origin = node
        self._read_rows = read
        self._states: dict[str, str] = {}  # the last steady state that an event was about
        self._bytes: int = read("SELECT COALESCE(SUM(LENGTH(body)), 0) FROM events", ())[0][0]
        self._bell = Bell()
        self.news = self._bell.news

    # -- writing -----------------------------------------------------------------------------------

    def of_row(self, row: SandboxRow, before: str | None, at: float) -> list[Event]:
        """Between the last steady state of a row and the one that it is in."""
        kinds: list[EventKind] = []
        if before is None:
            kinds.append(EventKind.CREATED)
        if row.state == SandboxState.RUNNING and before != SandboxState.RUNNING:
            kinds.append(EventKind.RESUMED if before == SandboxState.PAUSED else EventKind.RUNNING)
        if row.state == SandboxState.PAUSED and before != SandboxState.PAUSED:
            kinds.append(EventKind.PAUSED)
        return [event_of(row, kind, at) for kind in kinds]

    def note(self, db: sqlite3.Connection, events: Iterable[Event]) -> None:
        """Within the transaction of the change."""
        for event in events:
            body = pack(event)
            db.execute("INSERT INTO events (at, body) VALUES (?, ?)", (event.at, body))
            self._bytes += len(body)
        if self._bytes > EVENTS_NODE_BYTES_MAX:
            self._drop(db)

    def prune(self, db: sqlite3.Connection, now: float) -> None:
        db.execute("DELETE FROM events WHERE at < ?", (now - EVENTS_KEPT_S,))
        self._count(db)

    def state_of(self, id: str) -> str | None:
        return self._states.get(id)

    def settle(self, id: str, state: str | None) -> None:
        if state is None:
            self._states.pop(id, None)
        elif state in _STEADY:
            self._states[id] = state

    def knows(self, rows: Iterable[SandboxRow]) -> None:
        """Of an earlier process: nothing has happened to them by being read."""
        for row in rows:
            state = SandboxState(row.state)
            if state is SandboxState.RESUMING:
                state = SandboxState.PAUSED
            self._states.setdefault(row.id, str(state if state in _STEADY else SandboxState.RUNNING))

    def ring(self) -> None:
        self._bell.ring()

    def _drop(self, db: sqlite3.Connection) -> None:
        first, last = db.execute("SELECT MIN(number), MAX(number) FROM events").fetchone()
        db.execute("DELETE FROM events WHERE number <= ?", (first + (last - first) // _DROPPED,))
        self._count(db)

    def _count(self, db: sqlite3.Connection) -> None:
        (self._bytes,) = db.execute("SELECT COALESCE(SUM(LENGTH(body)), 0) FROM events").fetchone()

    # -- reading (`wire.following.EventSource`) ----------------------------------------------------

    async def end(self) -> Place:
        found = self._read_rows("SELECT seq FROM sqlite_sequence WHERE name = 'events'", ())
        return (found[0][0] + 1 if found else 1, 0)

    async def read(self, after: Place) -> EventPage:
        rows = self._read_rows(
            "SELECT number, body FROM events WHERE number >= ? ORDER BY number LIMIT ?", (after[0], EVENTS_READ_MAX)
        )
        found = tuple(
            ((number + 1, 0), msgspec.structs.replace(unpack(body, Event), node=self.origin, number=number))
            for number, body in rows
        )
        # Numbers are without holes: who reads on and finds one has lost what was in it.
        return EventPage(found, found[-1][0] if found else after, rows[0][0] if rows else after[0])


def event_of(row: SandboxRow, kind: EventKind, at: float, **more: Any) -> Event:
    return Event(
        kind=str(kind),
        at=at,
        sandbox=row.id,
        project=row.project,
        name=row.spec.name,
        labels=row.spec.labels,
        substrate=str(row.spec.substrate),
        environment="+".join(row.spec.environment.names()),
        incarnation=row.incarnation,
        principal=row.principal,
        job=row.spec.job,
        made=_figures(row) if kind is EventKind.CREATED else None,
        **more,
    )


def _figures(row: SandboxRow) -> Figures:
    spec = row.spec
    return Figures(
        created_at=row.created_at,
        cpu=spec.cpu,
        memory_bytes=spec.memory_bytes,
        pids_max=spec.pids_max,
        network=str(spec.network),
        disk_bytes=spec.disk_bytes,
    )


def end_of(tombstone: Tombstone) -> Event:
    sandbox = tombstone.sandbox
    kind = EventKind.EXPIRED if sandbox.cause in _EXPIRED else EventKind.DESTROYED
    return Event(
        kind=str(EventKind.FAILED if sandbox.state == SandboxState.FAILED else kind),
        at=sandbox.ended_at or 0.0,
        sandbox=sandbox.id,
        project=sandbox.project,
        name=sandbox.name,
        labels=sandbox.labels,
        substrate=sandbox.substrate,
        environment=sandbox.environment,
        incarnation=sandbox.incarnation,
        principal=tombstone.principal,
        job=sandbox.job,
        cause=sandbox.cause,
        detail=sandbox.cause_detail,
    )
