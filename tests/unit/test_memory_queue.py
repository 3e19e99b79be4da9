"""What comes back and needs memory for it: in its turn, bounded, until there is some, or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from dsec.core.errors import CapacityError, HostError, ResumeNoMemoryError
from dsec.core.limits import MIB
from dsec.node.memoryqueue import MemoryQueue
from dsec.node.tasks import Tasks
from dsec.testing.clock import ManualClock, settle

LEAST = 10 * MIB


class Host:
    """A machine with so much memory free, and a queue for it."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.free = 0
        self.broken = False
        self.tasks = Tasks("the test")
        self.queue = MemoryQueue(clock, clock.sleep, self.tasks, lambda: LEAST, most=6, per_project=4)
        self.back: list[str] = []
        self.inside: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    def available_bytes(self) -> int:
        if self.broken:
            raise HostError("nobody knows")
        return self.free

    async def ask(
        self, sandbox: str, need: int = MIB, *, wait_s: float = 10.0, project: str = "/a"
    ) -> asyncio.Task[None]:
        """One that comes back and stays on its way until `finish`."""

        async def come() -> None:
            async with self.queue.room(sandbox, project, need, wait_s):
                self.back.append(sandbox)
                await self._over.wait()

        task = asyncio.create_task(come())
        self.inside.append(task)
        await settle()
        return task

    async def finish(self) -> None:
        """All that are on their way have come."""
        self._over.set()
        await settle()
        self._over.clear()


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    host = Host(ManualClock())
    monkeypatch.setattr("dsec.node.memoryqueue.memory_available_bytes", host.available_bytes)
    yield host
    for task in host.inside:
        task.cancel()
    for task in host.inside:
        with suppress(asyncio.CancelledError, CapacityError):
            await task
    assert len(host.queue) == 0
    await host.clock.advance(60)
    assert host.queue.ahead_bytes == 0, "nothing is left of those that came, failed or were left"
    assert len(host.tasks) == 0
    await host.tasks.close()


async def test_nobody_waits_where_there_is_memory_and_nobody_looks_then(host: Host) -> None:
    host.free = LEAST + 2 * MIB
    await host.ask("first")
    await host.ask("second")

    assert host.back == ["first", "second"]
    assert host.clock.sleepers == 0


async def test_who_waits_is_woken_when_memory_is_freed_and_no_time_has_passed(host: Host) -> None:
    await host.ask("first")
    host.free = LEAST + MIB
    assert host.back == []

    host.queue.wake()
    await settle()

    assert host.back == ["first"]


async def test_what_others_on_the_machine_free_is_seen_within_a_moment(host: Host) -> None:
    await host.ask("first")
    host.free = LEAST + MIB

    await host.clock.advance(1)

    assert host.back == ["first"]


async def test_one_task_looks_for_all_and_ends_with_the_last(host: Host) -> None:
    for name in ("first", "second", "third"):
        await host.ask(name)
    assert host.clock.sleepers == 1

    host.free = LEAST + 3 * MIB
    await host.clock.advance(1)

    assert host.back == ["first", "second", "third"]
    assert host.clock.sleepers == 0


async def test_who_needs_less_does_not_overtake(host: Host) -> None:
    host.free = LEAST + 2 * MIB
    await host.ask("large", 3 * MIB)
    await host.ask("small", MIB)
    await host.clock.advance(5)
    assert host.back == []

    host.free = LEAST + 3 * MIB
    host.queue.wake()
    await settle()

    assert host.back == ["large"]


async def test_those_on_their_way_count_until_they_have_touched_what_is_theirs(host: Host) -> None:
    host.free = LEAST + MIB
    await host.ask("first")
    await host.ask("second")
    await host.clock.advance(5)
    assert host.back == ["first"], "there is memory for one"

    await host.finish()
    await host.clock.advance(0.5)
    assert host.back == ["first"], "the first has not touched it yet"
    await host.clock.advance(1)
    assert host.back == ["first", "second"], "the first did without"


