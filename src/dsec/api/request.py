"""One request as the routes see it, and what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from dsec.api.admission import Admission
from dsec.api.bodies import Bodies
from dsec.api.connection import Inbox
from dsec.api.errors import Headers
from dsec.api.gate import Gate, caller_of
from dsec.api.keeper import Keeper
from dsec.api.openstreams import OpenStreams
from dsec.api.query import text_of
from dsec.api.routing import Found
from dsec.cluster.fleet import Fleet
from dsec.cluster.holders import named_by, the_holder
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.rpc import Rpc
from dsec.core.errors import DeadlineError, InvalidArgumentError, LimitError
from dsec.core.ids import ExecId, NodeId, SandboxId, node_of, parse_exec_id, parse_sandbox_id
from dsec.core.limits import BODY_BYTES_MAX, BODY_IDLE_S, IDEMPOTENCY_KEY_BYTES_MAX, WRITE_STALL_S
from dsec.iam.peers import Peer
from dsec.iam.principals import Principal
from dsec.iam.service import Iam
from dsec.wire.api import TYPE_JSON
from dsec.wire.codec import from_json, pack, to_json, unpack
from dsec.wire.node import Caller, Method, Stream

CALL_TIMEOUT_S: Final = 60.0  # of a unary call that waits for nothing
CALL_MARGIN_S: Final = 5.0  # beyond what the caller allows: the node's own deadline tells more than ours

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has closed the connection: there is nobody to tell."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with."""

    rpc: Rpc
    fleet: Fleet  # where creates go, and what is not about one sandbox
    iam: Iam
    gate: Gate
    keeper: Keeper
    admission: Admission
    jobs: Jobs
    orders: Orders
    version: str
    streams: OpenStreams = field(default_factory=OpenStreams)
    bodies: Bodies = field(default_factory=Bodies)


@dataclass(slots=True)
class Answer:
    body: bytes = b""
    status: int = 200
    type: str = TYPE_JSON
    headers: Headers | None = None


