"""Declares nodes lost, and says so in the log of events. Any number may run; one acts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from dsec.cluster.jobs.keeper import JobKeeper
from dsec.cluster.leases import Held, Lease
from dsec.cluster.log import Log, LogStream, verdict_subject
from dsec.cluster.members.nodes import Nodes, NodeState, NodeView
from dsec.cluster.members.rulings import declare_lost, note_buried
from dsec.cluster.members.verdicts import verdicts
from dsec.cluster.registry import Registry
from dsec.cluster.tombstones import bury
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError, DsecError
from dsec.core.ids import NodeId
from dsec.core.states import EndCause
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.cluster import Wanted
from dsec.wire.codec import pack
from dsec.wire.events import Event, EventKind, Events

log = get_logger(__name__)

_LEASE: Final = "watcher"
_LEASE_S: Final = 15.0
_RENEW_S: Final = 5.0
_LOOK_S: Final = 1.0


class Watcher:
    """`engine_since`: since when (monotonic) the engine has been there without a break; None: it is away."""

    def __init__(
        self,
        registry: Registry,
        events: Log,
        nodes: Nodes,
        lease: Lease,
        clock: Clock,
        *,
        engine_since: Callable[[], float | None],
        look_s: float = _LOOK_S,
        jobs: Callable[[Callable[[], bool]], JobKeeper] | None = None,
    ) -> None:
        """`jobs` makes who watches their leases, given whether this watcher acts."""
        self._registry = registry
        self._events = events
        self._nodes = nodes
        self._lease = lease
        self._clock = clock
        self._engine_since = engine_since
        self._look_s = look_s
        self._name = f"watcher-{secrets.token_hex(8)}"
        self._held: Held | None = None
        self._renew_at = 0.0
        self._frozen = False
        self._burial: asyncio.Task[None] | None = None
        self._tried: dict[NodeId, float] = {}  # when each was buried, or was tried to be
        self._states: dict[NodeId, NodeState] | None = None  # as they were told of; None: not by us
        self._jobs = None if jobs is None else jobs(lambda: self.acts)

    @property
    def acts(self) -> bool:
        return self._held is not None and self._clock.monotonic_s() < self._held.until

    async def run(self) -> None:
        """Until it is cancelled; then another may act at once."""
        try:
            while True:
                try:
                    self._freeze_jobs()
                    await self._hold()
                    if self.acts:
                        await self.look()
                        if self._jobs is not None:
                            await self._jobs.look()
                except DsecError as error:
                    log.warning("the watcher could not do its work", error=str(error))
                self._count()
                await asyncio.sleep(self._look_s)
        finally:
            await self._end_burial()
            if self._jobs is not None:
                await self._jobs.close()
            if self._held is not None:
                await self._give_up(self._held)

    def _freeze_jobs(self) -> None:
        """Whether it acts or not: what it has seen of beats is good for when it does."""
        if self._jobs is None:
            return
        since = self._engine_since()
        if since is None or verdicts(list(self._nodes), now=self._clock.monotonic_s(), engine_since=since).frozen:
            self._jobs.freeze()

    async def look(self) -> None:
        """One round of verdicts. Raises UnavailableError."""
        found = verdicts(list(self._nodes), now=self._clock.monotonic_s(), engine_since=self._engine_since())
        if found.frozen != self._frozen:
            self._frozen = found.frozen
            log.warning("so many nodes are away that none is declared lost" if found.frozen else "verdicts go on")
        for node in found.lost:
            await self._declare(node)
        await self._tell_changes()
        await self._tell_floods()
        self._bury_next()

    def _bury_next(self) -> None:
        """One node at a time, beside the verdicts: it may take a minute."""
        now = self._clock.monotonic_s()
        if self._burial is not None and not self._burial.done():
            return
        gone = (NodeState.LOST, NodeState.RETIRED)
        left = [view for view in self._nodes if view.member is not None and view.state(now) in gone and not view.buried]
        if left:  # one that fails comes after the others
            view = min(left, key=lambda view: (self._tried.get(view.id, 0.0), view.id))
            self._tried[view.id] = now
            self._burial = asyncio.create_task(self._bury(view), name="bury")

    async def _bury(self, view: NodeView) -> None:
        member = view.member
        assert member is not None
        retired = view.ruling.wanted == Wanted.RETIRE
        cause = EndCause.NODE_RETIRED if retired else EndCause.NODE_LOST
        try:
            count = await bury(self._registry, self._events, view, cause, self._clock.wall_s(), word=self._name)
            await note_buried(self._registry, member)
        except* DsecError as errors:
            log.warning("sandboxes of a node cannot be buried yet", node=view.id, error=str(errors.exceptions[0]))
        else:
            log.info("the sandboxes of a node are buried", node=view.id, cause=str(cause), sandboxes=count)

    async def _end_burial(self) -> None:
        if self._burial is not None:
            self._burial.cancel()
            await asyncio.gather(self._burial, return_exceptions=True)

    async def _declare(self, node: NodeId) -> None:
        view = self._nodes.find(node)
        if view is None or view.member is None:
            return
        at = self._clock.wall_s()
        await declare_lost(self._registry, view.member, at=at)
        log.error("a node is lost", node=node, term=view.member.term)
        metrics.NODES_LOST.inc()
        await self._say(node, EventKind.NODE_LOST, at, f"term-{view.member.term}")

    async def _say(self, node: NodeId, kind: EventKind, at: float, id: str) -> None:
        event = Event(kind=str(kind), at=at, node=node)
        id = f"{self._name}-{kind}-{node}-{id}"
        await self._events.append(LogStream.EVENTS, verdict_subject(node), pack(Events((event,))), id=id)

    async def _tell_changes(self) -> None:
        """What operators see of nodes, from when this watcher acts. Said twice is said once for a minute, at least."""
        now, at = self._clock.monotonic_s(), self._clock.wall_s()
        states = {view.id: view.state(now) for view in self._nodes if view.member is not None}
        before, self._states = self._states, states
        if before is None:
            return
        for node, state in states.items():
            kind = change_of(before.get(node), state)
            if kind is not None:
                await self._say(node, kind, at, f"at-{int(at)}")

    async def _tell_floods(self) -> None:
        at = self._clock.wall_s()
        while self._nodes.floods:
            node = min(self._nodes.floods)
            if self._nodes.find(node) is not None:
                await self._say(node, EventKind.NODE_FLOODS, at, f"at-{int(at)}")
            self._nodes.floods.discard(node)

    async def _hold(self) -> None:
        now = self._clock.monotonic_s()
        if self._held is None or now >= self._held.until:
            self._held = await self._lease.acquire(_LEASE, self._name, _LEASE_S)
            self._states = None
            self._renew_at = now + _RENEW_S
            if self._held is not None:
                log.info("this watcher acts from now on")
        elif now >= self._renew_at:
            try:
                self._held = await self._lease.renew(self._held)
                self._renew_at = now + _RENEW_S
            except ConflictError:
                self._held = None
                raise

    async def _give_up(self, held: Held) -> None:
        self._held = None
        try:
            async with asyncio.timeout(2.0):
                await self._lease.release(held)
        except (DsecError, TimeoutError) as error:
            log.info("the watcher's lease ends by itself", error=str(error))

    def _count(self) -> None:
        if not self.acts:
            self._nodes.floods.clear()  # the one that acts has seen it, too
        now = self._clock.monotonic_s()
        counts = dict.fromkeys(NodeState, 0)
        for view in self._nodes:
            counts[view.state(now)] += 1
        for state, count in counts.items():
            metrics.NODES.labels(str(state)).set(count)


def change_of(before: NodeState | None, now: NodeState) -> EventKind | None:
    """What is said when a node goes from one to the other; that it is lost is said by who declares it."""
    if before is now or now is NodeState.LOST:
        return None
    if now is NodeState.LIVE:
        return EventKind.NODE_JOINED if before is None else EventKind.NODE_RETURNED
    if now is NodeState.RETIRED:
        return EventKind.NODE_RETIRED
    return EventKind.NODE_SUSPECT if before is NodeState.LIVE else None
