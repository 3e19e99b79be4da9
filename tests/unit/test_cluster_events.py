"""Events over the log of a cluster: told from a node's journal, followed from a replica's tail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsec.cluster.events import EventDesk, EventTail, events_of
from dsec.cluster.log import Log, LogStream, Record, node_subject, verdict_subject
from dsec.cluster.publishing import EventPublisher, batches
from dsec.core.errors import UnavailableError
from dsec.core.ids import NodeId, new_sandbox_id
from dsec.testing.nodes import caller_of
from dsec.testing.shared_state import embedded
from dsec.testing.waiting import eventually
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Event, EventLine, EventQuery, Events
from dsec.wire.following import Bell, EventPage, Place, follow_events
from dsec.wire.frames import FrameType
from dsec.wire.node import Right

NODE, OTHER = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")
SANDBOX = new_sandbox_id(NODE)
ADMIN = caller_of("/ops", rights=frozenset({Right.ADMIN}))


def event(number: int, kind: str = "running", **more: Any) -> Event:
    given = {"sandbox": SANDBOX, "project": "/test", "node": NODE, **more}
    return Event(kind=kind, at=float(number), number=number, **given)


@dataclass
class Journal:
    """`EventSource` of a node: what is before `first` has gone."""

    origin: str = NODE
    events: list[Event] = field(default_factory=list)
    first: int = 1
    bell: Bell = field(default_factory=Bell)

    def news(self) -> asyncio.Event:
        return self.bell.news()

    def add(self, *events: Event) -> None:
        self.events += events
        self.bell.ring()

    async def end(self) -> Place:
        return (len(self.events) + 1, 0)

    async def read(self, after: Place) -> EventPage:
        found = [e for e in self.events if e.number >= max(after[0], self.first)]
        first = found[0].number if found else after[0]
        return EventPage(
            tuple(((e.number + 1, 0), e) for e in found), (first + len(found), 0) if found else after, first
        )


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    async with embedded(tmp_path / "log.db") as state:
        yield state.log


@contextlib.asynccontextmanager
async def tail_of(log: Log) -> AsyncIterator[EventTail]:
    tail = EventTail(log, "main")
    await tail.start()
    try:
        yield tail
    finally:
        await tail.close()


@contextlib.asynccontextmanager
async def publishing(log: Log, journal: Journal, told: int = 0) -> AsyncIterator[list[int]]:
    kept: list[int] = []

    async def keep(number: int) -> None:
        kept.append(number)

    task = asyncio.create_task(EventPublisher(log, journal, told, keep).run())
    try:
        yield kept
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told(tail: EventTail, **query: Any) -> list[Event]:
    asked = EventQuery(follow=False, **query)
    return [line.event async for line in follow_events(tail, asked, None, 0.0) if line.event is not None]


async def put(log: Log, subject: str, *events: Event) -> None:
    await log.append(LogStream.EVENTS, subject, pack(Events(events)), id=f"{subject}-{events[0].number}-{len(events)}")


async def test_a_cluster_is_told_what_the_journal_of_a_node_has(log: Log) -> None:
    journal = Journal()
    async with publishing(log, journal) as kept, tail_of(log) as tail:
        journal.add(*(event(number) for number in range(1, 301)))
        await eventually(lambda: kept and kept[-1] == 301)
        journal.add(event(301))
        await eventually(lambda: kept[-1] == 302)

        assert [e.number for e in await told(tail)] == list(range(1, 302))
        assert await log.bounds(LogStream.EVENTS) == (1, 4)  # 128 in each record


async def test_what_is_told_again_after_a_kill_is_seen_once(log: Log) -> None:
    journal = Journal()
    journal.add(*(event(number) for number in range(1, 11)))
    async with publishing(log, journal) as kept:
        await eventually(lambda: kept)
    journal.add(event(11))
    async with publishing(log, journal, told=4) as kept:  # of the first it was kept up to here
        await eventually(lambda: kept)

    async with tail_of(log) as tail:
        assert [e.number for e in await told(tail)] == list(range(1, 12))


async def test_while_the_log_is_away_events_stay_and_are_told_then(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, away = Journal(), True
    append = log.append
    monkeypatch.setattr("dsec.cluster.publishing._RETRY_S", 0.01)

    async def unreliable(*given: Any, **more: Any) -> int:
        if away:
            raise UnavailableError("away")
        return await append(*given, **more)

    monkeypatch.setattr(log, "append", unreliable)
    async with publishing(log, journal) as kept, tail_of(log) as tail:
        journal.add(event(1), event(2))
        await asyncio.sleep(0.05)
        assert kept == []
        away = False
        await eventually(lambda: kept)
        assert [e.number for e in await told(tail)] == [1, 2]


async def test_what_a_node_could_not_keep_until_then_is_a_gap_for_everybody(log: Log) -> None:
    journal = Journal(first=7)
    journal.add(*(event(number) for number in range(1, 11)))
    async with publishing(log, journal, told=3) as kept, tail_of(log) as tail:
        await eventually(lambda: kept)

        found = await told(tail, labels={"other": "project"})
        assert [(e.kind, e.number) for e in found] == [("gap", 6)]
        assert [e.number for e in await told(tail)] == [6, 7, 8, 9, 10]


async def test_a_position_is_good_on_any_replica_and_within_a_record(log: Log) -> None:
    await put(log, node_subject(NODE), event(1), event(2), event(3))
    await put(log, node_subject(NODE), event(4))
    async with tail_of(log) as one, tail_of(log) as other:
        seen = await told(one)
        await put(log, node_subject(NODE), event(5))
        await eventually(lambda: other._end == 4)

        for index, found in enumerate(seen):
            assert [e.number for e in await told(other, after=found.position)] == list(range(index + 2, 6))


async def test_a_reader_from_before_the_tail_and_one_within_it_see_the_same(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.events.EVENTS_TAIL_MAX", 10)
    async with tail_of(log) as tail:
        begin = (await told(tail, after="oldest")) or None
        assert begin is None
        for number in range(1, 41):
            await put(log, node_subject(NODE), event(number))
        await eventually(lambda: tail._end == 41)
        assert len(tail._kept) <= 5

        assert [e.number for e in await told(tail)] == list(range(1, 41))
        assert [e.number for e in await told(tail, after="main:38:0")] == [38, 39, 40]


async def test_a_reader_that_is_older_than_what_is_kept_is_told_of_the_gap(log: Log) -> None:
    for number in range(1, 6):
        await put(log, node_subject(NODE), event(number))
    async with tail_of(log) as tail:
        (first, *_) = await told(tail)
    await log._database.run(lambda db: db.execute("DELETE FROM log WHERE sequence < 4"))  # type: ignore[attr-defined]

    async with tail_of(log) as tail:
        assert [(e.kind, e.number) for e in await told(tail, after=first.position)][:2] == [("gap", 0), ("running", 4)]
        await log.purge(LogStream.EVENTS, node_subject(NODE))
        assert [e.kind for e in await told(tail, after=first.position)] == ["gap"]


async def test_a_tail_that_the_log_has_left_behind_says_so_and_one_that_failed_goes_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.events._AGAIN_S", 0.01)
    follow, fails = log.follow, [True]

    def unreliable(*given: Any, **more: Any) -> Any:
        if fails:
            fails.pop()
            raise UnavailableError("away")
        return follow(*given, **more)

    monkeypatch.setattr(log, "follow", unreliable)
    async with tail_of(log) as tail:
        await put(log, node_subject(NODE), event(1))
        await eventually(lambda: tail._end == 2)
        (seen,) = await told(tail)
        tail._keep(Record(9, node_subject(NODE), pack(Events((event(9),)))))  # 2 to 8 have gone

        await log._database.run(lambda db: db.execute("UPDATE log SET sequence = 9"))  # type: ignore[attr-defined]
        assert [e.kind for e in await told(tail, after=seen.position)][:1] == ["gap"]


def test_a_node_speaks_for_its_own_sandboxes_alone() -> None:
    elsewhere = new_sandbox_id(OTHER)
    forged = (
        event(1, sandbox=elsewhere),
        event(1, node=OTHER),
        event(0),
        event(1, kind="node_lost", sandbox=None),
        event(1, sandbox="sbx_x"),
    )
    subject = node_subject(NODE)

    assert events_of(Record(1, subject, pack(Events((event(1),))))) == (event(1),)
    for one in forged:
        assert events_of(Record(1, subject, pack(Events((event(1), one))))) == ()
    assert events_of(Record(1, subject, b"\xc1noise")) == ()
    (gap,) = events_of(Record(1, subject, pack(Events((event(1, kind="gap", detail="read this", name="x"),)))))
    assert (gap.sandbox, gap.project, gap.name, gap.number) == (None, None, None, 1)
    assert "read this" not in (gap.detail or "")
    assert events_of(Record(1, f"node-lost.{NODE}", pack(Events((event(1),))))) == ()


async def test_nodes_are_for_operators(log: Log) -> None:
    await put(log, verdict_subject(NODE), Event(kind="node_lost", at=1.0, node=NODE))
    async with tail_of(log) as tail:
        desk = EventDesk(tail, 0.0)
        seen = []
        for who in (ADMIN, caller_of("/")):
            stream = await desk.open(EventQuery(follow=False), who)
            kinds = []
            while (frame := await stream.recv()) is not None and frame.type != FrameType.END:
                line = unpack(frame.body, EventLine)
                kinds += [line.event.kind] if line.event else []
            await stream.close()
            seen.append(kinds)
        await desk.close()
    assert seen == [["node_lost"], []]


async def test_a_follower_that_stands_still_costs_a_bounded_queue(log: Log) -> None:
    async with tail_of(log) as tail:
        desk = EventDesk(tail, 0.0)
        stream = await desk.open(EventQuery(), ADMIN)
        await stream.recv()
        for number in range(1, 400):
            await put(log, node_subject(NODE), event(number, labels={"x": "y" * 200}))
        await eventually(lambda: tail._end == 400)
        seen = []
        while len(seen) < 399:
            frame = await stream.recv()
            assert frame is not None
            line = unpack(frame.body, EventLine)
            seen += [line.event.number] if line.event else []
        await stream.close()
        await desk.close()
    assert seen == list(range(1, 400))


def test_batches_are_bounded_in_number_and_bytes() -> None:
    large = [event(number, labels={"x": "y" * 60_000}) for number in range(1, 6)]

    assert [len(batch) for batch in batches([event(n) for n in range(1, 300)])] == [128, 128, 43]
    assert [len(batch) for batch in batches(large)] == [2, 2, 1]


async def test_the_tail_is_bounded_in_bytes_whatever_a_record_has(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.events.EVENTS_TAIL_BYTES_MAX", 100_000)
    async with tail_of(log) as tail:
        for number in range(4):
            body = pack(Events((event(number + 1, labels={"a": "x" * 40_000}),)))
            await log.append(LogStream.EVENTS, node_subject(NODE), body, id=f"{number}")
        await eventually(lambda: tail._end == 5)

        assert (len(tail._kept), len(tail._sizes), tail._floor) == (2, 2, 3)
        assert [one.number for one in await told(tail)] == [1, 2, 3, 4]
