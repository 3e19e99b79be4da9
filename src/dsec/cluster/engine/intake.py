"""What nodes send to replicas and watchers, in measure: one that floods them is left out at the server.

The engine does not bound how much a node publishes, and what is subscribed to has to be read. Nothing is to be had
from all nodes but one, so while one floods there is a subscription for each of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dsec.cluster.engine.connection import Engine
from dsec.core.errors import DsecError
from dsec.core.ids import NodeId
from dsec.core.limits import NODE_FLOOD_MESSAGES
from dsec.observe import metrics
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_LEFT_OUT_S: Final = 60.0
_LOOK_S: Final = 1.0
_ALL: Final = "*"


@dataclass(slots=True)
class _Measure:
    room: float  # messages that are looked at now
    at: float
    dropped: int = 0  # since it last kept to its measure


class Intake:
    """`subject` is that of one node, or of all for `*`. What is above `rate` messages a second, once `burst` have come,
    or larger than `bytes_max`, is dropped; who sends far above that is left out for a minute, and `flooded` is told."""

    def __init__(
        self,
        engine: Engine,
        subject: Callable[[str], str],
        heard: Callable[[NodeId, Msg], None],
        *,
        members: Callable[[], Iterable[NodeId]],
        rate: float,
        burst: int,
        bytes_max: int,
        waiting_max: int,
        queue: str = "",
        flooded: Callable[[NodeId], None] = lambda _: None,
    ) -> None:
        """`heard` never waits, so that no node holds up the others. `members`: who is heard while one is left out."""
        self._engine = engine
        self._subject = subject
        self._take = heard
        self._members = members
        self._rate = rate
        self._burst = burst
        self._bytes_max = bytes_max
        self._waiting_max = waiting_max
        self._queue = queue
        self._flooded = flooded
        self._measures: dict[NodeId, _Measure] = {}
        self._left_out: dict[NodeId, float] = {}  # until when
        self._queued = False  # more waits at the server, of one that is left out now
        self._news = asyncio.Event()
        self._open: dict[str, Subscription] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def left_out(self) -> frozenset[NodeId]:
        return frozenset(self._left_out)

    async def open(self) -> None:
        """Raises UnavailableError."""
        await self._listen(_ALL)
        self._task = asyncio.create_task(self._guard(), name=f"measure {self._subject(_ALL)}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for name in list(self._open):
            await self._stop(name)

    # -- messages ----------------------------------------------------------------------------------

    async def _heard(self, message: Msg) -> None:
        node = NodeId(message.subject.rpartition(".")[2])
        if self._in_measure(node, len(message.data) // (self._bytes_max + 1)):
            self._take(node, message)

    def _in_measure(self, node: NodeId, too_large: int) -> bool:
        """`too_large`: not 0 for one that is; it counts as so many as could have come in its place."""
        now = asyncio.get_running_loop().time()
        measure = self._measures.get(node)
        if measure is None:
            measure = self._measures[node] = _Measure(self._burst, now)
        measure.room = min(measure.room + (now - measure.at) * self._rate, self._burst)
        measure.at = now
        if measure.room >= 1 and not too_large:
            if measure.room == self._burst:
                measure.dropped = 0
            measure.room -= 1
            return True
        measure.room = max(measure.room - too_large, 0)
        measure.dropped += max(too_large, 1)
        metrics.NODE_MESSAGES_DROPPED.inc()
        if measure.dropped >= NODE_FLOOD_MESSAGES:
            measure.dropped = 0
            self._leave_out(node, now)
        return False

    def _leave_out(self, node: NodeId, now: float) -> None:
        if node not in self._left_out:
            log.error("a node floods the cluster, and is not heard for a while", node=node, subject=self._subject(node))
            metrics.NODE_FLOODS.inc()
            self._flooded(node)
        self._left_out[node] = now + _LEFT_OUT_S
        self._queued = True
        self._news.set()

    # -- subscriptions -----------------------------------------------------------------------------

    async def _guard(self) -> None:
        """Until it is cancelled. Heard again, one that still floods is left out again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self._left_out else None):
                    await self._news.wait()
            self._news.clear()
            now = asyncio.get_running_loop().time()
            self._left_out = {node: until for node, until in self._left_out.items() if until > now}
            try:
                await self._follow()
                if self._queued:
                    self._queued = False
                    self._engine.shed()
            except DsecError as error:  # the next look does it
                log.warning("nodes cannot be listened to", error=error.message)

    async def _follow(self) -> None:
        wanted = set(self._members()) - self._left_out.keys() if self._left_out else {_ALL}
        for name in self._open.keys() - wanted:
            await self._stop(name)
        for name in wanted - self._open.keys():
            await self._listen(name)

    async def _listen(self, name: str) -> None:
        self._open[name] = await self._engine.listen(
            self._subject(name), self._heard, queue=self._queue, waiting_max=self._waiting_max
        )

    async def _stop(self, name: str) -> None:
        subscription = self._open.pop(name)
        try:
            await subscription.unsubscribe()
        except Exception as error:  # the connection is closed
            log.debug("a subscription ended with its connection", error=str(error))
