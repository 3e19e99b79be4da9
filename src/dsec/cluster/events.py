"""Events of a whole cluster, from the log: a replica keeps the last ones, and reads for its callers what is older."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from typing import Final

from dsec.cluster.log import OF_NODE, VERDICT, Log, LogStream, Record
from dsec.cluster.rpc import EmbeddedRpc
from dsec.core.errors import DsecError, InvalidArgumentError, ProtocolError, UnsupportedError
from dsec.core.ids import NodeId, node_of, parse_sandbox_id
from dsec.core.limits import EVENTS_READ_MAX, EVENTS_TAIL_BYTES_MAX, EVENTS_TAIL_MAX
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Event, EventKind, EventQuery, Events
from dsec.wire.following import Bell, EventPage, Place, serve_events
from dsec.wire.node import Caller, Method, Stream, project_seen
from dsec.wire.records import NodeLoad

log = get_logger(__name__)

_AGAIN_S: Final = 1.0
_NODE_GAP: Final = "the node has not kept what happened on it before this until it could be told"
_OF_NODES: Final = "node_"  # kinds that a node does not tell of itself


def events_of(record: Record) -> tuple[Event, ...]:
    """What a record tells. A node speaks for its own sandboxes: else, and what cannot be read, it tells nothing."""
    kind, _, node = record.subject.partition(".")
    if kind not in (OF_NODE, VERDICT):
        return ()
    try:
        events = unpack(record.body, Events).events
    except ProtocolError:
        log.warning("a record of events cannot be read", subject=record.subject)
        return ()
    if kind == OF_NODE and not all(_is_own(event, node) for event in events):
        log.warning("a node tells of what is not its own", node=node)
        return ()
    return events if kind == VERDICT else tuple(map(_plain, events))


def _plain(event: Event) -> Event:
    """A gap is told to everybody: with no word of the node's own."""
    if event.kind != EventKind.GAP:
        return event
    return Event(kind=event.kind, at=event.at, node=event.node, number=event.number, detail=_NODE_GAP)


def _is_own(event: Event, node: str) -> bool:
    try:
        about = event.sandbox is None or node_of(parse_sandbox_id(event.sandbox)) == node
    except InvalidArgumentError:
        return False
    return about and event.node == node and event.number > 0 and not event.kind.startswith(_OF_NODES)


class EventTail:
    """`wire.following.EventSource`. What is further back than it keeps is read from the log, each time."""

    def __init__(self, log: Log, origin: str) -> None:
        self.origin = origin
        self._log = log
        self._kept: deque[tuple[int, tuple[Event, ...]]] = deque()
        self._sizes: deque[int] = deque()  # of each in bytes
        self._count = self._bytes = 0
        self._floor = 0  # from this record on all are kept
        self._end = 0  # the next record's number, at least
        self._bell = Bell()
        self.news = self._bell.news
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises UnavailableError."""
        _, last = await self._log.bounds(LogStream.EVENTS)
        self._floor = self._end = last + 1
        self._task = asyncio.create_task(self._follow(), name="events")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def end(self) -> Place:
        return (self._end, 0)

    async def read(self, after: Place) -> EventPage:
        if after[0] >= self._floor:
            found = []
            for item in reversed(self._kept):  # most who read are near its end
                if item[0] < after[0]:
                    break
                found.append(item)
            return _page(_at_most(found[::-1]), after, after[0], self._end)
        first, last = await self._log.bounds(LogStream.EVENTS)
        records = await self._log.read(LogStream.EVENTS, "", after=max(after[0] - 1, 0), limit=EVENTS_READ_MAX)
        if not records:  # the rest has gone meanwhile
            return _page([], after, min(first, self._floor), max(last + 1, after[0]))
        return _page([(record.sequence, events_of(record)) for record in records], after, first, None)

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._log.follow(LogStream.EVENTS, after=self._end - 1)) as records:
                    async for record in records:
                        self._keep(record)
            except DsecError as error:
                log.warning("events are not followed", error=str(error))
            await asyncio.sleep(_AGAIN_S)

    def _keep(self, record: Record) -> None:
        if record.sequence != self._end:  # the log has lost what was in between: it is asked, and says so
            self._kept.clear()
            self._sizes.clear()
            self._count, self._bytes, self._floor = 0, 0, record.sequence
        events = events_of(record)
        self._kept.append((record.sequence, events))
        self._sizes.append(len(record.body))
        self._count += len(events) + 1
        self._bytes += len(record.body)
        self._end = record.sequence + 1
        while self._count > EVENTS_TAIL_MAX or self._bytes > EVENTS_TAIL_BYTES_MAX:
            old, gone = self._kept.popleft()
            self._count -= len(gone) + 1
            self._bytes -= self._sizes.popleft()
            self._floor = old + 1
        self._bell.ring()


def _at_most(records: list[tuple[int, tuple[Event, ...]]]) -> list[tuple[int, tuple[Event, ...]]]:
    """Some for one page, one at least."""
    count = 0
    for index, (_, events) in enumerate(records):
        count += len(events)
        if count >= EVENTS_READ_MAX:
            return records[: index + 1]
    return records


def _page(records: list[tuple[int, tuple[Event, ...]]], after: Place, first: int, end: int | None) -> EventPage:
    """`end`: up to where there is nothing more."""
    found = tuple(
        ((number, index + 1), event)
        for number, events in records
        for index, event in enumerate(events)
        if (number, index + 1) > after
    )
    read_to = (records[-1][0] + 1, 0) if records else after if end is None else max(after, (end, 0))
    return EventPage(found, read_to, first)


class EventDesk:
    """Serves followers from a tail, each at its own pace, over bounded streams."""

    def __init__(self, tail: EventTail, now: float) -> None:
        self._tail = tail
        self._now = now
        self._rpc = EmbeddedRpc(self, NodeId(tail.origin))

    async def open(self, query: EventQuery, caller: Caller) -> Stream:
        return await self._rpc.open(NodeId(self._tail.origin), Method.EVENTS, pack(query), caller=caller)

    async def close(self) -> None:
        await self._rpc.close()

    def load(self) -> NodeLoad:
        return NodeLoad()

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        raise UnsupportedError(f"{method} is not a stream of events")

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        await serve_events(self._tail, unpack(body, EventQuery), project_seen(caller), stream, self._now)
