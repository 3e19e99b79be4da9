"""Writes for nodes what is their own: replicas and watchers serve this, and nodes have no rights with the engine.

The engine answers to any subject that an asker names, those that it keeps included, so who may ask it for anything may
write anywhere. Here an answer goes to the asker's own inbox or nowhere, and what is written is looked at before.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from nats.aio.msg import Msg

from dsec.cluster.directory import Address
from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine
from dsec.cluster.engine.intake import Intake
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.log import LogStream, node_subject
from dsec.cluster.members.nodes import NodeState
from dsec.cluster.registry import Bucket, key_of
from dsec.core.errors import (
    DsecError,
    ForbiddenError,
    InvalidArgumentError,
    NodeRetiredError,
    Outcome,
    UnavailableError,
)
from dsec.core.ids import NodeId, parse_node_id
from dsec.core.limits import (
    DESK_ASKED_MAX,
    DESK_EVENTS_BYTES_S,
    DESK_MESSAGES_BURST,
    DESK_MESSAGES_S,
    DESK_WAITING_MAX,
    EVENTS_NODE_BYTES_MAX,
    NODE_MESSAGE_BYTES_MAX,
)
from dsec.observe.logs import get_logger
from dsec.wire.cluster import (
    Card,
    GroupPlaces,
    Member,
    OwnEvents,
    OwnGroup,
    OwnKey,
    OwnWrite,
    Told,
    ruling_key,
)
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
from dsec.wire.groups import Across, GroupNote
from dsec.wire.jobs import JobRow, JobState

log = get_logger(__name__)

_GROUP: Final = "desk"
_SERVE_S: Final = 5.0  # then who asked has asked again: under the same id, so what was half done is done once
_RECORD_BYTES: Final = 512  # of a record, whatever is in it
_WARN_S: Final = 60.0  # apart, of one node: what it does wrong it can do all the time
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")  # it goes into a header
_KINDS: Final[dict[Bucket, type[Card] | type[Member]]] = {Bucket.NODES: Card, Bucket.MEMBERS: Member}


def _nowhere(node: NodeId) -> Address:
    raise UnavailableError(f"nobody says where node {node} is")


class NodeDesk:
    def __init__(
        self,
        engine: Engine,
        *,
        retired: Callable[[NodeId], bool],
        members: Callable[[], Iterable[NodeId]] = tuple,
        flooded: Callable[[NodeId], None] = lambda _: None,
        address: Callable[[NodeId], Address] = _nowhere,
    ) -> None:
        """`members` and `flooded`: see `Intake`; `address`: as of a `Directory`."""
        self._engine = engine
        self._registry = EngineRegistry(engine)
        self._log = EngineLog(engine)
        self._retired = retired
        self._address = address
        layout = engine.layout
        self._intakes = [
            Intake(
                engine,
                subject,
                self._heard,
                members=members,
                rate=DESK_MESSAGES_S,
                burst=DESK_MESSAGES_BURST,
                bytes_max=NODE_MESSAGE_BYTES_MAX,
                waiting_max=DESK_WAITING_MAX,
                queue=queue,
                flooded=flooded,
            )
            for subject, queue in ((layout.desk, _GROUP), (layout.desks, ""))
        ]
        self._asked: Counter[str] = Counter()  # under way, of each node
        self._told_bytes: dict[NodeId, tuple[float, float]] = {}  # of events, less what its time allows; as of when
        self._warned: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        for intake in self._intakes:
            await intake.open()

    async def close(self) -> None:
        for intake in self._intakes:
            await intake.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, node: NodeId, message: Msg) -> None:
        if not self._answers(node, message.reply):
            now = asyncio.get_running_loop().time()
            if now >= self._warned.get(node, now):
                self._warned[node] = now + _WARN_S
                log.warning("a node wants its answer to go elsewhere", node=node, to=message.reply[:200])
            return
        if self._asked[node] >= DESK_ASKED_MAX:
            return  # it does not wait for its answers; who does asks again
        self._asked[node] += 1
        task = asyncio.create_task(self._serve(node, message), name="for a node")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answers(self, node: str, reply: str) -> bool:
        return reply.startswith(f"{self._engine.layout.inbox(node)}.")

    async def _serve(self, node: NodeId, message: Msg) -> None:
        try:
            told = await self._told(node, message.data)
            await self._engine.tell(message.reply, pack(told))
        finally:
            self._asked[node] -= 1
            if not self._asked[node]:
                del self._asked[node]

    async def _told(self, node: str, body: bytes) -> Told:
        try:
            async with asyncio.timeout(_SERVE_S):
                return await self._do(parse_node_id(node), unpack(body, OwnKey | OwnWrite | OwnEvents | OwnGroup))  # type: ignore[arg-type]
        except TimeoutError:
            return Told(error=body_of(UnavailableError("the engine does not answer now", outcome=Outcome.UNKNOWN)))
        except DsecError as error:
            return Told(error=body_of(error))
        except Exception as error:
            log.error("what a node asked for failed", node=node, exc_info=True)
            return Told(error=body_of(error))

    async def _do(self, node: NodeId, ask: OwnKey | OwnWrite | OwnEvents | OwnGroup) -> Told:
        if isinstance(ask, OwnKey):
            return await self._read(node, ask)
        if self._retired(node):
            raise NodeRetiredError(f"node {node} has been retired")
        if isinstance(ask, OwnGroup):
            return Told(value=pack(await self._places(node, ask)), revision=1)
        if not _ID.match(ask.id):
            raise InvalidArgumentError(f"{ask.id[:80]!r} is not an id of a write")
        # The engine takes each id once, whoever writes it: by this a node's are its own.
        id = f"{node}-{ask.id}"
        if isinstance(ask, OwnEvents):
            self._charge(node, len(ask.body) + _RECORD_BYTES)
            return Told(revision=await self._log.append(LogStream.EVENTS, node_subject(node), ask.body, id=id))
        return Told(revision=await self._write(node, ask, id))

    def _charge(self, node: NodeId, size: int) -> None:
        """The log is of all nodes and gives up what is oldest: one alone is not to fill it. Who was away has all that
        it has kept to tell."""
        now = asyncio.get_running_loop().time()
        told, at = self._told_bytes.get(node, (0.0, now))
        told = max(0.0, told - (now - at) * DESK_EVENTS_BYTES_S) + size
        if told > EVENTS_NODE_BYTES_MAX:
            raise UnavailableError(f"node {node} tells too much at once", outcome=Outcome.UNCHANGED, retry_after_s=1.0)
        self._told_bytes[node] = (told, now)

    async def _read(self, node: NodeId, ask: OwnKey) -> Told:
        bucket = _bucket(ask.bucket)
        ruling = (bucket, ask.key) == (Bucket.MEMBERS, ruling_key(node))  # by which one that was retired knows it
        if self._retired(node) and not ruling:
            raise NodeRetiredError(f"node {node} has been retired")
        if ask.key != node and not ruling:
            raise ForbiddenError(f"node {node} may not read {bucket}/{ask.key[:80]}")
        entry = await self._registry.get(bucket, ask.key)
        return Told() if entry is None else Told(value=entry.value, revision=entry.revision)

    async def _places(self, node: NodeId, ask: OwnGroup) -> GroupPlaces:
        """Of links with an end on `node`. Of nodes that are lost or have left nothing is told, and to them neither."""
        entry = await self._registry.get(Bucket.JOBS, key_of(ask.project, ask.name))
        row = None if entry is None else unpack(entry.value, JobRow)
        note = None if row is None or row.id != ask.id or row.state is JobState.STOPPED else row.group
        found = None if note is None else places_for(node, note, self._address)
        if found is None:
            raise ForbiddenError(f"node {node} has nothing of such a group")
        return found

    async def _write(self, node: NodeId, ask: OwnWrite, id: str) -> int:
        bucket = _bucket(ask.bucket)
        if unpack(ask.value, _KINDS[bucket]).node != node:
            raise ForbiddenError(f"node {node} says that it is another")
        if ask.revision is None:
            return await self._registry.create(bucket, node, ask.value, ttl_s=ask.ttl_s, id=id)
        if ask.revision < 1:
            raise InvalidArgumentError("a revision is above 0")
        return await self._registry.update(bucket, node, ask.value, revision=ask.revision, ttl_s=ask.ttl_s, id=id)


def places_for(node: NodeId, note: GroupNote, address: Callable[[NodeId], Address]) -> GroupPlaces | None:
    """None: it has nothing of the group, or is none of the cluster now."""
    own = {member for member, place in note.nodes.items() if place == node}
    links: Across = {}
    for source, targets in note.across.items():
        if kept := targets if source in own else [link for link in targets if link[0] in own]:
            links[source] = kept
    members = own | {name for source, targets in links.items() for name in (source, *(link[0] for link in targets))}
    addresses: dict[str, tuple[str, int, int]] = {}
    there: set[str] = set()
    for place in {note.nodes[member] for member in members}:
        try:
            host, port, term = address(NodeId(place))
        except DsecError as error:
            if error.detail.get("node_state") == NodeState.AWAY:
                there.add(place)  # where it is this replica has not heard yet; it is a member all the same
            continue
        there.add(place)
        addresses[place] = (host, port, term)
    if node not in there:
        return None
    nodes = {member: note.nodes[member] for member in members if note.nodes[member] in there}
    return GroupPlaces(nodes=nodes, links=links, addresses=addresses)


def _bucket(name: str) -> Bucket:
    for bucket in _KINDS:
        if name == bucket:
            return bucket
    raise ForbiddenError(f"nodes have no keys in {name[:80]!r}")
