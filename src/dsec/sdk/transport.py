"""One request to the service: deadlines, retries, errors, WebSockets. Alone knows aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlsplit

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

    from dsec.sdk.connections import HttpPool
    from dsec.sdk.http import Response

T = TypeVar("T")
Query = Mapping[str, "str | bytes | int | float | bool | None"]

CALLS_MAX: Final = 256  # connections for short requests
STREAMS_MAX: Final = 2_048  # connections that last: output, files, waits. Apart, so that these never starve the others
ANSWER_BYTES_MAX: Final = 64 << 20  # of a record; content comes in streams
_MESSAGE_BYTES_MAX: Final = 4 << 20
_ERROR_BYTES_MAX: Final = 1 << 20
_ERROR_TEXT_MAX: Final = 300
_REACH_HINT: Final = "is it running? `dsec up` starts it; `dsec doctor` looks for what is wrong"
_ENDED_HINT: Final = (
    "whoever stopped it may want it so: start it with `dsec up --detach` and call again (its sandboxes run on, and it "
    "takes them over), or make a new client, which starts it; dsec.log in its state directory says why it ended"
)
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_VALUE: Final = re.compile(r"[ -~]*")


def decode_reply(data: bytes | str, kind: type[T]) -> T:
    """An answer of the service. A bad one is its fault, not the caller's: ProtocolError."""
    try:
        return from_json(data, kind)
    except InvalidArgumentError as error:
        raise ProtocolError(f"the service's answer is not understood: {error.message}") from error


@dataclass(slots=True)
class _Connections:
    """Those of one event loop."""

    calls: HttpPool
    streams: HttpPool
    sockets: aiohttp.ClientSession | None = None  # made at the first WebSocket
    closer: AsyncGenerator[None, None] = field(init=False)

    def __post_init__(self) -> None:
        self.closer = _closing(self)

    @property
    def closed(self) -> bool:
        return self.calls.closed


