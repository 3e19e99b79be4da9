"""What is told of sandboxes whose node is lost, or has left for good: for a day what they were, and that they are gone.

The watcher writes it, from what the node had told of them in the log of events; replicas answer by it in place of the
node, and to those alone who might have asked there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from dsec.cluster.events import events_of
from dsec.cluster.log import Log, LogStream, node_subject, verdict_subject
from dsec.cluster.members.nodes import Nodes, NodeState, NodeView
from dsec.cluster.publishing import batches
from dsec.cluster.registry import Bucket, Registry, key_of
from dsec.cluster.rpc import Rpc
from dsec.core.clock import Clock
from dsec.core.errors import NodeRetiredError, ProtocolError, SandboxNotFoundError
from dsec.core.ids import NodeId
from dsec.core.limits import REGISTRY_VALUE_BYTES_MAX, TOMBSTONE_TTL_S, TOMBSTONES_OF_NODE_MAX
from dsec.core.states import ENDED, EndCause, SandboxState
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.cursors import Place, decode_cursor, encode_cursor
from dsec.wire.errors import gone_error
from dsec.wire.events import ENDS, Event, EventKind, Events
from dsec.wire.node import Caller, Method, Stream, project_seen, reaches
from dsec.wire.records import ListQuery, NodeLoad, Sandbox, SandboxPage

log = get_logger(__name__)

_RECORDS_READ: Final = 32  # at once: each may have 128 KiB
_WRITES_AT_ONCE: Final = 32
_TOLD: Final = frozenset((Method.GET, Method.DESTROY))  # of one that has ended, too


class Living:
    """What there is of one node's, after all that it has told in order: of each its last event, with its figures. Of
    too many those that were told of last, which are the likeliest to be asked for."""

    def __init__(self) -> None:
        self.found: dict[str, Event] = {}
        self._last = 0

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.sandbox is None or event.number <= self._last:
                continue  # of nothing that lives, or told again
            self._last = event.number
            before = self.found.pop(event.sandbox, None)
            if event.kind not in ENDS:
                made = event.made or (None if before is None else before.made)
                self.found[event.sandbox] = msgspec.structs.replace(event, made=made)
                if len(self.found) > TOMBSTONES_OF_NODE_MAX:
                    del self.found[next(iter(self.found))]


def tombstone_of(event: Event, cause: EndCause, at: float) -> Sandbox:
    made = event.made  # None: its beginning is not in the log any more
    return Sandbox(
        id=event.sandbox or "",
        state=str(SandboxState.FAILED),
        node=event.node,
        substrate=event.substrate or "",
        environment=event.environment or "",
        project=event.project or "",
        created_at=event.at if made is None else made.created_at,
        cpu=0.0 if made is None else made.cpu,
        memory_bytes=0 if made is None else made.memory_bytes,
        pids_max=0 if made is None else made.pids_max,
        network="none" if made is None else made.network,
        disk_bytes=None if made is None else made.disk_bytes,
        name=event.name,
        labels=event.labels,
        incarnation=event.incarnation,
        job=event.job,
        ended_at=at,
        cause=str(cause),
    )


def _end_of(event: Event, cause: EndCause, at: float) -> Event:
    """Of its last event what it is, and nothing of what had happened then."""
    kept = (
        "node",
        "sandbox",
        "project",
        "name",
        "labels",
        "substrate",
        "environment",
        "incarnation",
        "principal",
        "job",
    )
    what = {name: getattr(event, name) for name in kept}
    return Event(kind=str(EventKind.FAILED), at=at, cause=str(cause), **what)


async def bury(registry: Registry, events: Log, view: NodeView, cause: EndCause, at: float, *, word: str) -> int:
    """Of all that the node had: tombstones, then the events of their ends. How many. Safe to do again, with the same
    `word`, which no node can foresee: the log takes each id once, whoever writes it.

    Raises UnavailableError, StorageError.
    """
    living = Living()
    after = 0
    while records := await events.read(LogStream.EVENTS, node_subject(view.id), after=after, limit=_RECORDS_READ):
        after = records[-1].sequence
        for record in records:
            living.take(events_of(record))
    # What no sandbox can have, and what could not be written, is passed over: it must not hold the others up.
    found = [event for event in living.found.values() if len(pack(event)) <= REGISTRY_VALUE_BYTES_MAX // 2]
    left = sorted(found, key=lambda event: event.number)
    turn = asyncio.Semaphore(_WRITES_AT_ONCE)

    async def write(event: Event) -> None:
        async with turn:
            body = pack(tombstone_of(event, cause, at))
            key = key_of(view.id, event.sandbox or "")
            await registry.put(Bucket.SANDBOXES, key, body, ttl_s=TOMBSTONE_TTL_S)

    async with asyncio.TaskGroup() as group:
        for event in left:
            group.create_task(write(event))
    ends = [_end_of(event, cause, at) for event in left]
    term = 0 if view.member is None else view.member.term
    for number, batch in enumerate(batches(ends)):
        id = f"{word}-{cause}-{view.id}-{term}-{number}"
        await events.append(LogStream.EVENTS, verdict_subject(view.id), pack(Events(tuple(batch))), id=id)
    return len(left)


def cause_of(view: NodeView, now: float) -> EndCause | None:
    """Why what the node had is gone; None: it is not, or nobody has said so yet."""
    state = view.state(now)
    if state == NodeState.RETIRED:
        return EndCause.NODE_RETIRED
    return EndCause.NODE_LOST if state == NodeState.LOST and view.buried else None


class _Named(msgspec.Struct, frozen=True):
    """Of any request that is about one sandbox."""

    id: str | None = None
    sandbox: str | None = None


class TombstoneRpc:
    """An Rpc that answers for nodes which are gone (`cluster.rpc.Rpc`)."""

    def __init__(self, rpc: Rpc, nodes: Nodes, registry: Registry, clock: Clock) -> None:
        self._rpc = rpc
        self._nodes = nodes
        self._registry = registry
        self._clock = clock

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        cause = self._cause(node)
        if cause is None:
            return await self._rpc.call(node, method, body, caller=caller, timeout_s=timeout_s, key=key)
        if method == Method.LIST:
            return pack(await self._list(node, unpack(body, ListQuery), caller))
        if method in (Method.CREATE, Method.CREATE_MANY):
            raise _gone(node, cause, None)  # what was made there for this key is gone, so it is made elsewhere
        id = _sandbox_in(body)
        if id is None:  # of the node itself, which may come back
            return await self._rpc.call(node, method, body, caller=caller, timeout_s=timeout_s, key=key)
        sandbox = await self._find(node, id, caller, cause)
        if method in _TOLD:
            return pack(sandbox)
        raise gone_error(sandbox)

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        cause, id = self._cause(node), _sandbox_in(body)
        if cause is None or id is None:
            return await self._rpc.open(node, method, body, caller=caller)
        raise gone_error(await self._find(node, id, caller, cause))

    def load(self, node: NodeId) -> NodeLoad | None:
        return self._rpc.load(node)

    async def close(self) -> None:
        await self._rpc.close()

    def _cause(self, node: NodeId) -> EndCause | None:
        view = self._nodes.find(node)
        return None if view is None or view.member is None else cause_of(view, self._clock.monotonic_s())

    async def _find(self, node: NodeId, id: str, caller: Caller, cause: EndCause) -> Sandbox:
        """Raises SandboxNotFoundError for one of another project, NodeRetiredError when nothing is known of it."""
        entry = await self._registry.get(Bucket.SANDBOXES, key_of(node, id))
        if entry is None:
            raise _gone(node, cause, id)
        sandbox = unpack(entry.value, Sandbox)
        if not reaches(project_seen(caller), sandbox.project):
            raise SandboxNotFoundError(f"no sandbox {id}", sandbox=id)
        return sandbox

    async def _list(self, node: NodeId, query: ListQuery, caller: Caller) -> SandboxPage:
        """All in one page: a node has no more of them than a few pages."""
        if not query.states or not ENDED.intersection(query.states):
            return SandboxPage()
        entries = await self._registry.entries(Bucket.SANDBOXES, key_of(node))
        return _page([unpack(entry.value, Sandbox) for entry in entries], query, project_seen(caller))


def _page(sandboxes: Sequence[Sandbox], query: ListQuery, seen: str | None) -> SandboxPage:
    after = None if query.cursor is None else decode_cursor(query.cursor)
    found = [
        (Place(one.created_at, one.id), one)
        for one in sandboxes
        if reaches(seen, one.project)
        and one.state in query.states
        and query.name in (None, one.name)
        and query.job in (None, one.job)
        and all(one.labels.get(key) == value for key, value in query.labels.items())
    ]
    left = sorted((item for item in found if after is None or item[0] > after), key=lambda item: item[0])
    shown = [one for _, one in left[: query.limit]]
    more = len(left) > query.limit
    return SandboxPage(shown, encode_cursor(left[query.limit - 1][0]) if more else None)


def _gone(node: NodeId, cause: EndCause, sandbox: str | None) -> NodeRetiredError:
    text = "has left for good" if cause is EndCause.NODE_RETIRED else "was declared lost"
    return NodeRetiredError(
        f"node {node} {text}, and its sandboxes with it", sandbox=sandbox, detail={"cause": str(cause)}
    )


def _sandbox_in(body: bytes) -> str | None:
    try:
        named = unpack(body, _Named)
    except ProtocolError:
        return None
    id = named.sandbox if named.sandbox is not None else named.id
    return id if id is not None and id.startswith("sbx_") else None
