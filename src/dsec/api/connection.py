"""One connection: uvicorn's HTTP protocol with the bounds and deadlines that uvicorn leaves to a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dsec.api import errors
from dsec.core.errors import DsecError, InvalidArgumentError, LimitError, UnavailableError
from dsec.core.limits import (
    BODY_BYTES_MAX,
    BODY_IDLE_S,
    CONNECTIONS_MAX,
    HEAD_TIMEOUT_S,
    HEADERS_BYTES_MAX,
    INBOX_BYTES_HIGH,
    KEEP_ALIVE_S,
    URL_BYTES_MAX,
)
from dsec.iam.peers import peer_of
from dsec.observe.context import new_request_id
from dsec.wire.codec import to_json


class Inbox:
    """The body of one request as it comes: pieces are not copied, and reading stands still while they wait."""

    __slots__ = ("_flow", "_pieces", "_size", "_waiter", "cut", "cycle", "whole")

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.whole = False  # all of it has come
        self.cut = False  # no more will come
        self.cycle: RequestResponseCycle | None = None

    async def take(self) -> bytes | None:
        """The next piece, empty at the end, None when the client has gone."""
        cycle = self.cycle
        if cycle is not None and cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        while not self._pieces:
            if self.whole or self.cut:
                return b"" if self.whole else None
            self._flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces.popleft()
        self._size -= len(piece)
        return piece

    @property
    def ready(self) -> bool:
        """`take` would not wait."""
        return bool(self._pieces) or self.whole or self.cut

    @property
    def writable(self) -> bool:
        """What is answered would not wait for the client to read."""
        return not self._flow.write_paused

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > INBOX_BYTES_HIGH:
            self._flow.pause_reading()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(HttpToolsProtocol):
    """One connection: says who is at its other end, bounds heads, has deadlines where only the client is awaited."""

    due: float  # loop time after which the client has waited too long with what it owes; infinite while we work

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        self.app_state = {"peer": _peer(raw), "connection": self}
        self._task: asyncio.Task[None] | None = None
        self._in_head = True
        self._head_bytes = 0
        self._unread_bytes = 0
        self._body_left = 0  # of a body of known length, once its head is read: the parser need not see it
        self._inbox: Inbox
        self._progress = False
        self._refusal: DsecError | None = None
        self.due = self.loop.time() + HEAD_TIMEOUT_S
        _keep_alive(raw)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(UnavailableError("too many connections", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.due = float("inf")
        if self._task is not None and not self._task.done():
            self._task.cancel()
        if self.cycle is not None:
            self._inbox.cut = True
            self._inbox.wake()

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        if self._body_left:
            data = self._take_body(data)
            if not data:
                return
        self._progress = False
        super().data_received(data)
        # What the parser keeps to itself: a header that does not end, trailers, extensions of chunks.
        self._unread_bytes = 0 if self._progress else self._unread_bytes + len(data)
        if self._unread_bytes > HEADERS_BYTES_MAX and self.parser is not None:
            self._refuse(LimitError(f"a header is above {HEADERS_BYTES_MAX} bytes"))

    # ---- what the parser calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._inbox = self.scope["state"]["inbox"] = Inbox(self.flow)
        self._progress = self._in_head = True
        self._head_bytes = 0
        self.due = self.loop.time() + HEAD_TIMEOUT_S

    def on_url(self, url: bytes) -> None:
        self._progress = True
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            raise self._refused(LimitError(f"the URL is above {URL_BYTES_MAX} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._progress = True
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEADERS_BYTES_MAX:
            raise self._refused(LimitError(f"the headers are above {HEADERS_BYTES_MAX} bytes"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self.due = float("inf")
        if not self.url.startswith(b"/") or not self.url.isascii():
            raise self._refused(InvalidArgumentError("the URL must begin with / and be percent-encoded"))
        super().on_headers_complete()
        self._inbox.cycle = self.cycle
        self._body_left = self._length()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if self._body_left:
            self._body_left -= len(body)
        if not (self.parser.should_upgrade() and self._should_upgrade()) and not self.cycle.response_complete:
            self._inbox.feed(body)

    def on_chunk_header(self) -> None:
        self._progress = True

    def on_message_complete(self) -> None:
        self._progress = self._in_head = True
        super().on_message_complete()
        self._inbox.whole = True
        self._inbox.wake()
        if self.cycle is not None and self.cycle.response_complete:
            self.due = self.loop.time() + KEEP_ALIVE_S

    # ---- what uvicorn calls ----------------------------------------------------------------------

    def handle_websocket_upgrade(self) -> None:
        self.due = float("inf")
        super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # As in uvicorn, and the task is kept: who has gone away is not worked for.
        task = self._task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            # Either the next request, or the rest of a body that nobody wants.
            self.due = self.loop.time() + (KEEP_ALIVE_S if self._in_head else BODY_IDLE_S)

    def send_400_response(self, msg: str) -> None:
        refusal = self._refusal or InvalidArgumentError("this is not HTTP/1.1", hint=msg)
        self._refuse(refusal)

    # ---- ours ------------------------------------------------------------------------------------

    def _length(self) -> int:
        """Of the body, when it is known and long enough to go past the parser."""
        found = [value for name, value in self.headers if name == b"content-length"]
        if len(found) != 1 or any(name == b"transfer-encoding" for name, _ in self.headers):
            return 0
        length = int(found[0])  # the parser has checked it
        return length if length > BODY_BYTES_MAX else 0

    def _take_body(self, data: bytes) -> bytes:
        """Gives what follows the body in `data`."""
        piece, rest = (
            (data, b"") if len(data) <= self._body_left else (data[: self._body_left], data[self._body_left :])
        )
        self._body_left -= len(piece)
        if not self.cycle.response_complete:
            self._inbox.feed(piece)
        if not self._body_left:
            # The one of before is in the middle of the body. What uvicorn lets pass this one does too.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()
        return rest

    def expire(self) -> None:
        if self._in_head and self.url_begun:
            self._refuse(InvalidArgumentError(f"the headers did not come within {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection if its answer is not complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self._task = None  # it is the one that asks for this
            self.transport.abort()

    def cut(self) -> None:
        """At once, whatever is under way: a WebSocket too, which has the transport from us."""
        self.transport.abort()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """What is written within goes out at once: apart, head and body would wake the client twice."""
        cycle = self.cycle
        if cycle is None:
            yield
            return
        held = _Held()
        cycle.transport = held  # type: ignore[assignment]
        try:
            yield
        finally:
            cycle.transport = self.transport
            held.release(self.transport)

    @property
    def url_begun(self) -> bool:
        return bool(getattr(self, "url", b"")) and (self.cycle is None or self.cycle.response_complete)

    def _refused(self, error: DsecError) -> DsecError:
        self._refusal = error
        return error

    def _refuse(self, error: DsecError) -> None:
        """Answer outside the application, and close. In the middle of an answer: close only."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = to_json(errors.told(error))
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\nconnection: close\r\n\r\n"
            % (len(body), new_request_id().encode())
        )
        self.transport.write(STATUS_LINE[errors.status_of(error)] + head + body)
        self.transport.close()


class _Held:
    """Stands for a transport while an answer is written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._closed = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self) -> None:
        self._closed = True

    def release(self, transport: asyncio.Transport) -> None:
        if self._parts:
            transport.write(b"".join(self._parts))
        if self._closed:
            transport.close()


def _peer(raw: Any) -> Any:
    # A transport's socket is a wrapper without getsockopt in some loops; its descriptor is the same everywhere.
    with socket.socket(fileno=os.dup(raw.fileno())) as connection:
        return peer_of(connection)


def _keep_alive(raw: Any) -> None:
    """A peer that vanished without a word is noticed within two minutes."""
    if raw.family == socket.AF_UNIX:
        return
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        raw.setsockopt(level, option, value)
