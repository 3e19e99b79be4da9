"""Whatever comes, leaves and is freed: who waits for memory has it in their order, and never more than there is."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import CapacityError
from dsec.node.memoryqueue import MemoryQueue
from dsec.node.tasks import Tasks
from dsec.testing.clock import ManualClock, settle

LEAST = 3
SEEN_S = 1.5  # by then what has come counts no more, and somebody has looked

ASK = st.tuples(st.just("ask"), st.integers(1, 8), st.integers(1, 6))  # what it needs, and how long it waits
FREE = st.tuples(st.just("free"), st.integers(0, 12), st.just(0))
TO_ONE = st.tuples(st.sampled_from(("leave", "come", "end")), st.integers(0, 30), st.just(0))
PASS = st.tuples(st.just("pass"), st.integers(1, 3), st.just(0))

STEPS = st.lists(st.one_of(ASK, ASK, FREE, TO_ONE, PASS), min_size=8, max_size=30)


class Asked:
    def __init__(self, number: int, need: int) -> None:
        self.number = number
        self.need = need
        self.waits = True
        self.over = asyncio.Event()
        self.task: asyncio.Task[None]


class Run:
    def __init__(self) -> None:
        self.free = LEAST
        self.clock = ManualClock()
        self.tasks = Tasks("the test")
        self.queue = MemoryQueue(self.clock, self.clock.sleep, self.tasks, lambda: LEAST)
        self.asked: list[Asked] = []
        self.on_way: set[Asked] = set()
        self.came: list[tuple[float, int]] = []  # when, and what it needed

    async def step(self, what: str, number: int, wait_s: int) -> None:
        if what == "ask":
            asked = Asked(len(self.asked), number)
            self.asked.append(asked)
            asked.task = asyncio.create_task(self._come_back(asked, wait_s))
        elif what == "free":
            self.free = LEAST + number
            self.queue.wake()
        elif what == "pass":
            await self.clock.advance(number)
        elif self.asked:
            self._disturb(what, self.asked[number % len(self.asked)])
        await settle()
        self.check_nobody_is_forgotten()

    def _disturb(self, what: str, asked: Asked) -> None:
        if what == "leave":
            asked.task.cancel()
        elif what == "come":
            asked.over.set()
        else:
            if asked.waits:
                asked.need = 0
            self.queue.drop(str(asked.number))

    async def _come_back(self, asked: Asked, wait_s: int) -> None:
        try:
            async with self.queue.room(str(asked.number), "/a", asked.need, wait_s):
                before = [other.number for other in self.asked[: asked.number] if other.waits]
                assert not before or not asked.need, f"{before} were overtaken by {asked.number}"
                asked.waits = False
                self.on_way.add(asked)
                spoken = sum(other.need for other in self.on_way)
                assert spoken <= self.free - LEAST or not asked.need, "more come back than there is memory for"
                await asked.over.wait()
        except CapacityError:
            pass
        finally:
            asked.waits = False
            if asked in self.on_way:
                self.on_way.remove(asked)
                self.came.append((self.clock.monotonic_s(), asked.need))

    def check_nobody_is_forgotten(self) -> None:
        waiting = [asked for asked in self.asked if asked.waits]
        assert len(self.queue) == len(waiting)
        if waiting:
            since = self.clock.monotonic_s() - SEEN_S
            settling = sum(need for at, need in self.came if at > since)
            spare = self.free - LEAST - settling - sum(asked.need for asked in self.on_way)
            assert waiting[0].need > spare, "there is memory for the first, and nobody has told it"


@given(STEPS)
def test_they_come_back_in_their_order_within_what_there_is_and_nobody_is_forgotten(
    steps: list[tuple[str, int, int]],
) -> None:
    async def run() -> None:
        history = Run()
        with patch("dsec.node.memoryqueue.memory_available_bytes", lambda: history.free):
            for step in steps:
                await history.step(*step)
            for asked in history.asked:
                asked.over.set()
            await history.clock.advance(30)
            results = await asyncio.gather(*(asked.task for asked in history.asked), return_exceptions=True)
        assert [error for error in results if isinstance(error, Exception)] == []
        assert (len(history.queue), history.queue.ahead_bytes, len(history.tasks)) == (0, 0, 0)
        assert history.clock.sleepers == 0

    asyncio.run(run())