class Request:
    __slots__ = (
        "_caller",
        "_cut",
        "_held_bytes",
        "_inbox",
        "_send",
        "found",
        "headers",
        "id",
        "key",
        "peer",
        "principal",
        "query",
        "services",
        "started",
        "status",
    )

    def __init__(
        self,
        services: Services,
        *,
        id: str,
        headers: Headers,
        peer: Peer | None,
        inbox: Inbox | None,
        send: Send,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.services = services
        self.id = id
        self.headers = headers
        self.peer = peer
        self.found: Found | None = None
        self.query: dict[str, Any] = {}
        self.principal: Principal | None = None
        self.key: str | None = None
        self.started = False
        self.status = 0
        self._caller: Caller | None = None
        self._cut = cut
        self._held_bytes = 0
        self._inbox = inbox
        self._send = send

    # ---- what was asked --------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """`name` in lower case. The last one of several."""
        value = None
        for known, given in self.headers:
            if known == name:
                value = given
        return value

    def segment(self, name: str) -> str:
        assert self.found is not None
        return self.found.segments[name]

    @property
    def sandbox(self) -> SandboxId:
        """The id in the path. Raises InvalidArgumentError."""
        return parse_sandbox_id(self.segment("id"))

    @property
    def exec(self) -> ExecId:
        return parse_exec_id(self.segment("exec"))

    @property
    def who(self) -> Principal:
        """Of routes that need a right."""
        assert self.principal is not None
        return self.principal

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            assert self.principal is not None
            self._caller = caller_of(self.principal)
        return self._caller

    def check_key(self) -> None:
        """Takes the idempotency key from the headers. Raises InvalidArgumentError or LimitError."""
        raw = self.header(b"idempotency-key")
        if raw is None:
            return
        if len(raw) > IDEMPOTENCY_KEY_BYTES_MAX:
            raise LimitError(f"an Idempotency-Key has at most {IDEMPOTENCY_KEY_BYTES_MAX} bytes")
        text = text_of(raw, "the Idempotency-Key")
        if not text or not text.isascii() or not text.isprintable():
            raise InvalidArgumentError("an Idempotency-Key is 1 or more printable ASCII characters")
        self.key = text

    def accepts(self, media: str) -> bool:
        """Whether the Accept header names this media type."""
        accept = (self.header(b"accept") or b"").decode("latin-1")
        return any(part.partition(";")[0].strip().lower() == media for part in accept.split(","))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ClientGoneError when it is cut, DeadlineError when it stands still."""
        assert self._inbox is not None, "a WebSocket has no body"
        while True:
            try:
                if self._inbox.ready:
                    piece = await self._inbox.take()
                else:
                    async with asyncio.timeout(BODY_IDLE_S):
                        piece = await self._inbox.take()
            except TimeoutError as error:
                raise DeadlineError(f"nothing of the request's body came for {BODY_IDLE_S:g} s") from error
            if piece is None:
                raise ClientGoneError
            if not piece:
                return
            yield piece

    async def body(self) -> bytes:
        """The whole body. Raises LimitError above BODY_BYTES_MAX."""
        length = self.header(b"content-length")
        if length is not None and int(length) > BODY_BYTES_MAX:
            raise _body_too_large()
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > BODY_BYTES_MAX:
                raise _body_too_large()
            self.services.bodies.take(len(chunk))
            self._held_bytes += len(chunk)
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """The request is over, and what it held of its body."""
        self.services.bodies.give_back(self._held_bytes)
        self._held_bytes = 0

    async def record(self, kind: type[T]) -> T:
        """The body as a record; no body is the record with nothing but defaults. Raises InvalidArgumentError."""
        return from_json(await self.body() or b"{}", kind)

    # ---- asking the node -------------------------------------------------------------------------

    async def call(
        self, method: Method, record: Any, *, timeout_s: float = CALL_TIMEOUT_S, image: str | None = None
    ) -> bytes:
        """`image`: the environment that the node is to have, of what any node may do."""
        node = await self._holder(method, record) or self._node(method, image)
        return await self.services.rpc.call(
            node, method, pack(record), caller=self.caller, timeout_s=timeout_s, key=self.key
        )

    async def keyed(self, method: Method, record: Any, *, timeout_s: float) -> bytes:
        """As `call`; with an idempotency key it goes on when the client goes away, and can be asked for again."""
        return await self.kept(self.call(method, record, timeout_s=timeout_s))

    async def kept(self, work: Coroutine[Any, Any, T]) -> T:
        """With an idempotency key it goes on when the client goes away."""
        return await work if self.key is None else await asyncio.shield(self.services.keeper.start(work))

    async def forward(
        self,
        method: Method,
        record: Any,
        answer: type[Any],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        image: str | None = None,
    ) -> Answer:
        """The node's answer, as JSON."""
        return Answer(to_json(unpack(await self.call(method, record, timeout_s=timeout_s, image=image), answer)))

    async def open(self, method: Method, record: Any) -> Stream:
        """Raises CapacityError when the caller's project has too many. It ends when the token does."""
        node = self._node(method)
        return await self.opened(lambda: self.services.rpc.open(node, method, pack(record), caller=self.caller))

    async def opened(self, opening: Callable[[], Awaitable[Stream]]) -> Stream:
        """As `open`, of a stream from elsewhere."""
        streams, project = self.services.streams, self.caller.project
        streams.reserve(project)
        try:
            stream = await opening()
        except BaseException:
            streams.free(project)
            raise
        authorization = self.header(b"authorization")
        within = self.header(b"dsec-project")
        gate = self.services.gate
        check = None if authorization is None else lambda: gate.principal(authorization, self.peer, within)
        return streams.add(stream, project, check, self._cut)

    async def _holder(self, method: Method, record: Any) -> NodeId | None:
        """Where what the request names is, if only one of several nodes has such a thing and it names no node."""
        asked, nodes = named_by(method, record), self.services.fleet.nodes()
        if not asked or len(nodes) < 2 or self.header(b"dsec-node") is not None:
            return None
        return await the_holder(self.services.rpc, nodes, asked, self.caller)

    def _node(self, method: Method, image: str | None = None) -> NodeId:
        assert self.found is not None
        if "id" in self.found.segments:
            return node_of(self.sandbox)
        header = self.header(b"dsec-node")
        named = None if header is None else text_of(header, "the Dsec-Node header")
        return self.services.fleet.node_for(method, named, image=image)

    # ---- answering -------------------------------------------------------------------------------

    async def answer(self, answer: Answer) -> None:
        headers = [(b"content-length", b"%d" % len(answer.body)), *(answer.headers or ())]
        await self.start(answer.status, answer.type, headers)
        await self._emit(answer.body, more=False)

    async def start(self, status: int, media: str, headers: Headers) -> None:
        self.started = True
        self.status = status
        own = [(b"content-type", media.encode()), (b"x-request-id", self.id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})

    async def write(self, data: bytes) -> None:
        """Waits while the client is behind. Raises ClientGoneError when it takes nothing for WRITE_STALL_S."""
        if data:  # an empty chunk would be the end
            await self._emit(data, more=True)

    async def end(self) -> None:
        await self._emit(b"", more=False)

    async def refuse_upgrade(self, answer: Answer, headers: Headers) -> None:
        """An HTTP answer in place of a WebSocket."""
        start = {"type": "websocket.http.response.start", "status": answer.status, "headers": headers}
        try:
            await self._send(start)
            await self._send({"type": "websocket.http.response.body", "body": answer.body, "more_body": False})
        except OSError as error:
            raise ClientGoneError from error

    async def _emit(self, data: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        if self._inbox is not None and self._inbox.writable:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGoneError from error


def _body_too_large() -> LimitError:
    return LimitError(
        f"the body is above {BODY_BYTES_MAX} bytes", hint="write large data with PUT /v1/sandboxes/{id}/files"
    )