class Transport:
    """Connections are kept per event loop, so one client serves several loops one after the other, or threads."""

    def __init__(self, endpoint: Endpoint, *, request_timeout_s: float = 60.0) -> None:
        self.endpoint = endpoint
        self.request_timeout_s = request_timeout_s
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = weakref.WeakKeyDictionary()
        self._starting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._random = random.Random()  # jitter only
        self._pid = os.getpid()
        self._answered = False
        address = urlsplit(endpoint.base)
        self._prefix = f"{address.path}{api.PREFIX}"
        authorization = "" if endpoint.token is None else f"Authorization: Bearer {endpoint.token}\r\n"
        project = "" if endpoint.project is None else f"{api.HEADER_PROJECT}: {endpoint.project}\r\n"
        node = "" if endpoint.node is None else f"{api.HEADER_NODE}: {endpoint.node}\r\n"
        self._fixed_head = f"Host: {address.netloc}\r\nUser-Agent: dsec-sdk\r\n{authorization}{project}{node}"

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
        sent = _headers(headers, key=key, body=body)
        content = to_json(body) if body is not None else data

        async def once(left_s: float) -> T:
            async with self._open(
                method, path, query, content, sent, total_s=left_s, long=long, again=repeatable
            ) as response:
                raw = await response.read(ANSWER_BYTES_MAX)
                if len(raw) > ANSWER_BYTES_MAX:
                    raise ProtocolError(f"the service answered {method} {path} with more than {ANSWER_BYTES_MAX} bytes")
                return decode_reply(raw, answer)

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
        length: int | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Response]:
        """One attempt at a request whose body or answer lasts. No deadline of its own; the caller retries.

        `length`: how many bytes `data` will give, when that is known."""
        sent = _headers(headers, key=key, body=body)
        content = to_json(body) if body is not None else data
        async with self._open(
            method, path, query, content, sent, total_s=None, long=True, length=length, again=method == "GET"
        ) as response:
            yield response

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, *, query: Query | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """An open WebSocket. Raises the DsecError with which the service refuses it."""
        import aiohttp
        from yarl import URL

        session = (await self._connections()).sockets or self._open_sockets(await self._connections())
        headers = {"User-Agent": "dsec-sdk"}
        if self.endpoint.token is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.token}"
        if self.endpoint.project is not None:
            headers[api.HEADER_PROJECT] = self.endpoint.project
        if self.endpoint.node is not None:
            headers[api.HEADER_NODE] = self.endpoint.node
        with self._translated(reads=False):
            try:
                connection = await session.ws_connect(
                    URL(f"{self.endpoint.base}{self._target(path, query)}", encoded=True),
                    headers=headers,
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
        data: AsyncIterable[bytes] | bytes | None,
        headers: str,
        *,
        total_s: float | None,
        long: bool,
        again: bool,
        length: int | None = None,
    ) -> AsyncIterator[Response]:
        from dsec.sdk.connections import ConnectError

        length = len(data) if isinstance(data, bytes) else length
        sized = "" if data is None and method == "GET" else f"Content-Length: {length or 0}\r\n"
        chunked = data is not None and length is None
        framing = "Transfer-Encoding: chunked\r\n" if chunked else sized
        target = self._target(path, query)
        head = f"{method} {target} HTTP/1.1\r\n{self._fixed_head}{headers}{framing}\r\n".encode()
        may_start = self.endpoint.autostart and self.endpoint.socket is not None
        with self._translated(reads=method in ("GET", "HEAD")):
            async with asyncio.timeout(total_s), contextlib.AsyncExitStack() as stack:
                while True:
                    connections = await self._connections()
                    pool = connections.streams if long else connections.calls
                    try:
                        response = await stack.enter_async_context(
                            pool.request(head, data, chunked=chunked, again=again)
                        )
                        break
                    except ConnectError:
                        # A service that had answered this client was stopped, or is being restarted by somebody with
                        # settings of theirs: not ours to start again.
                        if self._answered or not may_start:
                            raise
                        may_start = False
                        await self._start()
                self._answered = True
                if response.status >= 300:
                    raise await _refusal(response.status, response.reason, response.headers, response.read)
                yield response

    async def _start(self) -> None:
        assert self.endpoint.socket is not None
        lock = self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            await ensure_running(self.endpoint.socket)

    @contextlib.contextmanager
    def _translated(self, *, reads: bool) -> Iterator[None]:
        from dsec.sdk.connections import ConnectError

        try:
            yield
        except DsecError:
            raise
        except TimeoutError as error:
            raise DeadlineError(
                "the service did not answer within the time given",
                outcome=Outcome.UNCHANGED if reads else Outcome.UNKNOWN,
            ) from error
        except Exception as error:
            if isinstance(error, ConnectError) or _is_of_aiohttp(error, "ClientConnectorError"):
                raise UnavailableError(
                    f"the service at {self.endpoint} cannot be reached{self._ended()}: {_reason(error)}",
                    outcome=Outcome.UNCHANGED,
                    hint=_ENDED_HINT if self._ended() else _REACH_HINT,
                ) from error
            if isinstance(error, ConnectionError) or _is_of_aiohttp(error, "ClientError"):
                raise UnavailableError(
                    f"the connection to {self.endpoint} was lost: {_reason(error)}",
                    outcome=Outcome.UNCHANGED if reads else Outcome.UNKNOWN,
                ) from error
            raise

    def _ended(self) -> str:
        own = self._answered and self.endpoint.autostart and self.endpoint.socket is not None
        return " any more; it has answered this client, which therefore does not start it again" if own else ""

    # ---- connections ----

    async def _connections(self) -> _Connections:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None or found.closed or self._pid != os.getpid():
            from dsec.sdk.connections import HttpPool

            self._pid = os.getpid()
            found = _Connections(HttpPool(self.endpoint, CALLS_MAX), HttpPool(self.endpoint, STREAMS_MAX))
            self._by_loop[loop] = found
            # The loop closes its asynchronous generators when it ends (asyncio.run does), so connections
            # that a default client opened in it never outlive it.
            await anext(found.closer)
        return found

    def _open_sockets(self, connections: _Connections) -> aiohttp.ClientSession:
        import aiohttp

        connector: aiohttp.BaseConnector
        if self.endpoint.socket is not None:
            connector = aiohttp.UnixConnector(self.endpoint.socket, limit=STREAMS_MAX)
        else:
            connector = aiohttp.TCPConnector(limit=STREAMS_MAX, limit_per_host=STREAMS_MAX)
        session = connections.sockets = aiohttp.ClientSession(
            connector=connector,
            raise_for_status=_refuse,  # nothing else shows the body of a refusal
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return session

    async def close(self) -> None:
        """Closes what this loop opened. The transport may be used again."""
        connections = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.closer.aclose()

    def _target(self, path: str, query: Query | None) -> str:
        text = encode_query(query)
        target = f"{self._prefix}{path}{'?' if text else ''}{text}"
        if not _TARGET.fullmatch(target):
            raise InvalidArgumentError("a path of the service holds only printable ASCII")
        return target


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


async def _closing(connections: _Connections) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        connections.calls.close()
        connections.streams.close()
        if connections.sockets is not None:
            await connections.sockets.close()
        await asyncio.sleep(0)  # the loop closes what was cut in its next turn


def _headers(more: Mapping[str, str] | None, *, key: str | None, body: Any) -> str:
    lines = dict(more or {})
    if key is not None:
        lines[api.HEADER_IDEMPOTENCY] = key
    if body is not None:
        lines["Content-Type"] = api.TYPE_JSON
    for value in lines.values():
        if not _HEADER_VALUE.fullmatch(value):
            raise InvalidArgumentError("the value of a header holds only printable ASCII")
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items())


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
        headers = {name.lower(): value for name, value in response.headers.items()}
        raise await _refusal(response.status, response.reason or "", headers, response.content.read)


async def _refusal(
    status: int, reason: str, headers: Mapping[str, str], read: Callable[[int], Awaitable[bytes]]
) -> DsecError:
    """The error that an answer tells. One that is not ours (a proxy's, say) is told by its status and beginning."""
    raw = await read(_ERROR_BYTES_MAX)
    try:
        error = error_of(from_json(raw, ErrorBody))
    except DsecError:
        text = raw[:_ERROR_TEXT_MAX].decode("utf-8", "replace").strip()
        cls = UnavailableError if status in (502, 503, 504) else PlatformError
        return cls(f"the service answered with status {status}: {text or reason}")
    if error.retry_after_s is None and status in (429, 503) and "retry-after" in headers:
        with contextlib.suppress(ValueError):
            error.retry_after_s = float(headers["retry-after"])
    return error


def _is_of_aiohttp(error: Exception, name: str) -> bool:
    """Its errors come from WebSockets only, and then it is loaded."""
    return any(cls.__name__ == name and cls.__module__.startswith("aiohttp.") for cls in type(error).__mro__)


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None)
    return (getattr(cause, "strerror", None) or str(error) or type(error).__name__)[:_ERROR_TEXT_MAX]
