"""The Log: the same in this process and on NATS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster.log import Log, LogStream, Record
from dsec.core import limits
from dsec.core.errors import ConflictError, InvalidArgumentError
from dsec.testing.nats_servers import NatsServers
from dsec.testing.shared_state import FORMS, embedded, state_of
from tests.contract.served import until

EVENTS, TRAJECTORIES = LogStream.EVENTS, LogStream.TRAJECTORIES


@pytest.fixture(params=FORMS)
async def log(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[Log]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state.log


async def test_records_are_read_in_the_order_of_their_sequences(log: Log) -> None:
    sequences = [await log.append(EVENTS, f"created.n{n % 2}", str(n).encode(), id=str(n)) for n in range(10)]
    await log.append(TRAJECTORIES, "n0.r.s", b"not this", id="0")

    assert sequences == sorted(set(sequences))
    assert [record.body for record in await log.read(EVENTS, "")] == [str(n).encode() for n in range(10)]
    assert [record.sequence for record in await log.read(EVENTS, "created")] == sequences
    assert [record.sequence for record in await log.read(EVENTS, "created.n1")] == sequences[1::2]
    assert [record.sequence for record in await log.read(EVENTS, "created", after=sequences[3], limit=2)] == sequences[
        4:6
    ]
    assert await log.read(EVENTS, "creat") == []


async def test_a_record_that_is_sent_again_is_kept_once(log: Log) -> None:
    first = await log.append(EVENTS, "a", b"1", id="x")

    assert await log.append(EVENTS, "a", b"1", id="x") == first
    assert await log.read(EVENTS, "a") == [Record(first, "a", b"1")]


async def test_a_writer_who_expects_another_last_record_is_refused(log: Log) -> None:
    first = await log.append(TRAJECTORIES, "n.r.s", b"1", id="1", after=0)

    with pytest.raises(ConflictError):
        await log.append(TRAJECTORIES, "n.r.s", b"other", id="other", after=0)
    second = await log.append(TRAJECTORIES, "n.r.s", b"2", id="2", after=first)
    assert await log.append(TRAJECTORIES, "n.r.s", b"2", id="2", after=first) == second  # sent again
    assert await log.last(TRAJECTORIES, "n.r.s") == Record(second, "n.r.s", b"2")
    assert await log.last(TRAJECTORIES, "n.r") is None


async def test_only_one_of_many_writers_appends_after_a_record(log: Log) -> None:
    async def append(number: int) -> bool:
        try:
            await log.append(TRAJECTORIES, "n.r.s", b"", id=str(number), after=0)
        except ConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*map(append, range(16)))) == 1


async def test_a_follower_gets_what_was_there_and_what_comes(log: Log) -> None:
    seen: list[Record] = []

    async def follow() -> None:
        async with contextlib.aclosing(log.follow(EVENTS, "a", after=first)) as records:
            async for record in records:
                seen.append(record)

    first = await log.append(EVENTS, "a.x", b"0", id="0")
    await log.append(EVENTS, "a.x", b"1", id="1")
    task = asyncio.create_task(follow())
    await until(lambda: seen)
    for number in range(2, 30):
        await log.append(EVENTS, f"a.{number}", str(number).encode(), id=str(number))
        await log.append(EVENTS, "b", b"not this", id=f"b{number}")
    await until(lambda: len(seen) >= 29)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert [int(record.body) for record in seen] == list(range(1, 30))


async def test_a_purge_takes_what_is_below_and_nothing_else(log: Log) -> None:
    for subject in ("n.r", "n.r.s", "n.r.s.t", "n.rr", "n"):
        await log.append(TRAJECTORIES, subject, b"", id=subject)
    await log.purge(TRAJECTORIES, "n.r")

    assert [record.subject for record in await log.read(TRAJECTORIES, "")] == ["n.rr", "n"]


async def test_records_and_their_names_have_bounds(log: Log) -> None:
    await log.append(EVENTS, "a", bytes(limits.LOG_RECORD_BYTES_MAX), id="x")

    with pytest.raises(InvalidArgumentError):
        await log.append(EVENTS, "a", bytes(limits.LOG_RECORD_BYTES_MAX + 1), id="y")
    for subject in ("", "a.", "a.*", ">", "a b"):
        with pytest.raises(InvalidArgumentError):
            await log.append(EVENTS, subject, b"", id="y")
    for id in ("", "ä", "x" * 256, "a\nb"):
        with pytest.raises(InvalidArgumentError):
            await log.append(EVENTS, "a", b"", id=id)


async def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    async with embedded(tmp_path / "state.db") as state:
        first = await state.log.append(EVENTS, "a", b"1", id="1")
    async with embedded(tmp_path / "state.db") as state:
        assert await state.log.append(EVENTS, "a", b"1", id="1") == first
        assert await state.log.append(EVENTS, "a", b"2", id="2") > first


async def test_bounds_say_what_is_there(log: Log) -> None:
    none = await log.bounds(EVENTS)
    assert none[0] == none[1] + 1
    sequences = [await log.append(EVENTS, f"a.{n % 2}", b"", id=str(n)) for n in range(4)]
    assert await log.bounds(EVENTS) == (sequences[0], sequences[-1])

    await log.purge(EVENTS, "a.0")
    assert await log.bounds(EVENTS) == (sequences[1], sequences[-1])
    await log.purge(EVENTS, "a")
    assert await log.bounds(EVENTS) == (sequences[-1] + 1, sequences[-1])
