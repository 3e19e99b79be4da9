"""A replica's picture of the nodes: from their cards, what operators rule, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dsec.cluster.directory import Address
from dsec.cluster.registry import Bucket, Change, Registry, Snapshot
from dsec.core.clock import Clock
from dsec.core.errors import NodeRetiredError, Outcome, ProtocolError, UnavailableError
from dsec.core.ids import NodeId
from dsec.observe.logs import get_logger
from dsec.wire.cluster import Card, Heartbeat, Member, Ruling, Wanted
from dsec.wire.codec import unpack
from dsec.wire.records import NodeLoad

log = get_logger(__name__)

T = TypeVar("T")

SUSPECT_S: Final = 5.0  # ruling 30: five heartbeats missed
FLOODS_S: Final = 60.0
_RULING: Final = ".ruling"
_RULED: Final = {Wanted.CORDON: "it is cordoned", Wanted.DRAIN: "it is being drained"}


class NodeState(enum.StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"  # its card is good, and its heartbeats are missing: nothing new goes there
    AWAY = "away"  # its card has ended, and nobody has said that it is lost
    LOST = "lost"
    RETIRED = "retired"


@dataclass
class NodeView:
    id: NodeId
    member: Member | None = None
    ruling: Ruling = field(default_factory=Ruling)
    card: Card | None = None
    address: Address | None = None  # the last one known
    load: NodeLoad | None = None
    admits: bool = True
    heard_at: float = 0.0  # monotonic, of the last heartbeat
    loaded_at: float = 0.0  # monotonic: when the load came
    away_since: float | None = None  # monotonic
    floods_until: float = 0.0  # monotonic

    def state(self, now: float) -> NodeState:
        if self.ruling.wanted == Wanted.RETIRE:
            return NodeState.RETIRED
        if self.card is None:
            lost = self.member is not None and self.ruling.lost_term >= self.member.term
            return NodeState.LOST if lost else NodeState.AWAY
        return NodeState.SUSPECT if now - self.heard_at > SUSPECT_S else NodeState.LIVE

    @property
    def buried(self) -> bool:
        """Of its last term: what it had is known to be gone. While it is lost or retired."""
        return self.member is not None and self.ruling.buried_term >= self.member.term

    @property
    def _is_stopped(self) -> bool:
        return self.card is not None and self.card.stopped

    def closed(self, now: float) -> str | None:
        """Why it takes nothing new; None: it does."""
        match self.state(now):
            case NodeState.LIVE:
                pass
            case NodeState.SUSPECT if self._is_stopped:
                return f"it has been stopped, {now - self.heard_at:.0f} s ago"
            case NodeState.SUSPECT:
                return f"it is late: nothing was heard of it for {now - self.heard_at:.0f} s"
            case NodeState.AWAY:
                since = "" if self.away_since is None else f", for {now - self.away_since:.0f} s"
                return f"it is away{since}"
            case state:
                return f"it is {state}"
        if self._is_stopped:
            return "it has been stopped"
        if now < self.floods_until:
            return "it floods the cluster with messages"
        if self.ruling.wanted != Wanted.SERVE:
            return _RULED.get(self.ruling.wanted, f"an operator wants it to {self.ruling.wanted}")
        return None if self.admits else "it takes nothing new"

    @property
    def ordered(self) -> bool:
        """It would take nothing new though it were well: an operator has said so."""
        return self.ruling.wanted != Wanted.SERVE

    def remedy(self, now: float) -> str | None:
        """What makes it take something new again, where people can."""
        if self._is_stopped or self.state(now) in (NodeState.SUSPECT, NodeState.AWAY, NodeState.LOST):
            return f"look after `dsec node` on the machine of node {self.id}: does it run, and reach NATS?"
        if self.ruling.wanted in _RULED:
            return f"`dsec cluster serve {self.id}` lets node {self.id} take new sandboxes again"
        return None

    def takes_new(self, now: float) -> bool:
        return self.closed(now) is None


class Nodes:
    """Follows the registry from `start` on. What it knew stays while the engine is away, but for heartbeats, without
    which nothing new is placed."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._views: dict[NodeId, NodeView] = {}
        self._shown: tuple[NodeView, ...] | None = None  # until a card comes or goes
        self._tasks: list[asyncio.Task[None]] = []
        self._known: dict[Bucket, bool] = {Bucket.NODES: False, Bucket.MEMBERS: False}
        self._ready = asyncio.Event()
        self.floods: set[NodeId] = set()  # since somebody has taken them
        self.changed = asyncio.Event()  # set at each change; who waits clears it
        self.on_retired: Callable[[NodeId], None] = lambda _: None  # said again when all is heard anew
        self.on_news: Callable[[], None] = lambda: None  # of any node: there may be room

    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Returns when it knows all. Raises UnavailableError."""
        self._tasks = [asyncio.create_task(self._follow(bucket), name=f"watch {bucket}") for bucket in self._known]
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError as error:
            await self.close()
            raise UnavailableError(
                "the engine does not tell which nodes there are", outcome=Outcome.UNCHANGED
            ) from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(list(self._views.values()))

    @property
    def shown(self) -> Sequence[NodeView]:
        """Those that have a card: what placement looks at for each create."""
        if self._shown is None:
            self._shown = tuple(view for view in self._views.values() if view.card is not None)
        return self._shown

    def find(self, node: NodeId) -> NodeView | None:
        return self._views.get(node)

    def members(self) -> list[NodeId]:
        """Those that may be heard of."""
        return [view.id for view in self if view.member is not None and view.ruling.wanted != Wanted.RETIRE]

    def flooded(self, node: NodeId) -> None:
        """It sends far more than is looked at: for a while nothing new goes there."""
        view = self._views.get(node)
        if view is not None:
            self.floods.add(node)
            view.floods_until = self._clock.monotonic_s() + FLOODS_S

    def retired(self, node: NodeId) -> bool:
        view = self._views.get(node)
        return view is not None and view.ruling.wanted == Wanted.RETIRE

    def address(self, node: NodeId) -> Address:
        """See `Directory`. Of a node whose card has ended, the last one: its sandboxes may be there yet."""
        view = self._views.get(node)
        if view is None or view.member is None:
            raise NodeRetiredError(
                f"there is no node {node} in this cluster", hint="its machine was set up anew, or left"
            )
        state = view.state(self._clock.monotonic_s())
        if state == NodeState.RETIRED:
            raise NodeRetiredError(f"node {node} has left for good, and its sandboxes with it")
        if state == NodeState.LOST or view.address is None:
            raise UnavailableError(
                f"node {node} is {state}", outcome=Outcome.UNKNOWN, retry_after_s=5.0, detail={"node_state": str(state)}
            )
        return view.address

    # -- news --------------------------------------------------------------------------------------

    def heard(self, node: str, body: bytes) -> None:
        """A heartbeat that came on the subject of `node`, which nobody else can write to: what it says of others, what
        cannot be read, and what is of a term that is over counts for nothing."""
        try:
            beat = unpack(body, Heartbeat)
        except ProtocolError:
            return
        view = self._views.get(NodeId(node))
        if view is None or beat.node != node or view.card is None or view.card.term != beat.term:
            return
        if view.ruling.wanted == Wanted.RETIRE:
            return
        view.load, view.admits = beat.load, beat.admits
        view.heard_at = view.loaded_at = self._clock.monotonic_s()
        self.on_news()

    def told(self, node: NodeId, load: NodeLoad) -> None:
        """The load that came with a reply: newer than any heartbeat (ruling 32)."""
        view = self._views.get(node)
        if view is not None:
            view.load = load
            self.on_news()

    async def _follow(self, bucket: Bucket) -> None:
        async with contextlib.aclosing(self._registry.watch(bucket)) as news:
            await self._take(bucket, news)

    async def _take(self, bucket: Bucket, news: AsyncGenerator[Snapshot | Change, None]) -> None:
        async for one in news:
            if isinstance(one, Snapshot):
                known = {entry.key for entry in one.entries}
                for key in self._keys(bucket) - known:
                    self._set(bucket, key, None)
                for entry in one.entries:
                    self._set(bucket, entry.key, entry.value)
                self._known[bucket] = True
                if all(self._known.values()):
                    self._ready.set()
            else:
                self._set(bucket, one.key, one.value)
            self.changed.set()
            self.on_news()

    def _keys(self, bucket: Bucket) -> set[str]:
        if bucket == Bucket.NODES:
            return {view.id for view in self if view.card is not None}
        return {view.id for view in self if view.member is not None} | {view.id + _RULING for view in self}

    def _set(self, bucket: Bucket, key: str, value: bytes | None) -> None:
        node = NodeId(key.removesuffix(_RULING))
        view = self._views.get(node)
        if view is None:
            if value is None:
                return
            view = self._views[node] = NodeView(node)
        if bucket == Bucket.NODES:
            self._shown = None
            self._set_card(view, _read(value, Card))
        elif key.endswith(_RULING):
            view.ruling = _read(value, Ruling) or Ruling()
            if view.ruling.wanted == Wanted.RETIRE:
                self.on_retired(node)
        else:
            member = _read(value, Member)
            if member is not None and member.node != node:
                log.warning("a node says that it is another", node=node)
                member = None
            if view.card is None and member != view.member:
                view.away_since = self._clock.monotonic_s()  # it joins: its card comes
            view.member = member

    def _set_card(self, view: NodeView, card: Card | None) -> None:
        now = self._clock.monotonic_s()
        if card is None:
            if view.card is not None:
                view.away_since = now
            view.card = None
            return
        if view.card is None or view.card.term != card.term:
            view.heard_at = now  # it has just shown itself
            view.admits = True
        view.card, view.away_since = card, None
        view.address = Address(card.host, card.port, card.term)


def _read(value: bytes | None, kind: type[T]) -> T | None:
    if value is None:
        return None
    try:
        return unpack(value, kind)
    except ProtocolError:
        log.warning("a record of the cluster cannot be read", kind=kind.__name__)
        return None