async def test_whoever_wants_the_same_one_shares_its_place_and_its_memory(host: Host) -> None:
    await host.ask("same", 2 * MIB)
    await host.ask("other", 2 * MIB)
    await host.ask("same", 2 * MIB)

    host.free = LEAST + 2 * MIB
    host.queue.wake()
    await settle()
    assert host.back == ["same", "same"]
    await host.ask("same", 2 * MIB)

    assert host.back == ["same", "same", "same"], "it comes back already"
    assert host.queue.ahead_bytes == 4 * MIB


async def test_each_fails_when_its_own_time_is_over_and_those_behind_have_their_turn(host: Host) -> None:
    host.free = LEAST + MIB
    patient = await host.ask("large", 5 * MIB, wait_s=20)
    hasty = await host.ask("large", 5 * MIB, wait_s=3)
    behind = await host.ask("small", MIB, wait_s=30)

    await host.clock.advance(4)
    with pytest.raises(ResumeNoMemoryError, match=r"11\.0 MiB of memory left of the 5\.0 MiB") as failed:
        await hasty
    assert failed.value.sandbox == "large"
    assert failed.value.retry_after_s
    assert not patient.done()
    assert not behind.done()
    assert host.back == []

    await host.clock.advance(17)
    with pytest.raises(ResumeNoMemoryError):
        await patient
    assert host.back == ["small"]


async def test_who_is_left_leaves_its_place_to_the_next(host: Host) -> None:
    host.free = LEAST + MIB
    first = await host.ask("large", 5 * MIB)
    await host.ask("small", MIB)

    first.cancel()
    await settle()

    assert host.back == ["small"]


async def test_who_is_left_in_the_moment_of_its_turn_leaves_nothing(host: Host) -> None:
    first = await host.ask("first", MIB)
    await host.ask("second", MIB)
    host.free = LEAST + MIB

    host.queue.wake()  # the first's turn, which it never sees
    first.cancel()
    await settle()
    assert host.back == []
    await host.clock.advance(2)

    assert host.back == ["second"]


async def test_of_two_for_one_the_other_keeps_the_place(host: Host) -> None:
    first = await host.ask("same", 2 * MIB)
    await host.ask("behind", 2 * MIB)
    await host.ask("same", 2 * MIB)
    first.cancel()
    await settle()

    host.free = LEAST + 2 * MIB
    host.queue.wake()
    await settle()

    assert host.back == ["same"]


async def test_too_many_are_refused_at_once_of_one_team_and_in_all(host: Host) -> None:
    for number in range(4):
        await host.ask(f"a{number}", project=f"/a/{number}")
    refused = await host.ask("a4", project="/a/9")
    with pytest.raises(ResumeNoMemoryError, match="4 resumes wait for memory already, 4 of them of /a"):
        await refused

    await host.ask("b", project="/b")
    await host.ask("c", project="/c")
    refused = await host.ask("d", project="/d")
    with pytest.raises(ResumeNoMemoryError, match="6 resumes wait"):
        await refused


async def test_who_waits_for_one_that_has_ended_is_let_go_and_takes_nothing(host: Host) -> None:
    await host.ask("ended", 5 * MIB)
    host.free = LEAST + MIB
    await host.ask("next", MIB)

    host.queue.drop("ended")
    await settle()

    assert host.back == ["ended", "next"]


async def test_who_waits_when_the_node_stops_is_told(host: Host) -> None:
    waiting = await host.ask("first")

    host.queue.close()

    with pytest.raises(CapacityError, match="stopping"):
        await waiting
    late = await host.ask("late")
    with pytest.raises(CapacityError, match="stopping"):
        await late
    await host.clock.advance(1)


async def test_a_machine_that_does_not_say_what_it_has_has_nothing(host: Host) -> None:
    host.broken = True
    asked = await host.ask("first", wait_s=2)

    await host.clock.advance(3)

    with pytest.raises(ResumeNoMemoryError):
        await asked


async def test_what_waits_is_spoken_for(host: Host) -> None:
    host.free = LEAST + 3 * MIB
    await host.ask("large", 5 * MIB)

    assert host.queue.ahead_bytes == 5 * MIB
