"""Creates that wait for room: in turn between projects, bounded, until they get it, give up or are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.cluster.queue import CreateQueue, Patience, Vetoes
from dsec.core.errors import CapacityError, UnsupportedError
from dsec.core.ids import NodeId
from dsec.testing.clock import ManualClock, settle
from dsec.testing.waiting import eventually

NODE = NodeId("aaaaaaaa")
FULL = CapacityError("no room", detail={"reason": "x"})


class Room:
    """A node with so many places."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.looks = 0

    def choose(self) -> NodeId:
        self.looks += 1
        if not self.free:
            raise FULL
        self.free -= 1
        return NODE


@pytest.fixture
async def queue() -> AsyncIterator[CreateQueue]:
    queue = CreateQueue(ManualClock(), most=12, per_project=8, pause_s=0.0)
    yield queue
    queue.close()


async def begin(queue: CreateQueue, room: Room, project: str, done: list[str], shape: str = "s") -> asyncio.Task[None]:
    async def wait() -> None:
        await queue.wait(project, shape, room.choose, Patience(60), FULL)
        done.append(project)

    before = len(queue)
    task = asyncio.create_task(wait())
    await eventually(lambda: len(queue) > before)
    return task


async def test_who_waits_is_woken_by_news_and_not_by_looking(queue: CreateQueue) -> None:
    room, done = Room(), []
    task = await begin(queue, room, "/a", done)
    room.free = 1
    await asyncio.sleep(0.05)
    assert room.looks == 0

    queue.wake()
    await asyncio.wait_for(task, 30)
    assert (done, len(queue), room.looks) == (["/a"], 0, 1)


async def test_projects_take_turns_whoever_came_first(queue: CreateQueue) -> None:
    room, done = Room(), []
    tasks = [await begin(queue, room, project, done) for project in ("/a",) * 5 + ("/b",) * 2 + ("/c",)]
    for _ in range(4):
        room.free = 2
        queue.wake()
        await eventually(lambda: room.free == 0)
    await asyncio.gather(*tasks)

    assert done == ["/a", "/b", "/c", "/a", "/b", "/a", "/a", "/a"]


async def test_projects_below_one_share_its_turns_and_its_places(queue: CreateQueue) -> None:
    room, done = Room(), []
    tasks = [await begin(queue, room, project, done) for project in ("/a/x", "/a/y", "/a/x", "/a/z", "/b", "/b")]
    for _ in range(6):
        room.free = 1
        queue.wake()
        await eventually(lambda: room.free == 0)
    await asyncio.gather(*tasks)
    assert done == ["/a/x", "/b", "/a/y", "/b", "/a/z", "/a/x"]

    waiting = [await begin(queue, room, f"/a/{number}", done) for number in range(8)]
    with pytest.raises(CapacityError, match="of /a"):
        await queue.wait("/a/new", "s", room.choose, Patience(60), FULL)
    waiting.append(await begin(queue, room, "/b", done))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(queue) == 0


async def test_one_that_fits_nowhere_holds_up_nobody_who_asks_for_less(queue: CreateQueue) -> None:
    large, small, done = Room(), Room(3), []
    held = [await begin(queue, large, "/a", done, "large") for _ in range(3)]
    tasks = [await begin(queue, small, project, done, "small") for project in ("/a", "/b")]
    queue.wake()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)

    assert len(queue) == 3
    assert large.looks <= 3  # of one shape one is looked at, each time around
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert len(queue) == 0


async def test_bounds_are_kept_and_told_at_once(queue: CreateQueue) -> None:
    tasks = [await begin(queue, Room(), project, []) for project in ("/a",) * 8 + ("/b",) * 4]
    for project in ("/a", "/c"):
        with pytest.raises(CapacityError, match="wait already") as told:
            await queue.wait(project, "s", Room(1).choose, Patience(60), FULL)
        assert told.value.retry_after_s is not None
        assert told.value.detail == {"reason": "x"}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(queue) == 0


async def test_waiting_ends_at_its_time_with_what_there_was_no_room_for(queue: CreateQueue) -> None:
    with pytest.raises(CapacityError, match="in vain: no room") as told:
        await queue.wait("/a", "s", Room().choose, Patience(0.01), FULL)

    assert told.value.detail["queued_s"] == 0.01
    assert len(queue) == 0
    with pytest.raises(CapacityError) as at_once:
        await queue.wait("/a", "s", Room().choose, Patience(0), FULL)
    assert at_once.value is FULL


async def test_a_caller_who_leaves_ends_its_wait_and_all_later_ones(queue: CreateQueue) -> None:
    patience = Patience(60)
    task = asyncio.create_task(queue.wait("/a", "s", Room().choose, patience, FULL))
    await eventually(lambda: len(queue))

    patience.leave()
    with pytest.raises(CapacityError, match="gone"):
        await task
    assert len(queue) == 0
    with pytest.raises(CapacityError):
        await queue.wait("/a", "s", Room(1).choose, patience, FULL)


async def test_one_whose_node_refused_it_is_before_those_that_came_later(queue: CreateQueue) -> None:
    room, done, patience = Room(1), [], Patience(60)
    first = asyncio.create_task(queue.wait("/a", "s", room.choose, patience, FULL))
    await eventually(lambda: len(queue))
    queue.wake()
    await first
    others = [await begin(queue, room, "/a", done) for _ in range(2)]
    again = asyncio.create_task(queue.wait("/a", "s", room.choose, patience, FULL))
    await eventually(lambda: len(queue) == 3)

    room.free = 1
    queue.wake()
    await asyncio.wait_for(again, 30)
    assert done == []
    room.free = 2
    queue.wake()
    await asyncio.gather(*others)


async def test_what_no_room_would_help_is_told(queue: CreateQueue) -> None:
    def never() -> NodeId:
        raise UnsupportedError("no node offers it any more")

    task = asyncio.create_task(queue.wait("/a", "s", never, Patience(60), FULL))
    await eventually(lambda: len(queue))
    queue.wake()
    with pytest.raises(UnsupportedError):
        await task


async def test_a_node_that_refused_is_left_out_for_a_moment() -> None:
    clock = ManualClock()
    vetoes = Vetoes(clock)
    vetoes.add(NODE)
    assert vetoes.now() == {NODE}
    await clock.advance(1.5)
    assert vetoes.now() == set()


@given(st.lists(st.sampled_from(["/a", "/b", "/c", "/d"]), min_size=1, max_size=40), st.data())
def test_nobody_waits_while_another_project_is_served_twice(projects: list[str], data: st.DataObject) -> None:
    async def run() -> None:
        queue = CreateQueue(ManualClock(), pause_s=0.0)
        room, done = Room(), []
        tasks = [asyncio.create_task(_wait(queue, room, project, done)) for project in projects]
        await settle()
        while len(done) < len(projects):
            room.free = data.draw(st.integers(1, 5))
            queue.wake()
            await asyncio.sleep(0)
            await settle()
        await asyncio.gather(*tasks)
        left = {project: projects.count(project) for project in set(projects)}
        since: dict[str, int] = {}
        for project in done:
            for other in left:
                if other != project and left[other]:
                    since[other + project] = since.get(other + project, 0) + 1
                    assert since[other + project] <= 2
                since.pop(project + other, None)
            left[project] -= 1
        assert not any(left.values())

    asyncio.run(run())


async def _wait(queue: CreateQueue, room: Room, project: str, done: list[str]) -> None:
    await queue.wait(project, "s", room.choose, Patience(60), FULL)
    done.append(project)
