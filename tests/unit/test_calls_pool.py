"""Pools of places: which of them gets a place that is free, and that none is forgotten while it makes one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from dsec.backends.fncall import calls as service
from dsec.backends.fncall import pool as pools
from dsec.backends.fncall.calls import Calls
from dsec.backends.fncall.config import CallsConfig
from dsec.backends.fncall.perform import Performed
from dsec.backends.fncall.worker import Worker
from dsec.core import limits
from dsec.core.errors import CapacityError, DsecError, SandboxFaultError, UnsupportedError
from dsec.core.spec import Environment
from dsec.testing.waiting import eventually
from dsec.wire.calls import CallAnswer, CallRequest, CallStatus


@dataclass(eq=False)
class FakeWorker:
    id: str
    calls: int = 0
    started_at: float = 1e18
    idle_since: float = 0.0
    alive: bool = True
    closed: bool = False

    def close(self) -> asyncio.Future[None]:
        self.closed = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    workers: list[FakeWorker] = []
    numbers = count()

    async def start(*_: object, **__: object) -> FakeWorker:
        await asyncio.sleep(0.01)
        workers.append(FakeWorker(str(next(numbers))))
        return workers[-1]

    monkeypatch.setattr(Worker, "start", start)
    return workers


def service_of(places_max: int) -> Calls:
    async def launch(*_: object) -> object:
        raise AssertionError

    return Calls(CallsConfig(places_max=places_max), launch, lambda: Path("/dev/null"))  # type: ignore[arg-type]


def pool_of(calls: Calls, environment: str, project: str = "/p") -> pools.Pool:
    calls._refuse_too_many(project)
    return calls._find_pool(Environment(environment), "sh")


async def test_a_pool_that_always_has_work_does_not_keep_all_places_from_another(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_STARVED_S", 0.01)
    calls = service_of(1)
    busy, other = pool_of(calls, "busy"), pool_of(calls, "other")
    done = asyncio.Event()

    async def work() -> None:
        while not done.is_set():
            worker = await busy.acquire("/greedy", 5)
            await asyncio.sleep(0.001)
            busy.release(worker, "/greedy", 0.001, spoilt=None)

    greedy = [asyncio.create_task(work()) for _ in range(3)]
    await eventually(lambda: busy.busy > 0)
    worker = await other.acquire("/modest", 5)
    other.release(worker, "/modest", 0.001, spoilt=None)
    done.set()
    await asyncio.gather(*greedy)

    assert sum(not worker.closed for worker in made) == 1


async def test_a_place_that_others_of_its_own_pool_wait_for_is_theirs(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is given back there is no place at all, and yet nobody else needs it more."""
    monkeypatch.setattr(service, "_STARVED_S", 0.0)
    calls = service_of(1)
    pool = pool_of(calls, "first")
    worker = await pool.acquire("/p", 5)
    waiting = asyncio.create_task(pool.acquire("/p", 5))
    await eventually(lambda: len(pool.queue) == 1)

    pool.release(worker, "/p", 0.1, spoilt=None)

    assert await waiting is worker
    pool.release(worker, "/p", 0.1, spoilt=None)
    await calls.close()
    assert len(made) == 1


async def test_who_is_answered_has_no_place_made_for_those_that_wait_for_its_own(made: list[FakeWorker]) -> None:
    calls = service_of(4)
    pool = pool_of(calls, "first")
    worker = await pool.acquire("/p", 5)
    cleaned = asyncio.Event()

    async def clean() -> str | None:
        await cleaned.wait()
        return None

    pool.release_after(worker, "/p", 0.0, clean())
    waiting = [asyncio.create_task(pool.acquire("/p", 5))]
    await eventually(lambda: len(pool.queue) == 1)
    assert (pool.places, pool.starting) == (1, 0), "the one that is cleaned up is for the one that waits"
    waiting.append(asyncio.create_task(pool.acquire("/p", 5)))
    await eventually(lambda: pool.places == 2)
    cleaned.set()
    for task in waiting:
        pool.release(await task, "/p", 0.1, spoilt=None)  # type: ignore[arg-type]
    await calls.close()

    assert (len(made), all(worker.closed for worker in made)) == (2, True)


