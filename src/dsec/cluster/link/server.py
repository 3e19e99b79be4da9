"""The node's side: it listens, and serves who shows an API replica's certificate; other nodes for links alone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec

from dsec.cluster.certificates import API_NAME, node_named
from dsec.cluster.link.bodies import Assembly, check_size, send_body
from dsec.cluster.link.connection import Connection
from dsec.cluster.link.stream import LinkStream
from dsec.cluster.rpc import told
from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    DsecError,
    ForbiddenError,
    HostError,
    NodeRetiredError,
    Outcome,
    ProtocolError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import NodeId
from dsec.core.limits import (
    LINK_BODIES_BYTES_MAX,
    LINK_CALLS_MAX,
    LINK_CONNECT_S,
    LINKS_MAX,
    NODE_STREAMS_MAX,
    PEER_CONNECTIONS_MAX,
    PEER_DIAL_BYTES_MAX,
    PEER_FRAME_BYTES_MAX,
    PEER_STREAMS_MAX,
    PEERS_MAX,
    PEERS_STREAMS_MAX,
    STREAM_LINGER_S,
)
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
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
from dsec.wire.node import Caller, Method, NodeService, Stream
from dsec.wire.peers import PEER_LINK

log = get_logger(__name__)

_BACKLOG: Final = 256
_METHODS: Final = {str(method): method for method in Method}


class Peers(Protocol):
    """Who serves other nodes."""

    async def serve(self, peer: NodeId, body: bytes, stream: Stream) -> None:
        """`peer` has shown the certificate of that node; all else is its word."""
        ...


class NodeListener:
    """Serves `service` on TCP, to any number of API replicas, until `close`."""

    def __init__(
        self,
        service: NodeService,
        node: NodeId,
        *,
        tls: ssl.SSLContext,
        term: Callable[[], int],
        peers: Peers | None = None,
    ) -> None:
        """`peers`: for other nodes; None: they are refused."""
        self.peers = peers
        self.service = service
        self.node = node
        self.term = term
        self.links: set[_Link] = set()
        self.incomplete_bytes = 0  # of bodies on their way in
        self._tls = tls
        self._made = 0
        self._server: asyncio.Server | None = None

    @property
    def streams_open(self) -> int:
        return sum(len(link.streams) for link in self.links)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Where it listens. Raises HostError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._connection,
                host,
                port,
                ssl=self._tls,
                ssl_handshake_timeout=LINK_CONNECT_S,
                backlog=_BACKLOG,
                reuse_address=True,
            )
        except OSError as error:
            raise HostError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", hint="node.listen says where"
            ) from error
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self, *, grace_s: float = 0.0) -> None:
        """New work is refused, what is under way gets its grace; then it ends, and the callers are told."""
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.connection.send(Kind.BYE, 0)
        under_way = [task for link in self.links for task in link.tasks]
        if under_way and grace_s > 0:
            await asyncio.wait(under_way, timeout=grace_s)
        for link in list(self.links):
            await link.end("the node is stopping")

    def of_peers(self) -> list[_Link]:
        """The oldest first."""
        return sorted((link for link in self.links if link.peer is not None), key=lambda link: link.number)

    def _connection(self) -> Connection:
        self._made += 1
        return _Link(self, self._made).connection


class _Link:
    """One API replica's connection, or one of another node: `peer`."""

    def __init__(self, listener: NodeListener, number: int) -> None:
        self._listener = listener
        self.number = number
        self.peer: NodeId | None = None
        self.connection = Connection(self._received, self._lost, self._made)
        self.streams: dict[int, LinkStream] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._incoming: dict[int, tuple[CallHead, Assembly]] = {}
        self._greeted = False
        self._hurry: asyncio.TimerHandle | None = None

    async def end(self, why: str) -> None:
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks))
        self.connection.close(why)

    def _made(self) -> None:
        self._listener.links.add(self)
        self._hurry = asyncio.get_running_loop().call_later(LINK_CONNECT_S, self._silent)

    # -- packets -----------------------------------------------------------------------------------

    def _received(self, found: Packet) -> None:
        if not self._greeted:
            self._greet(found)
            return
        match found.kind:
            case Kind.CALL:
                self._begin(found.id, found.body)
            case Kind.PART:
                self._go_on(found.id, found.body)
            case Kind.CANCEL:
                self._drop(found.id)
                if (call := self._calls.get(found.id)) is not None:
                    call.cancel()
            case Kind.FRAME | Kind.CREDIT | Kind.CLOSE:
                # One that is not known has ended here, and the other side will hear of it.
                if (stream := self.streams.get(found.id)) is not None:
                    stream.take(found.kind, found.body)
            case _:
                raise ProtocolError(f"a packet of kind {found.kind}")

    def _greet(self, found: Packet) -> None:
        if found.kind != Kind.HELLO:
            raise ProtocolError("the connection did not begin with HELLO")
        listener = self._listener
        hello = unpack(found.body, Hello)
        names = self.connection.peer_names()
        try:
            if API_NAME not in names:
                self.peer = self._peer_of(names)
            if hello.node != listener.node:
                raise NodeRetiredError(f"node {hello.node} is not here any more")
            generation = min(hello.high, GENERATION_MAX)
            if generation < max(hello.low, GENERATION_MIN):
                raise UnsupportedError(
                    f"the API speaks generations {hello.low} to {hello.high}, and this node "
                    f"{GENERATION_MIN} to {GENERATION_MAX}",
                    hint="update the older one",
                )
            self._check_room()
        except DsecError as error:
            log.warning("a connection was refused", peer=self.connection.peer(), error=error.message)
            self.connection.send(Kind.FAIL, 0, pack(Failed(body_of(error))))
            self.connection.close(error.message)
            return
        self._greeted = True
        self._calm()
        self.connection.send(Kind.WELCOME, 0, pack(Welcome(generation, listener.node, listener.term())))

    def _peer_of(self, names: frozenset[str]) -> NodeId:
        """Another node's certificate has one name. Raises ForbiddenError."""
        peer = node_named(next(iter(names))) if len(names) == 1 else None
        if self._listener.peers is None or peer is None or peer == self._listener.node:
            raise ForbiddenError(
                f"only API replicas and nodes with links to this one are served, and this is "
                f"{', '.join(sorted(names)) or 'nobody'}"
            )
        return peer

    def _check_room(self) -> None:
        """Nodes take no places of replicas. Raises CapacityError."""
        links = self._listener.of_peers()
        if self.peer is None:
            if len(self._listener.links) - len(links) > LINKS_MAX:
                raise CapacityError(f"the node has {LINKS_MAX} connections", retry_after_s=1.0)
            return
        own = [link for link in links if link.peer == self.peer and link is not self]
        if len(own) >= PEER_CONNECTIONS_MAX:
            own[0].connection.abort("its node has come again")
        if len(links) > PEERS_MAX:
            raise CapacityError(f"the node has {PEERS_MAX} connections to other nodes", retry_after_s=1.0)

    def _begin(self, id: int, body: bytes) -> None:
        packed, first = split_head(body)
        head = unpack(packed, CallHead)
        if self.peer is not None and max(head.size, len(packed)) > PEER_DIAL_BYTES_MAX:
            raise ProtocolError(f"a node asks with {head.size} bytes")
        if id in self._calls or id in self.streams or id in self._incoming:
            raise ProtocolError(f"id {id} is in use")
        assembly = Assembly(head.size)
        if assembly.add(first):
            self._start(id, head, assembly.body())
            return
        if self.peer is not None:
            raise ProtocolError("a node asks in parts")
        if self._listener.incomplete_bytes + head.size > LINK_BODIES_BYTES_MAX:
            # Its parts find no call, and are dropped.
            self._fail(id, CapacityError("the node takes in too much at once", retry_after_s=1.0))
            return
        self._listener.incomplete_bytes += head.size
        self._incoming[id] = (head, assembly)

    def _go_on(self, id: int, part: bytes) -> None:
        found = self._incoming.get(id)
        if found is None:
            return
        head, assembly = found
        if assembly.add(part):
            self._drop(id)
            self._start(id, head, assembly.body())

    def _drop(self, id: int) -> None:
        if (found := self._incoming.pop(id, None)) is not None:
            self._listener.incomplete_bytes -= found[0].size

    # -- work --------------------------------------------------------------------------------------

    def _start(self, id: int, head: CallHead, body: bytes) -> None:
        if self.peer is not None:
            self._start_of_peer(self.peer, id, head, body)
            return
        method = _METHODS.get(head.method)
        if method is None:
            self._fail(id, UnsupportedError(f"this node does not know {head.method[:40]}", hint="update it"))
        elif head.stream and len(self.streams) >= NODE_STREAMS_MAX:
            self._fail(id, CapacityError(f"the node has {NODE_STREAMS_MAX} streams open", retry_after_s=1.0))
        elif not head.stream and len(self._calls) >= LINK_CALLS_MAX:
            self._fail(id, CapacityError(f"the node has {LINK_CALLS_MAX} calls under way", retry_after_s=1.0))
        elif head.stream:
            stream = self.streams[id] = LinkStream(self.connection, id, lambda: self._ended(id))
            service, caller = self._listener.service, _far(head.caller)
            self._spawn(
                self._serve(lambda: service.serve_stream(method, body, stream, caller=caller), method, stream),
                f"stream {method}",
            )
        else:
            self._calls[id] = self._spawn(self._call(id, method, head, body), f"call {method}")
            self._calls[id].add_done_callback(lambda _: self._calls.pop(id, None))

    def _start_of_peer(self, peer: NodeId, id: int, head: CallHead, body: bytes) -> None:
        """Whatever it asks for: links are all there is for it."""
        if self.connection.behind:
            raise ProtocolError("a node asks, and does not take what it is answered")
        links = self._listener.of_peers()
        own = sum(len(link.streams) for link in links if link.peer == peer)
        if head.method != PEER_LINK or not head.stream or self._listener.peers is None:
            self._fail(id, ForbiddenError("nodes are served links, and nothing else"))
        elif own >= PEER_STREAMS_MAX or sum(len(link.streams) for link in links) >= PEERS_STREAMS_MAX:
            self._fail(id, CapacityError("the node has too many links to other nodes open", retry_after_s=1.0))
        else:
            stream = LinkStream(self.connection, id, lambda: self._ended(id), frame_bytes_max=PEER_FRAME_BYTES_MAX)
            self.streams[id] = stream
            peers = self._listener.peers
            self._spawn(self._serve(lambda: peers.serve(peer, body, stream), PEER_LINK, stream), "link")

    def _ended(self, id: int) -> None:
        self.streams.pop(id, None)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _call(self, id: int, method: Method, head: CallHead, body: bytes) -> None:
        service = self._listener.service
        try:
            try:
                async with asyncio.timeout(head.timeout_s) as limit:
                    answer = await service.call(
                        method, body, caller=_far(head.caller), key=head.key, timeout_s=head.timeout_s
                    )
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise DeadlineError(f"{method} was not done within {head.timeout_s:g} s") from error
            check_size(answer)
        except asyncio.CancelledError:
            self._fail(id, UnavailableError("the node has ended the call", outcome=Outcome.UNKNOWN))
            raise
        except DsecError as error:
            self._fail(id, error)
        except Exception as error:
            self._fail(id, told(error, method))
        else:
            packed = pack(AnswerHead(len(answer), service.load()))
            await send_body(self.connection, Kind.ANSWER, id, packed, answer)

    async def _serve(self, work: Callable[[], Coroutine[Any, Any, None]], method: str, stream: LinkStream) -> None:
        lingering = asyncio.create_task(self._linger(stream, asyncio.current_task()), name="lingering")
        error: BaseException | None = None
        try:
            await work()
        except asyncio.CancelledError:
            error = UnavailableError("the node has ended the stream")
            raise
        except DsecError as failure:
            error = failure
        except Exception as failure:
            error = told(failure, method)
        finally:
            lingering.cancel()
            stream.shut(error)

    async def _linger(self, stream: LinkStream, work: asyncio.Task[None] | None) -> None:
        """Once the caller has closed: a moment for what it had sent, and then the work ends."""
        await stream.other_side()
        await asyncio.sleep(STREAM_LINGER_S)
        if work is not None:
            work.cancel()

    def _fail(self, id: int, error: DsecError) -> None:
        load = None if self.peer is not None else self._listener.service.load()
        self.connection.send(Kind.FAIL, id, pack(Failed(body_of(error), load)))

    # -- the end -----------------------------------------------------------------------------------

    def _silent(self) -> None:
        self.connection.abort("it did not say who it is")

    def _calm(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()

    def _lost(self, why: str) -> None:
        self._calm()
        self._listener.links.discard(self)
        for id in list(self._incoming):
            self._drop(id)
        for task in list(self.tasks):
            task.cancel()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.end(UnavailableError(f"the connection to the API is lost: {why}"))


def _far(caller: Caller) -> Caller:
    """Who comes from another machine names no files of this one."""
    return msgspec.structs.replace(caller, local=False) if caller.local else caller
