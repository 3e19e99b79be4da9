"""One request to the service: connections, deadlines, retries, errors. The only part that knows aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import socket
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from dsec.core.errors import (
    DeadlineError,
    DsecError,
    InvalidArgumentError,
    Outcome,
    PlatformError,
    ProtocolError,
    UnavailableError,
)
from dsec.sdk.autostart import ensure_running
from dsec.sdk.endpoint import Endpoint
from dsec.sdk.retry import backoff_s, retry_delay_s
from dsec.wire import api
from dsec.wire.codec import from_json, to_json
from dsec.wire.errors import ErrorBody, error_of

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
Query = Mapping[str, "str | bytes | int | float | bool | None"]

CALLS_MAX: Final = 256  # connections for short requests
STREAMS_MAX: Final = 2_048  # connections that last: output, files, waits. Apart, so that these never starve the others
_CONNECT_TIMEOUT_S: Final = 10.0
_KEEPALIVE_S: Final = 30.0  # below limits.KEEP_ALIVE_S: the server must not be the one that closes first
_MESSAGE_BYTES_MAX: Final = 4 << 20
_WRITE_AT_ONCE_BYTES: Final = 256 << 10
_ERROR_TEXT_MAX: Final = 300


def decode_reply(data: bytes | str, kind: type[T]) -> T:
    """An answer of the service. A bad one is its fault, not the caller's: ProtocolError."""
    try:
        return from_json(data, kind)
    except InvalidArgumentError as error:
        raise ProtocolError(f"the service's answer is not understood: {error.message}") from error


@dataclass(slots=True)
class _Sessions:
    calls: aiohttp.ClientSession
    streams: aiohttp.ClientSession
    closer: AsyncGenerator[None, None]


