"""Links from node to node: this one asks others, and looks up what others may ask of it.

A node may have been broken out to. So nothing counts that it says: who it is, its certificate tells; which members are
on it, and which ports they may reach, replicas have written down, and tell (`cluster.rosters`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from dsec.cluster.rosters import AGAIN_S, Rosters
from dsec.core.errors import DsecError, ForbiddenError, NotFoundError, ProtocolError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import GROUP_FRESH_S, PEER_IDLE_S
from dsec.observe.logs import get_logger
from dsec.wire.cluster import GroupPlaces, OwnGroup
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Frame
from dsec.wire.node import Caller, Stream
from dsec.wire.peers import PEER_LINK, LinkDial

log = get_logger(__name__)

_NOBODY: Final = Caller(principal="node", project="/")  # a peer looks at no caller
_LOOK_S: Final = GROUP_FRESH_S  # between two looks whether what is connected may be yet
_WARN_S: Final = 60.0  # apart, of one node


class Here(Protocol):
    """The links of the sandboxes of this node."""

    def has(self, dial: LinkDial) -> bool:
        """Whether the member that is meant is here."""
        ...

    async def answer(self, dial: LinkDial, stream: Stream) -> None:
        """Connects, and relays until both sides have ended. Raises DsecError."""
        ...


class Opens(Protocol):
    """Connections to other nodes, which prove who they are."""

    async def open(self, node: NodeId, method: str, body: bytes, *, caller: Caller) -> Stream: ...

    def drop(self, node: NodeId) -> None: ...


class PeerLinks:
    def __init__(self, node: NodeId, rosters: Rosters, rpc: Opens, here: Here) -> None:
        self._node = node
        self._rosters = rosters
        self._rpc = rpc
        self._here = here
        self._open: Counter[NodeId] = Counter()  # streams of ours
        self._idle: dict[NodeId, asyncio.TimerHandle] = {}
        self._warned: dict[NodeId, float] = {}

    def close(self) -> None:
        for timer in self._idle.values():
            timer.cancel()
        self._idle.clear()

    # -- asking ------------------------------------------------------------------------------------

    async def dial(self, dial: LinkDial) -> Stream:
        """To the node of the member that is meant. The caller closes it. Raises DsecError."""
        group = _group_of(dial)
        places = await self._rosters.of(group)
        if _leads_to(places, dial) in (None, self._node):
            # It may have been placed anew a moment ago.
            places = await self._rosters.of(group, fresh_s=AGAIN_S)
        node = _leads_to(places, dial)
        if node is None or node == self._node:
            raise NotFoundError(f"{dial.target} of group {dial.job} is on no other node")
        self._begin(node)
        try:
            stream = await self._rpc.open(node, PEER_LINK, pack(dial), caller=_NOBODY)
        except BaseException as error:
            self._end(node)
            if isinstance(error, UnavailableError):
                await self._rosters.of(group, fresh_s=AGAIN_S)  # the next one finds it where it is
            raise
        return _Counted(stream, lambda: self._end(node))

    def _begin(self, node: NodeId) -> None:
        self._open[node] += 1
        if (timer := self._idle.pop(node, None)) is not None:
            timer.cancel()

    def _end(self, node: NodeId) -> None:
        self._open[node] -= 1
        if self._open[node] <= 0:
            del self._open[node]
            self._idle[node] = asyncio.get_running_loop().call_later(PEER_IDLE_S, self._drop, node)

    def _drop(self, node: NodeId) -> None:
        self._idle.pop(node, None)
        self._rpc.drop(node)

    # -- asked -------------------------------------------------------------------------------------

    async def serve(self, peer: NodeId, body: bytes, stream: Stream) -> None:
        """`link.server.Peers`."""
        try:
            dial = unpack(body, LinkDial)
            # First what is known here, so that no node has replicas asked for what it has made up.
            if not self._here.has(dial):
                raise _not_allowed()
            for fresh_s in (GROUP_FRESH_S, AGAIN_S):
                if self._may(peer, dial, await self._rosters.of(_group_of(dial), fresh_s=fresh_s)):
                    break
            else:
                raise _not_allowed()
        except (ForbiddenError, ProtocolError) as error:
            self._warn(peer, error)
            raise _not_allowed() from error
        answering = asyncio.ensure_future(self._here.answer(dial, stream))
        try:
            while not answering.done():
                await asyncio.wait({answering}, timeout=_LOOK_S)
                if not answering.done() and not await self._still_may(peer, dial):
                    raise _not_allowed()
            answering.result()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _still_may(self, peer: NodeId, dial: LinkDial) -> bool:
        """What is connected outlives replicas that are away, and not that the node is none of the cluster any more."""
        try:
            return self._may(peer, dial, await self._rosters.of(_group_of(dial)))
        except UnavailableError:
            return True
        except DsecError:
            return False

    def _may(self, peer: NodeId, dial: LinkDial, places: GroupPlaces) -> bool:
        """The member that asks is on the node that asks, and has that link to a member that is here."""
        return places.nodes.get(dial.source) == peer and _leads_to(places, dial) == self._node

    def _warn(self, peer: NodeId, error: DsecError) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._warned.get(peer, now):
            self._warned[peer] = now + _WARN_S
            log.warning("a node has asked for a link that is not its own", peer=peer, error=error.message)


class _Counted:
    """A stream of which it is told when it is closed."""

    def __init__(self, stream: Stream, closed: Callable[[], None]) -> None:
        self._stream = stream
        self._closed: Callable[[], None] | None = closed

    async def send(self, frame: Frame) -> None:
        await self._stream.send(frame)

    async def recv(self) -> Frame | None:
        return await self._stream.recv()

    async def close(self, error: BaseException | None = None) -> None:
        closed, self._closed = self._closed, None
        try:
            await self._stream.close(error)
        finally:
            if closed is not None:
                closed()


def _group_of(dial: LinkDial) -> OwnGroup:
    return OwnGroup(project=dial.project, name=dial.job, id=dial.id)


def _leads_to(places: GroupPlaces, dial: LinkDial) -> NodeId | None:
    """The node that the link of the member that asks leads to; None: it has no such link."""
    if (dial.target, dial.port) not in places.links.get(dial.source, ()):
        return None
    node = places.nodes.get(dial.target)
    return None if node is None else NodeId(node)


def _not_allowed() -> ForbiddenError:
    """One answer to all that is wrong: it tells nothing of what there is."""
    return ForbiddenError("there is no such link to this node")
