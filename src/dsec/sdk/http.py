"""HTTP/1.1 as the SDK needs it: one request at a time on a connection that is kept. No redirects, cookies or proxies.

Heads and chunks are read by llhttp (httptools). A body of a known length goes past it: that is most of a download.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final, cast

import httptools

Body = bytes | AsyncIterable[bytes]

HEAD_BYTES_MAX: Final = 64 << 10
QUEUED_BYTES_HIGH: Final = 1 << 20  # of an answer that nobody has read; then reading stops
_QUEUED_BYTES_LOW: Final = 256 << 10
_WRITE_BYTES: Final = 256 << 10  # of a body at once, so that the loop has its turns
_JOIN_BYTES_MAX: Final = 64 << 10  # a body up to this goes out with its head
_UNSENT_BYTES_HIGH: Final = 512 << 10


class LostError(ConnectionError):
    """The connection ended, or what came is not HTTP. `begun`: part of an answer had come."""

    def __init__(self, text: str, *, begun: bool = False) -> None:
        super().__init__(text)
        self.begun = begun


class Response:
    """An answer whose head is here. Names of headers are in lower case."""

    __slots__ = ("_connection", "headers", "reason", "status")

    def __init__(self, connection: HttpConnection, status: int, reason: str, headers: dict[str, str]) -> None:
        self._connection = connection
        self.status = status
        self.reason = reason
        self.headers = headers

    async def read(self, most: int | None = None) -> bytes:
        """The body; with `most` no more than a piece beyond that many bytes. Raises LostError when it is cut."""
        parts: list[bytes] = []
        size = 0
        while (piece := await self._connection.next_piece()) and (most is None or size <= most):
            parts.append(piece)
            size += len(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises LostError when it is cut."""
        while piece := await self._connection.next_piece():
            yield piece


class HttpConnection(asyncio.Protocol):
    """One connection. `exchange` sends a request and gives the answer; the next one may follow when `reusable`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self._closed = False
        self._error: LostError | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for a head or a piece
        self._writer: asyncio.Future[None] | None = None  # waits for room
        self._full = False
        self._begin()
        self._done = True

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._head: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._progress = False
        self._unread_bytes = 0
        self._reason = b""
        self._pieces: deque[bytes] = deque()
        self._queued = 0
        self._left: int | None = None  # of a body of known length
        self._delimited = False  # its end is told
        self._done = False
        self._sent = False
        self._keep = False
        self._paused = False

    # ---- for the pool ----

    @property
    def closed(self) -> bool:
        return self._closed or self.transport.is_closing()

    @property
    def reusable(self) -> bool:
        return self._done and self._sent and self._keep and self._error is None and not self.closed

    def abort(self) -> None:
        self.transport.abort()

    async def exchange(self, head: bytes, body: Body | None, *, chunked: bool = False) -> Response:
        """Raises LostError, and what `body` raises. An answer that comes early ends the sending."""
        self._begin()
        if body is None or (isinstance(body, bytes) and len(body) <= _JOIN_BYTES_MAX):
            self._write(head + body if body else head)
            self._sent = True
        else:
            self._write(head)
            await self._send(body, chunked)
        while self._response is None:
            self._raise_error()
            await self._wait_read()
        return self._response

    async def next_piece(self) -> bytes:
        """Empty at the end of the body."""
        while not self._pieces:
            if self._done:
                return b""
            self._raise_error()
            await self._wait_read()
        piece = self._pieces.popleft()
        self._queued -= len(piece)
        if self._paused and self._queued < _QUEUED_BYTES_LOW and not self.closed:
            self._paused = False
            self.transport.resume_reading()
        return piece

    # ---- sending ----

    async def _send(self, body: Body, chunked: bool) -> None:
        if isinstance(body, bytes):
            view = memoryview(body)
            for start in range(0, len(view), _WRITE_BYTES):
                if not await self._room():
                    return
                self._write(view[start : start + _WRITE_BYTES])
        else:
            async for piece in body:
                if not await self._room():
                    return
                if chunked and piece:
                    self._write(b"%x\r\n" % len(piece))
                self._write(piece)
                if chunked and piece:
                    self._write(b"\r\n")
            if chunked:
                self._write(b"0\r\n\r\n")
        self._sent = True

    async def _room(self) -> bool:
        """Waits while the other side is behind. False once there is no use in sending more."""
        while self._full and self._response is None and self._error is None:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        return self._response is None and self._error is None

    def _write(self, data: bytes | memoryview) -> None:
        if not self._closed and data:
            self.transport.write(data)

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)

    def data_received(self, data: bytes) -> None:
        if self._left:
            if len(data) > self._left:
                self._fail("bytes came that belong to no answer")
            else:
                self._take(data)
        elif self._done:
            self._fail("bytes came that belong to no answer")
        else:
            self._progress = False
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self._fail(f"the answer is not HTTP/1.1: {error}")
                return
            # What the parser keeps to itself: a line that does not end, an extension of a chunk.
            self._unread_bytes = 0 if self._progress else self._unread_bytes + len(data)
            if self._unread_bytes > HEAD_BYTES_MAX:
                self._fail(f"a line of more than {HEAD_BYTES_MAX} bytes")

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._response is not None and not self._delimited and self._response.status >= 300:
            self._done = True  # an error page of a proxy that ends where the connection does
        if not self._done and self._error is None:
            text = str(exc) if exc is not None else "it was closed by the other side"
            self._error = LostError(text, begun=self._response is not None or self._head_bytes > 0)
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake_writer()

    # ---- what the parser calls ----

    def on_message_begin(self) -> None:
        if self._response is not None:
            raise ValueError("a second answer to one request")

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError(f"a head of more than {HEAD_BYTES_MAX} bytes")
        self._head.append((name, value))

    def on_headers_complete(self) -> None:
        self._progress = True
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim answer; the real one follows
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._head}
        self._keep = self._parser.should_keep_alive()
        length = headers.get("content-length")
        if status in (204, 304):
            self._left = 0
        elif "transfer-encoding" not in headers and length is not None:
            self._left = int(length)
        self._delimited = self._left is not None or "transfer-encoding" in headers
        self._response = Response(self, status, self._reason.decode("latin-1"), headers)
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._take(body)

    def on_message_complete(self) -> None:
        if self._response is None:
            self._head, self._head_bytes, self._reason = [], 0, b""
        else:
            self._done = True
            self._wake()

    # ---- inside ----

    def _take(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._queued += len(piece)
        if self._left is not None:
            self._left -= len(piece)
            self._done = self._left == 0
        if self._queued > QUEUED_BYTES_HIGH and not self._paused and not self._done:
            self._paused = True
            self.transport.pause_reading()
        self._wake_reader()

    def _fail(self, text: str) -> None:
        if self._error is None:
            self._error = LostError(text, begun=True)
        self.transport.abort()
        self._wake()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise LostError(str(self._error), begun=self._error.begun)

    async def _wait_read(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        self._wake_reader()
        self._wake_writer()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
