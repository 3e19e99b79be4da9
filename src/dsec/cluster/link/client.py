"""The API's side: an `Rpc` that reaches every node over one connection each."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Final

from dsec.cluster.certificates import node_name
from dsec.cluster.directory import Address, Directory
from dsec.cluster.link.bodies import Assembly, check_size, send_body
from dsec.cluster.link.connection import Connection
from dsec.cluster.link.stream import LinkStream
from dsec.core.errors import CapacityError, DeadlineError, DsecError, Outcome, ProtocolError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import FRAME_BYTES_MAX, LINK_BODIES_BYTES_MAX, LINK_CONNECT_S, NODE_STREAMS_MAX, STREAM_LINGER_S
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import error_of
from dsec.wire.link import (
    GENERATION_MAX,
    GENERATION_MIN,
    AnswerHead,
    CallHead,
    Failed,
    Hello,
    Kind,
    Packet,
    Welcome,
    split_head,
)
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import NodeLoad

log = get_logger(__name__)

_RETRY_S: Final = 0.5  # after a connection that failed: who comes meanwhile is told so at once
_MARGIN_S: Final = 0.5  # the node's own deadline tells more than ours


class RemoteRpc:
    """Connects when it is first needed, and again after a loss. `heard` gets the load that comes with replies."""

    def __init__(
        self,
        directory: Directory,
        tls: ssl.SSLContext,
        *,
        heard: Callable[[NodeId, NodeLoad], None] | None = None,
        streams_max: int | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """Of one node at most `streams_max` at once (None: NODE_STREAMS_MAX), and frames of `frame_bytes_max`."""
        self._directory = directory
        self._streams_max = streams_max
        self._frame_bytes_max = frame_bytes_max
        self._tls = tls
        self._heard = heard
        self._links: dict[NodeId, _Link] = {}
        self._connecting: dict[NodeId, asyncio.Task[_Link]] = {}
        self._failed: dict[NodeId, tuple[float, DsecError]] = {}
        self._loads: dict[NodeId, NodeLoad] = {}
        self._closed = False

    @property
    def streams_open(self) -> int:
        return sum(len(link.streams) for link in self._links.values())

    def load(self, node: NodeId) -> NodeLoad | None:
        return self._loads.get(node)

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        check_size(body)
        link = self._usable(node)
        if link is None:
            loop = asyncio.get_running_loop()
            until = loop.time() + timeout_s
            link = await self._link_within(node, method, timeout_s)
            timeout_s = max(until - loop.time(), 0.001)
        head = CallHead(method=method, caller=caller, size=len(body), timeout_s=timeout_s, key=key)
        return await link.call(head, body)

    async def open(self, node: NodeId, method: str, body: bytes, *, caller: Caller) -> Stream:
        check_size(body)
        link = await self._link_within(node, method, LINK_CONNECT_S)
        most = NODE_STREAMS_MAX if self._streams_max is None else self._streams_max
        if len(link.streams) >= most:
            raise CapacityError(f"the node has {most} streams open", retry_after_s=1.0)
        return await link.open(CallHead(method=method, caller=caller, size=len(body), stream=True), body)

    async def close(self) -> None:
        """Calls and streams end; their callers see UnavailableError."""
        self._closed = True
        for task in list(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        for link in list(self._links.values()):
            link.close("this replica is stopping")

    def drop(self, node: NodeId) -> None:
        """The node has left, or moved: the connection to it is of no use any more."""
        self._failed.pop(node, None)
        self._loads.pop(node, None)
        if (link := self._links.pop(node, None)) is not None:
            link.close("the node has left")

    # -- connections -------------------------------------------------------------------------------

    async def _link_within(self, node: NodeId, method: str, timeout_s: float) -> _Link:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link(node)
        except TimeoutError as error:
            raise DeadlineError(
                f"{method} was not begun within {timeout_s:g} s: there was no connection to node {node}",
                outcome=Outcome.UNCHANGED,
            ) from error

    def _usable(self, node: NodeId) -> _Link | None:
        """The connection to where the node is now, if there is one."""
        if self._closed:
            raise UnavailableError("this replica is stopping", outcome=Outcome.UNCHANGED, retry_after_s=1.0)
        address = self._directory.address(node)
        link = self._links.get(node)
        return link if link is not None and link.usable and link.address == address else None

    async def _link(self, node: NodeId) -> _Link:
        link = self._usable(node)
        if link is not None:
            return link
        address = self._directory.address(node)
        connecting = self._connecting.get(node)
        if connecting is None:
            self._check_failed(node)
            connecting = asyncio.create_task(self._connect(node, address), name=f"connect {node}")
            self._connecting[node] = connecting
            connecting.add_done_callback(lambda task: self._connected(node, task))
        return await asyncio.shield(connecting)

    def _check_failed(self, node: NodeId) -> None:
        until, error = self._failed.get(node, (0.0, None))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise type(error)(error.message, hint=error.hint, outcome=error.outcome, retry_after_s=_RETRY_S)

    def _connected(self, node: NodeId, task: asyncio.Task[_Link]) -> None:
        self._connecting.pop(node, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._failed.pop(node, None)
            old, self._links[node] = self._links.get(node), task.result()
            if old is not None:
                old.retire()
        elif isinstance(error, DsecError):
            self._failed[node] = (asyncio.get_running_loop().time() + _RETRY_S, error)

    async def _connect(self, node: NodeId, address: Address) -> _Link:
        """Raises UnavailableError: nothing was sent."""
        link = _Link(node, address, lambda load: self._note(node, load), self._frame_bytes_max)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LINK_CONNECT_S):
                # By name, not by address: whoever answers must be this node.
                await loop.create_connection(
                    lambda: link.connection, address.host, address.port, ssl=self._tls, server_hostname=node_name(node)
                )
                await link.greet()
        except BaseException as error:
            link.connection.abort("it was not welcomed")
            if isinstance(error, TimeoutError):
                raise _unreachable(node, address, f"it did not answer within {LINK_CONNECT_S:g} s") from error
            if isinstance(error, (OSError, ValueError, OverflowError)):  # of TLS, too, or its card names no address
                raise _unreachable(node, address, getattr(error, "strerror", None) or str(error)) from error
            raise
        log.info("connected to a node", node=node, address=f"{address.host}:{address.port}")
        return link

    def _note(self, node: NodeId, load: NodeLoad) -> None:
        self._loads[node] = load
        if self._heard is not None:
            self._heard(node, load)


def _unreachable(node: NodeId, address: Address, why: str) -> UnavailableError:
    return UnavailableError(
        f"node {node} cannot be reached at {address.host}:{address.port}: {why}",
        outcome=Outcome.UNCHANGED,
        retry_after_s=_RETRY_S,
    )


class _Link:
    """The connection to one node."""

    def __init__(self, node: NodeId, address: Address, heard: Callable[[NodeLoad], None], frame_bytes_max: int) -> None:
        self.node = node
        self.address = address
        self.connection = Connection(self._received, self._lost)
        self.streams: dict[int, LinkStream] = {}
        self._heard = heard
        self._frame_bytes_max = frame_bytes_max
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, _Answer] = {}
        self._last_id = 0
        self._incomplete_bytes = 0  # of answers that came in parts, until their callers have them
        self._leaving = False

    @property
    def usable(self) -> bool:
        return not self.connection.closed and not self._leaving

    async def greet(self) -> None:
        self.connection.send(Kind.HELLO, 0, pack(Hello(GENERATION_MIN, GENERATION_MAX, self.node)))
        await self._welcome

    def close(self, why: str) -> None:
        self.connection.close(why)

    def retire(self) -> None:
        """Another has taken its place: it ends with what is under way."""
        self._leaving = True
        self._end_when_idle()

    # -- calls -------------------------------------------------------------------------------------

    async def call(self, head: CallHead, body: bytes) -> bytes:
        id = self._new_id()
        answer = self._answers[id] = _Answer()
        try:
            async with asyncio.timeout(head.timeout_s + _MARGIN_S) as limit:
                await send_body(self.connection, Kind.CALL, id, pack(head), body)
                return await answer.done
        except TimeoutError as error:
            self.connection.send(Kind.CANCEL, id)
            if not limit.expired():
                raise
            raise DeadlineError(f"{head.method} was not done within {head.timeout_s:g} s") from error
        except asyncio.CancelledError:
            self.connection.send(Kind.CANCEL, id)
            raise
        finally:
            self._answers.pop(id, None)
            self._incomplete_bytes -= answer.held
            self._end_when_idle()

    async def open(self, head: CallHead, body: bytes) -> Stream:
        id = self._new_id()
        stream = self.streams[id] = LinkStream(
            self.connection, id, lambda: self._ended(id), frame_bytes_max=self._frame_bytes_max
        )
        try:
            await send_body(self.connection, Kind.CALL, id, pack(head), body)
        except BaseException:
            stream.shut()
            raise
        return _CallerEnd(stream)

    def _new_id(self) -> int:
        if self.connection.closed:
            raise UnavailableError(f"the connection to node {self.node} is lost", outcome=Outcome.UNCHANGED)
        while True:
            self._last_id = self._last_id % 0xFFFF_FFFF + 1
            if self._last_id not in self._answers and self._last_id not in self.streams:
                return self._last_id

    def _ended(self, id: int) -> None:
        self.streams.pop(id, None)
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._leaving and not self._answers and not self.streams:
            self.connection.close("the node is stopping")

    # -- packets -----------------------------------------------------------------------------------

    def _received(self, found: Packet) -> None:
        match found.kind:
            case Kind.WELCOME:
                self._welcomed(unpack(found.body, Welcome))
            case Kind.ANSWER:
                self._answered(found.id, found.body)
            case Kind.PART:
                if (answer := self._answers.get(found.id)) is not None:
                    answer.go_on(found.body)
            case Kind.FAIL:
                self._failed(found.id, unpack(found.body, Failed))
            case Kind.FRAME | Kind.CREDIT | Kind.CLOSE:
                if (stream := self.streams.get(found.id)) is not None:
                    stream.take(found.kind, found.body)
            case Kind.BYE:
                self._leaving = True
                self._end_when_idle()
            case _:
                raise ProtocolError(f"a packet of kind {found.kind}")

    def _welcomed(self, welcome: Welcome) -> None:
        if self._welcome.done() or not GENERATION_MIN <= welcome.generation <= GENERATION_MAX:
            raise ProtocolError("a welcome that does not fit")
        if welcome.term < self.address.term:
            error = UnavailableError(
                f"the process at node {self.node}'s address is not in charge of it any more", outcome=Outcome.UNCHANGED
            )
            self._welcome.set_exception(error)
            return
        self._welcome.set_result(None)

    def _answered(self, id: int, body: bytes) -> None:
        packed, first = split_head(body)
        head = unpack(packed, AnswerHead)
        self._heard(head.load)
        if (answer := self._answers.get(id)) is not None:
            if len(first) < head.size:
                self._incomplete_bytes += head.size
                if self._incomplete_bytes > LINK_BODIES_BYTES_MAX:
                    raise ProtocolError("a node answers with too much at once")
                answer.held = head.size
            answer.begin(head.size, first)

    def _failed(self, id: int, failed: Failed) -> None:
        error = error_of(failed.error)
        if failed.load is not None:
            self._heard(failed.load)
        if id == 0 and not self._welcome.done():
            self._welcome.set_exception(error)
        elif (answer := self._answers.get(id)) is not None:
            answer.fail(error)
        elif (stream := self.streams.get(id)) is not None:
            stream.end(error)  # refused before it began

    def _lost(self, why: str) -> None:
        def lost() -> UnavailableError:
            return UnavailableError(f"the connection to node {self.node} is lost: {why}", outcome=Outcome.UNKNOWN)

        if not self._welcome.done():
            error = UnavailableError(f"node {self.node} has closed the connection", outcome=Outcome.UNCHANGED)
            self._welcome.set_exception(error)
            self._welcome.exception()  # who waits for it may be gone
        for answer in self._answers.values():
            answer.fail(lost())
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.end(lost())


class _Answer:
    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.held = 0  # of the connection's bound
        self._assembly: Assembly | None = None

    def begin(self, size: int, first: bytes) -> None:
        if self._assembly is not None:
            raise ProtocolError("two answers to one call")
        self._assembly = Assembly(size)
        self.go_on(first)

    def go_on(self, part: bytes) -> None:
        if self._assembly is None:
            raise ProtocolError("an answer that has not begun goes on")
        if self._assembly.add(part) and not self.done.done():
            self.done.set_result(self._assembly.body())

    def fail(self, error: DsecError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # who waits for it may be gone


class _CallerEnd:
    """The caller's end: closing it waits a moment for the node to end its work, which it does by itself."""

    def __init__(self, stream: LinkStream) -> None:
        self._stream = stream
        self.send = stream.send
        self.recv = stream.recv

    async def close(self, error: BaseException | None = None) -> None:
        self._stream.shut(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * STREAM_LINGER_S):
                await self._stream.other_side()