class Transport:
    """Connections are kept per event loop, so one client serves several loops one after the other, or threads."""

    def __init__(self, endpoint: Endpoint, *, request_timeout_s: float = 60.0) -> None:
        self.endpoint = endpoint
        self.request_timeout_s = request_timeout_s
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Sessions] = weakref.WeakKeyDictionary()
        self._starting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._random = random.Random()  # jitter only
        self._pid = os.getpid()
        self._answered = False

    # ---- requests ----

    async def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: Query | None = None,
        body: Any = None,
        data: bytes | None = None,
        key: str | None = None,
        repeatable: bool = False,
        long: bool = False,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Sends a request and decodes its answer. `body` is a record, `data` raw bytes.

        `repeatable`: doing it twice is as good as once; `key` implies it. `long`: may wait for long at the server.
        Raises the DsecError that the service answers, UnavailableError, DeadlineError.
        """
        repeatable = repeatable or key is not None or method in ("GET", "HEAD")
        sent = self._headers(headers, key=key)
        if body is not None:
            data = to_json(body)
            sent["Content-Type"] = api.TYPE_JSON

        async def once(left_s: float) -> T:
            async with self._open(method, path, query, data, sent, total_s=left_s, long=long) as response:
                return decode_reply(await response.read(), answer)

        return await self._retrying(once, repeatable=repeatable, timeout_s=timeout_s)

    async def _retrying(
        self, once: Callable[[float], Awaitable[T]], *, repeatable: bool, timeout_s: float | None = None
    ) -> T:
        """Runs `once(seconds left)` until it succeeds, fails for good, or time is up."""
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else self.request_timeout_s)
        attempt = 0
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await once(max(left_s, 0.001))
            except DsecError as error:
                delay = retry_delay_s(
                    error,
                    attempt=attempt,
                    repeatable=repeatable,
                    left_s=deadline - time.monotonic(),
                    jitter=self._random.random(),
                    known=self._answered,
                )
                if delay is None:
                    raise
            attempt += 1
            await asyncio.sleep(delay)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        data: AsyncIterable[bytes] | bytes | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt at a request whose body or answer lasts. No deadline of its own; the caller retries."""
        sent = self._headers(headers, key=key)
        if body is not None:
            data = to_json(body)
            sent["Content-Type"] = api.TYPE_JSON
        async with self._open(method, path, query, data, sent, total_s=None, long=True) as response:
            yield response

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, *, query: Query | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """An open WebSocket. Raises the DsecError with which the service refuses it."""
        import aiohttp

        sessions = await self._sessions()
        with self._translated(reads=False):
            try:
                connection = await sessions.streams.ws_connect(
                    self._url(path, query),
                    headers=self._headers(None),
                    timeout=aiohttp.ClientWSTimeout(ws_close=5.0),
                    max_msg_size=_MESSAGE_BYTES_MAX,
                    autoclose=True,
                )
            except aiohttp.WSServerHandshakeError as error:
                raise PlatformError(f"the service refused the connection with status {error.status}") from error
        try:
            yield connection
        finally:
            await connection.close()

    def messages(self, connection: aiohttp.ClientWebSocketResponse) -> Messages:
        return Messages(self, connection)

    async def pause(self, error: DsecError, failures: int, *, most: int) -> None:
        """Waits before something that lasts is taken up again. Raises `error` after `most` failures."""
        if failures > most:
            raise error
        await asyncio.sleep(error.retry_after_s or backoff_s(failures - 1, self._random.random()))

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        query: Query | None,
        data: Any,
        headers: Mapping[str, str],
        *,
        total_s: float | None,
        long: bool,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        if isinstance(data, bytes) and len(data) > _WRITE_AT_ONCE_BYTES:
            data = io.BytesIO(data)  # is written in pieces; bytes are not, and hold up the loop
        sessions = await self._sessions()
        session = sessions.streams if long else sessions.calls
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)
        with self._translated(reads=method in ("GET", "HEAD")):
            async with self._started(
                lambda: session.request(
                    method, self._url(path, query), data=data, headers=headers, timeout=timeout, allow_redirects=False
                )
            ) as response:
                self._answered = True
                if long:
                    _keep_alive(response)
                yield response

    @contextlib.asynccontextmanager
    async def _started(
        self, request: Callable[[], contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Enters `request()`; when nobody is at the local socket, starts the service and enters it once more."""
        import aiohttp

        async with contextlib.AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(request())
            except aiohttp.ClientConnectorError:
                # Nothing was sent: no connection came about. A service that had answered this client was stopped, or is
                # being restarted by somebody with settings of theirs: not ours to start again.
                if self._answered or not self.endpoint.autostart or self.endpoint.socket is None:
                    raise
                await self._start()
                response = await stack.enter_async_context(request())
            yield response

    async def _start(self) -> None:
        assert self.endpoint.socket is not None
        lock = self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            await ensure_running(self.endpoint.socket)

    @contextlib.contextmanager
    def _translated(self, *, reads: bool) -> Any:
        import aiohttp

        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"the service at {self.endpoint} cannot be reached: {_reason(error)}",
                outcome=Outcome.UNCHANGED,
                hint="is it running? `dsec up` starts it; `dsec doctor` looks for what is wrong",
            ) from error
        except TimeoutError as error:
            raise DeadlineError(
                "the service did not answer within the time given",
                outcome=Outcome.UNCHANGED if reads else Outcome.UNKNOWN,
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UnavailableError(
                f"the connection to {self.endpoint} was lost: {_reason(error)}",
                outcome=Outcome.UNCHANGED if reads else Outcome.UNKNOWN,
            ) from error

    # ---- connections ----

    async def _sessions(self) -> _Sessions:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None or found.calls.closed or self._pid != os.getpid():
            self._pid = os.getpid()
            found = self._by_loop[loop] = self._connect()
            # The loop closes its asynchronous generators when it ends (asyncio.run does), so connections
            # that a default client opened in it never outlive it.
            await anext(found.closer)
        return found

    def _connect(self) -> _Sessions:
        import aiohttp

        def session(limit: int) -> aiohttp.ClientSession:
            connector: aiohttp.BaseConnector
            if self.endpoint.socket is not None:
                connector = aiohttp.UnixConnector(self.endpoint.socket, limit=limit, keepalive_timeout=_KEEPALIVE_S)
            else:
                connector = aiohttp.TCPConnector(limit=limit, limit_per_host=limit, keepalive_timeout=_KEEPALIVE_S)
            return aiohttp.ClientSession(
                connector=connector,
                raise_for_status=_refuse,  # also for WebSockets, where nothing else shows the body
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )

        calls, streams = session(CALLS_MAX), session(STREAMS_MAX)
        return _Sessions(calls, streams, _closing(calls, streams))

    async def close(self) -> None:
        """Closes what this loop opened. The transport may be used again."""
        sessions = self._by_loop.pop(asyncio.get_running_loop(), None)
        if sessions is not None:
            await sessions.closer.aclose()

    def _headers(self, more: Mapping[str, str] | None, *, key: str | None = None) -> dict[str, str]:
        headers = {"User-Agent": "dsec-sdk", **(more or {})}
        if self.endpoint.token is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.token}"
        if key is not None:
            headers[api.HEADER_IDEMPOTENCY] = key
        return headers

    def _url(self, path: str, query: Query | None) -> Any:
        from yarl import URL

        text = encode_query(query)
        return URL(f"{self.endpoint.base}{api.PREFIX}{path}{'?' if text else ''}{text}", encoded=True)


class Messages:
    """What comes over a WebSocket. A text message `{"error": …}` is raised as the error that it tells."""

    def __init__(self, transport: Transport, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._transport = transport
        self._connection = connection

    async def receive(self) -> bytes | str | None:
        """The next message, None once the service has closed in good order. Raises UnavailableError otherwise."""
        import aiohttp

        with self._transport._translated(reads=False):
            message = await self._connection.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return bytes(message.data)
        if message.type is aiohttp.WSMsgType.TEXT:
            found = decode_reply(message.data, _Failure).error
            if found is not None:
                raise error_of(found)
            return str(message.data)
        if message.type is aiohttp.WSMsgType.CLOSE and message.data == 1000:
            return None
        raise UnavailableError(f"the connection to {self._transport.endpoint} was lost")

    async def send(self, data: bytes) -> None:
        with self._transport._translated(reads=False):
            await self._connection.send_bytes(data)


class _Failure(msgspec.Struct):
    error: ErrorBody | None = None


async def _closing(*sessions: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        for session in sessions:
            await session.close()


def encode_query(query: Query | None) -> str:
    """None is left out, booleans are true and false, bytes are percent-encoded as they are."""
    return "&".join(f"{quote(k, safe='')}={_quoted(v)}" for k, v in (query or {}).items() if v is not None)


def _quoted(value: str | bytes | float | bool | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    return quote(value if isinstance(value, bytes) else str(value), safe="")


async def _refuse(response: aiohttp.ClientResponse) -> None:
    if response.status >= 300:
        raise await _refusal(response)


async def _refusal(response: aiohttp.ClientResponse) -> DsecError:
    """The error that an answer tells. One that is not ours (a proxy's, say) is told by its status and beginning."""
    raw = await response.content.read(1 << 20)
    try:
        error = error_of(from_json(raw, ErrorBody))
    except DsecError:
        text = raw[:_ERROR_TEXT_MAX].decode("utf-8", "replace").strip()
        cls = UnavailableError if response.status in (502, 503, 504) else PlatformError
        return cls(f"the service answered with status {response.status}: {text or response.reason}")
    if error.retry_after_s is None and response.status in (429, 503):
        with contextlib.suppress(ValueError):
            error.retry_after_s = float(response.headers["Retry-After"]) if "Retry-After" in response.headers else None
    return error


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    """A stream may be silent for hours; the kernel's probes tell a quiet peer from a dead one."""
    transport = response.connection.transport if response.connection else None
    found = transport.get_extra_info("socket") if transport else None
    if found is not None and found.family != socket.AF_UNIX:
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            found.setsockopt(socket.IPPROTO_TCP, option, value)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None)
    return (getattr(cause, "strerror", None) or str(error) or type(error).__name__)[:_ERROR_TEXT_MAX]
