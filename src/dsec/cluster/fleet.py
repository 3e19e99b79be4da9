"""What a replica asks of all nodes together: where creates go, what there is, and who answers for the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from dsec.cluster.placement import Burst, Refusal
from dsec.cluster.queue import CreateQueue, Patience
from dsec.cluster.rpc import Rpc
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import CapacityError, DsecError, UnavailableError
from dsec.core.ids import NodeId
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.events import ENDS, EventKind, EventLine, EventQuery
from dsec.wire.node import Caller, Method, Nothing, Right, Stream
from dsec.wire.records import CreateRequest, Health, ListQuery, Sandbox, SandboxPage

log = get_logger(__name__)

HEALTH_TIMEOUT_S: Final = 5.0
_TRIES: Final = 8  # creates at once, of those that have waited
_LOOK_S: Final = 2.0
_SELF: Final = Caller(principal="api", project="/", rights=frozenset({Right.READ, Right.ADMIN}))


Told = Callable[[Sequence[tuple[int, Sandbox | DsecError]]], Awaitable[None]]
"""Hears what has come of creates, by their places: of each once."""


class CreatesTogether(Protocol):
    async def create(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        keys: Sequence[str],
        timeout_s: float,
        patience: Callable[[], Patience | None],
        told: Told,
    ) -> None:
        """As `Fleet.create` of each key, each with a patience of its own; it returns when all are told of."""
        ...


class Fleet(Protocol):
    @property
    def together(self) -> CreatesTogether | None:
        """For many alike; None: it would not be less work than each by itself."""
        ...

    def node_for(self, method: Method, named: str | None, *, image: str | None = None) -> NodeId:
        """Who does what is not about one sandbox. `named`: the node that the caller asked for.
        `image`: the environment that it needs, where any node would do.

        Raises InvalidArgumentError when there are several and none is named, NodeRetiredError, UnavailableError.
        """
        ...

    def nodes(self) -> Sequence[NodeId]:
        """All on which there may be sandboxes now."""
        ...

    def closed(self) -> Mapping[NodeId, Refusal]:
        """Those that get nothing new now, and why: also nodes that cannot be asked, and may come back."""
        ...

    async def node_of_key(self, project: str, key: str) -> NodeId | None:
        """Which node may have made something for this key before; None: none has."""
        ...

    @property
    def bursts(self) -> Sequence[Burst]:
        """By which rules what overflows goes to other pools of nodes."""
        ...

    def silent(self) -> Sequence[NodeId]:
        """Those on which there may be more, and that cannot be asked now."""
        ...

    def absent(self) -> Sequence[NodeId]:
        """Those that cannot be asked now, and may come back with what is on their disks."""
        ...

    def places(
        self,
        members: Mapping[str, CreateRequest],
        refused: Mapping[str, Collection[NodeId]],
        project: str,
        *,
        linked: bool,
    ) -> dict[str, NodeId]:
        """Where the members of a group would go now: to one node, else to several. `refused`: by which nodes each was.
        `linked`: some reach others. Raises CapacityError, UnsupportedError with `member` in its detail."""
        ...

    async def create(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        key: str | None,
        timeout_s: float,
        patience: Patience | None = None,
        at: NodeId | None = None,
    ) -> Sandbox:
        """As the node does it (`Method.CREATE`): with a key once, whichever replica is asked and however often. With
        patience it waits for room, beside `timeout_s`. `at`: on this node or not at all."""
        ...

    async def listing(self, query: ListQuery, *, caller: Caller, timeout_s: float) -> SandboxPage: ...

    async def events(self, query: EventQuery, *, caller: Caller) -> Stream:
        """What happened to what the caller sees (`Method.EVENTS`)."""
        ...

    async def health(self, version: str) -> Health: ...


class OneNode:
    """Of `dsec up`: the node beside us, which keeps keys and names itself."""

    def __init__(self, rpc: Rpc, node: NodeId, clock: Clock | None = None) -> None:
        self._rpc = rpc
        self._node = node
        self._queue = CreateQueue(clock or SystemClock())
        self._tries = 0  # that those who wait may make, until the node refuses one
        self._listening: asyncio.Task[None] | None = None

    async def close(self) -> None:
        self._queue.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    @property
    def together(self) -> None:
        return None

    def node_for(self, method: Method, named: str | None, *, image: str | None = None) -> NodeId:
        return self._node if named is None else NodeId(named)

    def nodes(self) -> Sequence[NodeId]:
        return (self._node,)

    def closed(self) -> Mapping[NodeId, Refusal]:
        return {}

    async def node_of_key(self, project: str, key: str) -> NodeId | None:
        return self._node

    def places(
        self,
        members: Mapping[str, CreateRequest],
        refused: Mapping[str, Collection[NodeId]],
        project: str,
        *,
        linked: bool,
    ) -> dict[str, NodeId]:
        if refused:
            raise CapacityError("there is no other node")
        return dict.fromkeys(members, self._node)

    @property
    def bursts(self) -> Sequence[Burst]:
        return ()

    def silent(self) -> Sequence[NodeId]:
        return ()

    def absent(self) -> Sequence[NodeId]:
        return ()

    async def create(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        key: str | None,
        timeout_s: float,
        patience: Patience | None = None,
        at: NodeId | None = None,
    ) -> Sandbox:
        body = pack(msgspec.structs.replace(request, queue_s=0.0))
        while True:
            try:
                answer = await self._rpc.call(
                    self._node, Method.CREATE, body, caller=caller, timeout_s=timeout_s, key=key
                )
            except CapacityError as error:
                if patience is None or error.detail.get("never"):  # no waiting helps
                    raise
                self._tries = 0
                self._listen()
                await self._queue.wait(caller.project, None, self._choose, patience, error)
                continue
            if patience is not None and len(self._queue):
                self._try_more(_TRIES)  # there was room for this one: perhaps there is for the next
            return unpack(answer, Sandbox)

    def _choose(self) -> NodeId:
        if not self._tries:
            raise CapacityError("the node has refused the one before")
        self._tries -= 1
        return self._node

    def _try_more(self, tries: int) -> None:
        self._tries = max(self._tries, tries)
        self._queue.wake()

    def _listen(self) -> None:
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._follow(), name="room for creates")

    async def _follow(self) -> None:
        """While somebody waits: what ends leaves room. Memory and disk that become free are told by nobody."""
        await asyncio.sleep(0)  # who asked for this is in the queue then
        while len(self._queue):
            try:
                await self._follow_events()
            except DsecError as error:
                log.info("the node tells nothing of room for creates", why=error.message)
                await asyncio.sleep(_LOOK_S)
                self._try_more(1)

    async def _follow_events(self) -> None:
        query = EventQuery(kinds=tuple(map(str, (*ENDS, EventKind.PAUSED))))
        stream = await self._rpc.open(self._node, Method.EVENTS, pack(query), caller=_SELF)
        heard = asyncio.ensure_future(stream.recv())
        try:
            while len(self._queue):
                await asyncio.wait({heard}, timeout=_LOOK_S)
                if not heard.done():
                    self._try_more(1)
                    continue
                frame = heard.result()
                if frame is None:
                    raise UnavailableError("the stream of events ended")
                heard = asyncio.ensure_future(stream.recv())
                if unpack(frame.body, EventLine).event is not None:
                    self._try_more(_TRIES)
        finally:
            heard.cancel()
            await asyncio.gather(heard, return_exceptions=True)
            await stream.close()

    async def listing(self, query: ListQuery, *, caller: Caller, timeout_s: float) -> SandboxPage:
        answer = await self._rpc.call(self._node, Method.LIST, pack(query), caller=caller, timeout_s=timeout_s)
        return unpack(answer, SandboxPage)

    async def events(self, query: EventQuery, *, caller: Caller) -> Stream:
        return await self._rpc.open(self._node, Method.EVENTS, pack(query), caller=caller)

    async def health(self, version: str) -> Health:
        caller = Caller(principal="api", project="/", rights=frozenset({Right.READ}))
        answer = await self._rpc.call(
            self._node, Method.HEALTH, pack(Nothing()), caller=caller, timeout_s=HEALTH_TIMEOUT_S
        )
        return msgspec.structs.replace(unpack(answer, Health), load=self._rpc.load(self._node))
