"""Connections to the service, kept between requests: made, counted, let go."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

from dsec.sdk.endpoint import Endpoint
from dsec.sdk.http import Body, HttpConnection, LostError, Response

CONNECT_TIMEOUT_S: Final = 10.0
KEEPALIVE_S: Final = 30.0  # below limits.KEEP_ALIVE_S: the server must not be the one that closes first
_SEND_BUFFER_BYTES: Final = 1 << 20  # large bodies in few wake-ups; the kernel gives what it allows
_ATTEMPT_DELAY_S: Final = 0.25  # before the next address of a name is tried beside the first


class ConnectError(Exception):
    """No connection came about: nothing was sent."""


class HttpPool:
    """At most `limit` connections at once, all of one event loop; whoever wants one more waits."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._endpoint = endpoint
        self._address = urlsplit(endpoint.base)
        self._room = asyncio.Semaphore(limit)
        self._idle: deque[HttpConnection] = deque()
        self._used: set[HttpConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        self.closed = False

    @contextlib.asynccontextmanager
    async def request(
        self, head: bytes, body: Body | None, *, chunked: bool = False, again: bool = False
    ) -> AsyncIterator[Response]:
        """`again`: sending it twice does no harm. A kept connection may be found closed: it then goes by a new one."""
        async with self._room:
            connection = self._take_idle()
            response: Response | None = None
            if connection is not None:
                try:
                    response = await self._exchange(connection, head, body, chunked)
                except LostError as error:
                    if error.begun or not again or not (body is None or isinstance(body, bytes)):
                        raise
                    connection = None
            if connection is None or response is None:
                connection = await self._connect()
                response = await self._exchange(connection, head, body, chunked)
            try:
                yield response
            finally:
                self._give_back(connection)

    async def _exchange(self, connection: HttpConnection, head: bytes, body: Body | None, chunked: bool) -> Response:
        self._used.add(connection)
        try:
            return await connection.exchange(head, body, chunked=chunked)
        except BaseException:
            self._used.discard(connection)
            connection.abort()
            raise

    def _take_idle(self) -> HttpConnection | None:
        oldest = self._loop.time() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and not connection.closed:
                return connection
            connection.abort()
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        self._used.discard(connection)
        if self.closed or not connection.reusable:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - KEEPALIVE_S
        while self._idle and (self._idle[0].idle_since <= oldest or self._idle[0].closed):
            self._idle.popleft().abort()
        if self._idle:
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._drop_old)

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await (self._connect_unix() if self._endpoint.socket is not None else self._connect_tcp())
        except TimeoutError as error:
            raise ConnectError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise ConnectError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        with contextlib.suppress(OSError, AttributeError):
            raw = connection.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return connection

    async def _connect_unix(self) -> HttpConnection:
        _, connection = await self._loop.create_unix_connection(HttpConnection, self._endpoint.socket)
        return connection

    async def _connect_tcp(self) -> HttpConnection:
        secure = self._address.scheme == "https"
        # uvloop tries the addresses of a name one after another.
        several = isinstance(self._loop, asyncio.BaseEventLoop)
        beside: dict[str, Any] = {"happy_eyeballs_delay": _ATTEMPT_DELAY_S} if several else {}
        connection: HttpConnection
        _, connection = await self._loop.create_connection(
            HttpConnection,
            self._address.hostname or "",
            self._address.port or (443 if secure else 80),
            ssl=_tls() if secure else None,
            **beside,
        )
        _watch_peer(connection.transport.get_extra_info("socket"))
        return connection

    def close(self) -> None:
        """Cuts them all."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in (*self._idle, *self._used):
            connection.abort()
        self._idle.clear()


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _watch_peer(raw: socket.socket) -> None:
    """A stream may be silent for hours; the kernel's probes tell a quiet peer from a dead one."""
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
