"""Sandboxes that come back and need memory for it: one after the other, as they came, when there is some."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from dsec.core.clock import Clock
from dsec.core.errors import CapacityError, HostError, ResumeNoMemoryError
from dsec.core.limits import RESUMES_WAITING_MAX, RESUMES_WAITING_PER_PROJECT_MAX
from dsec.core.units import format_size
from dsec.node.admission import RETRY_SOON_S
from dsec.node.host import memory_available_bytes
from dsec.node.services import Sleep
from dsec.node.tasks import Tasks
from dsec.observe import metrics
from dsec.wire.node import team_of

_LOOK_S: Final = 0.25  # while somebody waits: what the rest of the machine gives back, nobody tells
_SETTLE_S: Final = 1.0  # what has come back takes its memory only as it touches it


@dataclass(slots=True, eq=False)
class _Waiting:
    """One sandbox, with all who want it back."""

    team: str
    need_bytes: int
    turns: dict[asyncio.Future[None], float] = field(default_factory=dict)  # each until then


@dataclass(slots=True, eq=False)
class _Admitted:
    need_bytes: int
    users: int


class MemoryQueue:
    """Of one node. Nobody overtakes, and no more come back at once than there is memory for beside `least_bytes`.

    What is freed within the node is told by `wake`; one task looks for the rest, for all who wait.
    """

    def __init__(
        self,
        clock: Clock,
        sleep: Sleep,
        tasks: Tasks,
        least_bytes: Callable[[], int],
        *,
        most: int = RESUMES_WAITING_MAX,
        per_project: int = RESUMES_WAITING_PER_PROJECT_MAX,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._tasks = tasks
        self._least_bytes = least_bytes
        self._most = most
        self._per_project = per_project
        self._waiting: dict[str, _Waiting] = {}  # by sandbox, as they came
        self._admitted: dict[str, _Admitted] = {}
        self._settling: deque[tuple[float, int]] = deque()  # until when, how much
        self._looks = False
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(waiting.turns) for waiting in self._waiting.values())

    @property
    def ahead_bytes(self) -> int:
        """Of what is free now, what is spoken for: by those that come back, and by those that wait for it."""
        return self._spoken_for() + sum(waiting.need_bytes for waiting in self._waiting.values())

    @asynccontextmanager
    async def room(self, sandbox: str, project: str, need_bytes: int, wait_s: float) -> AsyncIterator[None]:
        """There is memory for it while the block runs. Whoever wants the same sandbox shares its place.

        Raises ResumeNoMemoryError (not within `wait_s`, or too many wait), CapacityError (the node stops).
        """
        await self._enter(sandbox, project, need_bytes, wait_s)
        try:
            yield
        finally:
            self._leave(sandbox)

    def wake(self) -> None:
        """Memory has been freed, perhaps."""
        if not self._waiting:
            return
        spare = _available_bytes() - self._least_bytes() - self._spoken_for()
        while self._waiting:
            sandbox, first = next(iter(self._waiting.items()))
            if first.need_bytes > spare:
                break
            spare -= first.need_bytes
            self._admit(sandbox, first)
        self._count()

    def drop(self, sandbox: str) -> None:
        """It has ended: who waits for it goes on, and is told so by the sandbox."""
        waiting = self._waiting.get(sandbox)
        if waiting is not None:
            self._admit(sandbox, waiting, need_bytes=0)
        self.wake()

    def close(self) -> None:
        self._closed = True
        for waiting in self._waiting.values():
            for turn in waiting.turns:
                if not turn.done():
                    turn.set_exception(CapacityError("the node is stopping", retry_after_s=RETRY_SOON_S))
        self._waiting.clear()
        self._count()

    async def _enter(self, sandbox: str, project: str, need_bytes: int, wait_s: float) -> None:
        if self._closed:
            raise CapacityError("the node is stopping", retry_after_s=RETRY_SOON_S)
        if (admitted := self._admitted.get(sandbox)) is not None:
            admitted.users += 1
            return
        team = team_of(project)
        self._check_length(sandbox, team)
        waiting = self._waiting.setdefault(sandbox, _Waiting(team, need_bytes))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.turns[turn] = self._clock.monotonic_s() + wait_s
        try:
            self.wake()  # itself, where nobody is before it
            self._look_while_needed()
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(sandbox)  # it had its turn in the moment in which it gave up
            else:
                self._give_up(sandbox, waiting, turn)
            raise

    def _check_length(self, sandbox: str, team: str) -> None:
        own = sum(len(waiting.turns) for waiting in self._waiting.values() if waiting.team == team)
        if len(self) >= self._most or own >= self._per_project:
            raise self._refusal(sandbox, f"{len(self)} resumes wait for memory already, {own} of them of {team}")

    def _admit(self, sandbox: str, waiting: _Waiting, *, need_bytes: int | None = None) -> None:
        del self._waiting[sandbox]
        turns = [turn for turn in waiting.turns if not turn.done()]
        if turns:
            need = waiting.need_bytes if need_bytes is None else need_bytes
            self._admitted[sandbox] = _Admitted(need, len(turns))
        for turn in turns:
            turn.set_result(None)

    def _leave(self, sandbox: str) -> None:
        admitted = self._admitted[sandbox]
        admitted.users -= 1
        if admitted.users == 0:
            del self._admitted[sandbox]
            if admitted.need_bytes:
                self._settling.append((self._clock.monotonic_s() + _SETTLE_S, admitted.need_bytes))

    def _give_up(self, sandbox: str, waiting: _Waiting, turn: asyncio.Future[None]) -> None:
        waiting.turns.pop(turn, None)
        if not waiting.turns and self._waiting.get(sandbox) is waiting:
            del self._waiting[sandbox]
            self.wake()  # who is behind may need less
        self._count()

    def _spoken_for(self) -> int:
        now = self._clock.monotonic_s()
        while self._settling and self._settling[0][0] <= now:
            self._settling.popleft()
        settling = sum(size for _, size in self._settling)
        return settling + sum(admitted.need_bytes for admitted in self._admitted.values())

    def _look_while_needed(self) -> None:
        if self._waiting and not self._looks:
            self._looks = True
            self._tasks.spawn(self._look())

    async def _look(self) -> None:
        try:
            while self._waiting:
                await self._sleep(_LOOK_S)
                self.wake()
                self._expire()
        finally:
            self._looks = False

    def _expire(self) -> None:
        now = self._clock.monotonic_s()
        for sandbox, waiting in list(self._waiting.items()):
            for turn, until_s in list(waiting.turns.items()):
                if until_s <= now and not turn.done():
                    turn.set_exception(self._refusal(sandbox, _shortage(waiting.need_bytes, self._least_bytes())))

    def _refusal(self, sandbox: str, why: str) -> ResumeNoMemoryError:
        return ResumeNoMemoryError(
            why,
            hint="it is paused as before; pause or destroy others on its node",
            sandbox=sandbox,
            retry_after_s=RETRY_SOON_S,
        )

    def _count(self) -> None:
        metrics.RESUMES_WAITING.set(len(self))


def _available_bytes() -> int:
    try:
        return memory_available_bytes()
    except HostError:
        return 0  # who waits fails in time, by this queue's own error


def _shortage(need_bytes: int, least_bytes: int) -> str:
    need = f" of the {format_size(need_bytes)} that it needs" if need_bytes else ""
    return (
        f"the node has {format_size(_available_bytes())} of memory left{need}, and {format_size(least_bytes)} "
        "are kept for what runs already"
    )
