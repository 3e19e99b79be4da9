"""Creates that no node takes now: they wait for room, in turn between the projects below the root, and within each of
those between all below it, each for as long as its caller does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from dsec.core.clock import Clock
from dsec.core.errors import CapacityError
from dsec.core.ids import NodeId
from dsec.core.limits import CREATES_QUEUED_MAX, CREATES_QUEUED_PER_PROJECT_MAX
from dsec.observe import metrics
from dsec.wire.node import team_of

_PAUSE_S: Final = 0.02  # between two rounds: news come from many nodes at once
_VETO_S: Final = 1.0  # for so long a node that has refused is not asked again by the same create
_RETRY_AFTER_S: Final = 1.0
_LOOKED_MAX: Final = 512  # of one project, each time around: what asks for less may be behind what asks for more

Choose = Callable[[], NodeId]
"""A node with room, which the choice has taken some of. Raises CapacityError: there is none."""


class Patience:
    """How long one create waits, in all. Its caller may leave: then it waits no more, and what is under way goes on."""

    def __init__(self, queue_s: float) -> None:
        self.asked_s = self.left_s = queue_s
        self.number: int | None = None  # of its turn, from its first wait on
        self._waits: asyncio.Future[NodeId] | None = None
        self._left = False

    def leave(self) -> None:
        self._left = True
        if self._waits is not None and not self._waits.done():
            self._waits.set_exception(CapacityError("its caller has gone"))

    @property
    def over(self) -> bool:
        return self._left or self.left_s <= 0

    def waits(self, turn: asyncio.Future[NodeId] | None) -> None:
        self._waits = turn


class _Waiting:
    __slots__ = ("choose", "number", "shape", "turn")

    def __init__(self, number: int, shape: object, choose: Choose, turn: asyncio.Future[NodeId]) -> None:
        self.number = number
        self.shape = shape
        self.choose = choose
        self.turn = turn


class CreateQueue:
    """Of one replica. `wake` says that there may be room: nobody looks for it without being told."""

    def __init__(
        self,
        clock: Clock,
        *,
        most: int = CREATES_QUEUED_MAX,
        per_project: int = CREATES_QUEUED_PER_PROJECT_MAX,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._clock = clock
        self._most = most
        self._per_project = per_project
        self._pause_s = pause_s
        # Of each team, of each of its projects; both in the order of whose turn it is.
        self._teams: dict[str, dict[str, deque[_Waiting]]] = {}
        self._count = 0
        self._numbers = 0
        self._round: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._count

    async def wait(
        self, project: str, shape: object, choose: Choose, patience: Patience, refused: CapacityError
    ) -> NodeId:
        """The node to ask, once it is the create's turn and there is one. Those of one `shape` ask for the same.

        Raises `refused` without patience, CapacityError when too many wait, or it waited in vain.
        """
        if patience.over:
            raise refused
        waiting = self._enter(project, shape, choose, patience, refused)
        began_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(patience.left_s) as limit:
                return await waiting.turn
        except TimeoutError:
            if not limit.expired():
                raise
            raise _in_vain(refused, "the create has waited in vain", queued_s=patience.asked_s) from None
        finally:
            patience.left_s -= self._clock.monotonic_s() - began_s
            patience.waits(None)
            self._leave(project, waiting)

    def wake(self) -> None:
        """Something has changed: those who wait are offered what there is, soon."""
        if self._count and self._round is None:
            self._round = asyncio.get_running_loop().call_later(self._pause_s, self._offer)

    def close(self) -> None:
        if self._round is not None:
            self._round.cancel()

    def _enter(
        self, project: str, shape: object, choose: Choose, patience: Patience, refused: CapacityError
    ) -> _Waiting:
        lines = self._teams.get(team_of(project), {})
        own = sum(map(len, lines.values()))
        new = patience.number is None  # else it had its place before others came
        if new and (self._count >= self._most or own >= self._per_project):
            metrics.CREATES_QUEUE_FULL.inc()
            raise _in_vain(refused, f"{self._count} creates wait already, {own} of them of {team_of(project)}")
        if patience.number is None:
            self._numbers += 1
            patience.number = self._numbers
        turn: asyncio.Future[NodeId] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(patience.number, shape, choose, turn)
        patience.waits(turn)
        line = self._teams.setdefault(team_of(project), lines).setdefault(project, deque())
        # One that had its turn, and was refused by the node, is before those that came after it.
        place = next((index for index, other in enumerate(line) if other.number > waiting.number), len(line))
        line.insert(place, waiting)
        self._count += 1
        metrics.CREATES_QUEUED.set(self._count)
        return waiting

    def _leave(self, project: str, waiting: _Waiting) -> None:
        """Out of its line, where it is there yet."""
        lines = self._teams.get(team_of(project), {})
        line = lines.get(project)
        if line is not None and waiting in line:
            line.remove(waiting)
            self._count -= 1
            if not line:
                del lines[project]
            if not lines:
                del self._teams[team_of(project)]
        metrics.CREATES_QUEUED.set(self._count)

    def _offer(self) -> None:
        """One from each project after the other, until nobody who is next in line is helped by what there is."""
        self._round = None
        full: set[object] = set()
        helped = True
        while helped:
            helped = False
            for team in list(self._teams):
                lines = self._teams[team]
                if any(self._offer_to(project, lines, full) for project in list(lines)):
                    helped = True
                    if self._teams.pop(team, None):  # it comes last now, in the next round too
                        self._teams[team] = lines

    def _offer_to(self, project: str, lines: dict[str, deque[_Waiting]], full: set[object]) -> bool:
        for waiting in tuple(islice(lines[project], _LOOKED_MAX)):
            if waiting.turn.done() or waiting.shape in full:
                continue
            try:
                node = waiting.choose()
            except CapacityError:
                full.add(waiting.shape)
                continue
            except Exception as error:
                waiting.turn.set_exception(error)
            else:
                waiting.turn.set_result(node)
            self._leave(project, waiting)
            if (line := lines.pop(project, None)) is not None:
                lines[project] = line
            return True
        return False


class Vetoes:
    """Nodes that have refused one create: they are asked again after a moment, not at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[NodeId, float] = {}

    def add(self, node: NodeId) -> None:
        self._until[node] = self._clock.monotonic_s() + _VETO_S

    def now(self) -> set[NodeId]:
        now = self._clock.monotonic_s()
        return {node for node, until in self._until.items() if until > now}


def _in_vain(refused: CapacityError, why: str, **more: float) -> CapacityError:
    return CapacityError(
        f"{why}: {refused.message}",
        hint=refused.hint,
        retry_after_s=refused.retry_after_s or _RETRY_AFTER_S,
        detail={**refused.detail, **more},
    )