async def test_a_place_whose_clean_up_is_cut_short_is_given_up(made: list[FakeWorker]) -> None:
    calls = service_of(1)
    pool = pool_of(calls, "first")
    worker = await pool.acquire("/p", 5)
    pool.release_after(worker, "/p", 0.0, asyncio.sleep(60))  # type: ignore[arg-type]

    await calls.close()

    assert (pool.busy, pool.retired, worker.closed) == (0, 1, True)  # type: ignore[attr-defined]


async def test_two_projects_at_overload_get_the_same_time_within_a_tenth(made: list[FakeWorker]) -> None:
    """Through the pool: one has many callers with short calls, the other few with long ones."""
    calls = service_of(2)
    pool = pool_of(calls, "first")
    got = {"/many": 0.0, "/few": 0.0}
    costs = {"/many": 0.02, "/few": 0.1}

    async def call(project: str) -> None:
        while sum(got.values()) < 60:
            worker = await pool.acquire(project, 60)
            await asyncio.sleep(0)
            got[project] += costs[project]
            pool.release(worker, project, costs[project], spoilt=None)

    await asyncio.gather(*(call("/many") for _ in range(40)), *(call("/few") for _ in range(8)))
    await calls.close()

    assert max(got.values()) / min(got.values()) < 1.1, got


async def test_only_what_was_not_begun_with_is_tried_again_and_that_once(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end() -> str | None:
        return None

    failure = SandboxFaultError("the place is lost")
    script: list[CallStatus | DsecError] = []

    async def perform(*_: object) -> Performed:
        now = script.pop(0)
        if isinstance(now, DsecError):
            raise now
        return Performed(CallAnswer(status=now), end())

    monkeypatch.setattr(service, "perform", perform)
    calls = service_of(4)
    request = CallRequest(type="sh", code="")

    script[:] = [failure, CallStatus.FINISHED]
    again = await calls.call(request, "/p")
    script[:] = [CallStatus.PLATFORM_FAILURE, CallStatus.FINISHED]
    begun = await calls.call(request, "/p")
    left = len(script)
    script[:] = [failure, failure, CallStatus.FINISHED]
    with pytest.raises(SandboxFaultError):
        await calls.call(request, "/p")
    twice = len(script)
    script[:] = [UnsupportedError("no"), CallStatus.FINISHED]
    with pytest.raises(UnsupportedError):
        await calls.call(request, "/p")
    await calls.close()

    assert (again.status, begun.status) == (CallStatus.FINISHED, CallStatus.PLATFORM_FAILURE)
    assert (left, twice, len(script)) == (1, 1, 1)
    assert all(worker.closed for worker in made)


async def test_a_pool_that_makes_a_place_makes_no_room_for_another(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has gone, and the place comes all the same: somebody has to know of it."""
    monkeypatch.setattr(limits, "CALL_POOLS_MAX", 1)
    calls = service_of(4)
    first = pool_of(calls, "first")
    with pytest.raises(CapacityError):
        await first.acquire("/p", 0.0)

    with pytest.raises(CapacityError):
        pool_of(calls, "second")
    await eventually(lambda: bool(first.idle))
    pool_of(calls, "second")
    await calls.close()

    assert [worker.closed for worker in made] == [True]


async def test_one_project_alone_does_not_fill_the_queue(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_QUEUED_PER_PROJECT_MAX", 2)
    calls = service_of(1)
    pool = pool_of(calls, "first")
    waiting = [asyncio.create_task(pool.acquire("/greedy", 5)) for _ in range(3)]
    await eventually(lambda: pool.busy == 1)

    with pytest.raises(CapacityError):
        pool_of(calls, "other", "/greedy")
    assert pool_of(calls, "other", "/modest")

    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await calls.close()
