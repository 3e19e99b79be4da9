"""The node's side of being a member: it joins with a new term, refreshes its card, and knows when it may not serve."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from dsec.cluster.registry import Bucket, Entry, Keys
from dsec.core.clock import Clock
from dsec.core.errors import (
    ConflictError,
    DsecError,
    ForbiddenError,
    NodeRetiredError,
    ProtocolError,
    UnavailableError,
)
from dsec.core.ids import NodeId
from dsec.observe.logs import get_logger
from dsec.wire.cluster import Card, Heartbeat, Member, Ruling, Wanted, ruling_key
from dsec.wire.codec import pack, unpack
from dsec.wire.records import NodeLoad

log = get_logger(__name__)

T = TypeVar("T")
_LEAVE_S: Final = 2.0  # to say that it stops
_ROUNDS: Final = 8  # of a compare-and-set that others are faster at


class Standing(enum.StrEnum):
    OUTSIDE = "outside"  # not joined yet, or left
    MEMBER = "member"
    LAPSED = "lapsed"  # the card may have ended: others may have declared it lost
    FENCED = "fenced"  # another process is in charge of this id, or the id has been retired


@dataclass(frozen=True, slots=True)
class Timing:
    """Ruling 30: suspect after 5 missed heartbeats, lost when the card has ended."""

    card_ttl_s: float = 30.0
    refresh_s: float = 5.0
    heartbeat_s: float = 1.0


class Membership:
    """Started with `join`. Losing the engine ends nothing: sandboxes run on and are served; nothing new is admitted
    once the card may have ended. `came_back` is called before a node that was declared lost is a member again."""

    def __init__(
        self,
        registry: Keys,
        tell: Callable[[bytes], Awaitable[None]],
        card: Card,
        *,
        installation: str,
        clock: Clock,
        load: Callable[[], NodeLoad],
        came_back: Callable[[], Awaitable[None]],
        describe: Callable[[Card], Awaitable[Card]] | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._registry = registry
        self._tell = tell
        self._card = card
        self._installation = installation
        self._clock = clock
        self._load = load
        self._came_back = came_back
        self._describe = describe  # a card as it is to be from now on
        self._timing = timing or Timing()
        self._revision = 0
        self._good_until = 0.0
        self._fenced = False
        self._left = False
        self._ruling = Ruling()
        self._tasks: list[asyncio.Task[None]] = []
        self.fenced = asyncio.Event()

    @property
    def node(self) -> NodeId:
        return NodeId(self._card.node)

    @property
    def term(self) -> int:
        return self._card.term

    @property
    def wanted(self) -> Wanted:
        return self._ruling.wanted

    @property
    def standing(self) -> Standing:
        if self._fenced:
            return Standing.FENCED
        if self._revision == 0 or self._left:
            return Standing.OUTSIDE
        # By the own clock and from before the last refresh was sent: earlier than anybody else can see it end.
        return Standing.MEMBER if self._clock.monotonic_s() < self._good_until else Standing.LAPSED

    def reached_at(self, host: str, port: int) -> None:
        """Before it joins."""
        self._card = msgspec.structs.replace(self._card, host=host, port=port)

    async def join(self) -> None:
        """Raises ForbiddenError for an id that another installation has, NodeRetiredError for one that was retired,
        UnavailableError when the engine is away."""
        await self._join()
        self._tasks = [
            asyncio.create_task(self._refresh(), name="membership"),
            asyncio.create_task(self._beat(), name="heartbeats"),
        ]
        log.info("joined", node=self.node, term=self.term)

    async def leave(self) -> None:
        """The process stops. The card stays for its time, so that one that comes back soon was never away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.standing is Standing.MEMBER:
            self._card = msgspec.structs.replace(self._card, stopped=True)
            with contextlib.suppress(DsecError, TimeoutError):  # others see it late, and then away
                async with asyncio.timeout(_LEAVE_S):
                    await self._put_card(self._revision)
        self._left = True
        await self._say()

    # -- joining -----------------------------------------------------------------------------------

    async def _join(self) -> None:
        before = await self._take_term()
        self._ruling = await self._read_ruling()
        if self._ruling.wanted == Wanted.RETIRE:
            self._fence("it has been retired")
            raise NodeRetiredError(f"node {self.node} has been retired", hint="give this machine a new node id")
        if self._ruling.lost_term and self._ruling.lost_term >= before:
            log.warning("this node had been declared lost", term=before)
            await self._came_back()
        await self._show_card()

    async def _take_term(self) -> int:
        """A term of our own; the one before it."""
        for _ in range(_ROUNDS):
            entry = await self._registry.get(Bucket.MEMBERS, self.node)
            known = _read(entry, Member)
            if known is not None and known.installation != self._installation:
                self._fence("another installation has its id")
                raise ForbiddenError(
                    f"the node id {self.node} belongs to another installation",
                    hint="a machine that is set up anew gets a new id: dsec cluster issue node",
                )
            if self._term_is_taken(known):
                raise NodeRetiredError(f"another process is in charge of node {self.node}")
            before = 0 if known is None else known.term
            member = Member(
                node=self.node,
                installation=self._installation,
                term=before + 1,
                joined_at=self._clock.wall_s(),
            )
            try:
                if entry is None:
                    await self._registry.create(Bucket.MEMBERS, self.node, pack(member))
                else:
                    await self._registry.update(Bucket.MEMBERS, self.node, pack(member), revision=entry.revision)
            except ConflictError:
                continue
            self._card = msgspec.structs.replace(self._card, term=member.term, stopped=False)
            return before
        raise UnavailableError(f"node {self.node} joins several times at once")

    def _term_is_taken(self, known: Member | None) -> bool:
        """Of a process that had a term: somebody has taken a later one."""
        if self.term and known is not None and known.term > self.term:
            self._fence(f"a process with term {known.term} has taken over from {self.term}")
            return True
        return False

    async def _show_card(self) -> None:
        for _ in range(_ROUNDS):
            entry = await self._registry.get(Bucket.NODES, self.node)
            shown = _read(entry, Card)
            if shown is not None and shown.term > self.term:
                self._fence(f"a process with term {shown.term} has taken over from {self.term}")
                raise NodeRetiredError(f"another process is in charge of node {self.node}")
            try:
                await self._put_card(None if entry is None else entry.revision)
                return
            except ConflictError:
                continue
        raise UnavailableError(f"the card of node {self.node} changes all the time")

    async def _put_card(self, revision: int | None) -> None:
        if self._describe is not None and not self._card.stopped:
            self._card = await self._describe(self._card)
        sent = self._clock.monotonic_s()
        body, ttl_s = pack(self._card), self._timing.card_ttl_s
        if revision is None:
            self._revision = await self._registry.create(Bucket.NODES, self.node, body, ttl_s=ttl_s)
        else:
            self._revision = await self._registry.update(Bucket.NODES, self.node, body, revision=revision, ttl_s=ttl_s)
        self._good_until = sent + ttl_s

    async def _read_ruling(self) -> Ruling:
        return _read(await self._registry.get(Bucket.MEMBERS, ruling_key(self.node)), Ruling) or Ruling()

    # -- staying -----------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        while not self._fenced:
            await asyncio.sleep(self._timing.refresh_s)
            try:
                await self._refresh_once()
            except (UnavailableError, ProtocolError) as error:
                log.warning("the card could not be refreshed", error=str(error), standing=str(self.standing))
            except DsecError as error:
                log.error("the node is no member any more", error=str(error), standing=str(self.standing))
            except Exception:  # this loop is what keeps the node a member: it goes on, and the next round may succeed
                log.error("the card could not be refreshed", standing=str(self.standing), exc_info=True)

    async def _refresh_once(self) -> None:
        ruling = await self._read_ruling()
        if ruling.wanted == Wanted.RETIRE:
            self._fence("it has been retired")
            return
        if ruling.wanted != self._ruling.wanted:
            log.info("the operator wants something else of this node", wanted=str(ruling.wanted))
        self._ruling = ruling
        try:
            await self._put_card(self._revision)
        except ConflictError:
            await self._find_out()

    async def _find_out(self) -> None:
        """The card is not what we wrote: its time was over, or somebody else has written."""
        shown = _read(await self._registry.get(Bucket.NODES, self.node), Card)
        if shown is not None and shown.term == self.term:
            await self._show_card()
            return
        log.warning("the card had ended: joining again", term=self.term)
        await self._join()

    async def _beat(self) -> None:
        while not self._fenced:
            await self._say()
            await asyncio.sleep(self._timing.heartbeat_s)

    async def _say(self) -> None:
        await self._tell(pack(Heartbeat(node=self.node, term=self.term, load=self._load(), admits=self.admits)))

    @property
    def admits(self) -> bool:
        return self.standing == Standing.MEMBER and self.wanted == Wanted.SERVE

    def _fence(self, why: str) -> None:
        if not self._fenced:
            log.error("this node may not serve any more", node=self.node, why=why)
        self._fenced = True
        self.fenced.set()


def _read(entry: Entry | None, kind: type[T]) -> T | None:
    """None too for what cannot be read: it was not written by who should."""
    if entry is None:
        return None
    try:
        return unpack(entry.value, kind)
    except ProtocolError:
        log.warning("a record of the cluster cannot be read", key=entry.key)
        return None
