"""One connection to NATS: writes that are tried again without being done twice, and the API of JetStream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import DEFAULT_SUB_PENDING_MSGS_LIMIT, Subscription

from dsec.cluster.engine.credentials import Shown
from dsec.cluster.engine.layout import Layout
from dsec.core.errors import (
    ConflictError,
    DsecError,
    ForbiddenError,
    HostError,
    Outcome,
    PlatformError,
    StorageError,
    UnavailableError,
)
from dsec.core.limits import ENGINE_PENDING_BYTES_MAX, ENGINE_WAIT_S
from dsec.observe.logs import get_logger
from dsec.wire.codec import from_json, to_json

log = get_logger(__name__)

VERSION_MIN: Final = (2, 12, 0)  # times to live of keys, atomic batches, batched reads

_ATTEMPT_S: Final = 2.0  # an answer that does not come within it was lost with a connection or a leader
_PAUSE_S: Final = 0.25
_CONNECT_S: Final = 10.0
_PING_S: Final = 3  # a cut that swallows everything is noticed after three of them
_REFUSED: Final = ("authorization", "authentication")
_REFUSED_PAUSE_S: Final = 5.0  # between two attempts with credentials that are refused: others may come
_LOOK_S: Final = 0.5
_GONE_S: Final = 5.0  # what is asked for after the connection has been lost for so long is refused at once
_GONE_RETRY_S: Final = 2.0
_SLOW_S: Final = 60.0  # between two lines about messages that are dropped
_REFUSALS_MAX: Final = 64
_BATCHES_MAX: Final = 4  # under way at once: the server has room for fifty of one stream, of all replicas
_WRONG_SEQUENCE: Final = frozenset((10071, 10164))
_FULL: Final = frozenset((10047, 10077, 10122))
_NO_MESSAGE: Final = 10037
_NO_STREAM: Final = 10059
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    servers: tuple[str, ...]  # nats://host:port or tls://host:port
    layout: Layout
    who: str  # this client, in names of connections and inboxes: a node's id, or the name of a replica
    credentials: Shown | None = None  # none: the engine asks for none
    tls: ssl.SSLContext | None = None


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    error: ApiError | None = None


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class _Message(msgspec.Struct, frozen=True):
    seq: int
    data: str = ""
    hdrs: str = ""


class _StoredAnswer(msgspec.Struct, frozen=True):
    message: _Message


class Stored(NamedTuple):
    sequence: int
    body: bytes
    headers: str  # one a line


class _Client(Client):
    """Reconnects whatever the server says as it closes the connection. For the library an error is the end: of
    credentials that have expired, say, while new ones lie on the disk."""

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)  # the connection stays
            return
        error = nats.errors.Error(f"nats: {err_msg.strip()}")
        await self._error_cb(error)
        await self._process_op_err(error)


@dataclass(eq=False)
class Engine:
    """Reconnects for ever by itself. Made by `connect`."""

    settings: EngineSettings
    client: Client = field(default_factory=_Client)
    _reconnected: set[Callable[[], None]] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)
    _away_since: float | None = None  # monotonic
    _batches: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_BATCHES_MAX))
    _watch: asyncio.Task[None] | None = None
    _slow_until: float = 0.0  # monotonic; told of before
    _refused: set[str] = field(default_factory=set)  # what the server has said so of, in its words

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    @property
    def connected_since(self) -> float | None:
        """On the monotonic clock, without a break; None: it is away."""
        return self._since if self.connected else None

    async def check_there(self) -> None:
        """Raises UnavailableError for a connection that has been lost for long: what is asked for is not waited with.
        Not before a pause, so that no loop of one who asks again is without one."""
        if self._away_s() <= _GONE_S:
            return
        await asyncio.sleep(_PAUSE_S)
        if (away := self._away_s()) > _GONE_S:
            raise UnavailableError(
                f"the engine (NATS) has been away for {away:.0f} s",
                outcome=Outcome.UNCHANGED,
                retry_after_s=_GONE_RETRY_S,
            )

    @property
    def _is_away(self) -> bool:
        return not self.connected and not self.client.is_closed

    def _away_s(self) -> float:
        # Seen here as well: the client may take half a minute to tell of the loss of a connection that was cut.
        if not self._is_away:
            self._away_since = None
            return 0.0
        if self._away_since is None:
            self._away_since = time.monotonic()
        return time.monotonic() - self._away_since

    @classmethod
    async def connect(cls, settings: EngineSettings, *, timeout_s: float = _CONNECT_S) -> Engine:
        """Raises UnavailableError, ForbiddenError for credentials that are refused, HostError for a server too old."""
        engine = cls(settings)
        credentials = settings.credentials
        options: dict[str, Any] = {}
        if credentials is not None:
            options = {"user_jwt_cb": credentials.token, "signature_cb": credentials.sign}
        if settings.tls is not None:
            options["tls"] = settings.tls
        try:
            async with asyncio.timeout(timeout_s):
                await engine.client.connect(
                    servers=list(settings.servers),
                    name=f"dsec {settings.who}",
                    inbox_prefix=settings.layout.inbox(settings.who),
                    error_cb=engine._on_error,
                    disconnected_cb=engine._on_disconnect,
                    reconnected_cb=engine._on_reconnect,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_PAUSE_S,  # type: ignore[arg-type]  # seconds, of any kind
                    connect_timeout=2,
                    ping_interval=_PING_S,
                    max_outstanding_pings=2,
                    pending_size=ENGINE_PENDING_BYTES_MAX,
                    **options,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await engine._abandon()
            raise engine._not_connected(error) from error
        except BaseException:
            await engine._abandon()
            raise
        version = _version(engine.client._server_info)
        if version < VERSION_MIN:
            await engine.close()
            wanted, found = (".".join(map(str, parts)) for parts in (VERSION_MIN, version))
            raise HostError(f"the NATS server has version {found}, and dsec needs {wanted}", hint="use a newer server")
        engine._watch = asyncio.create_task(engine._watch_loss(), name="loss of the engine")
        return engine

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            await self.client.close()

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Called whenever the connection is there again, until the answer is called."""
        self._reconnected.add(callback)
        return lambda: self._reconnected.discard(callback)

    # -- messages ----------------------------------------------------------------------------------

    async def tell(self, subject: str, body: bytes) -> None:
        """Once, to whoever listens now; lost while the engine is away."""
        if not self.connected:
            return
        with contextlib.suppress(nats.errors.Error):
            await self.client.publish(subject, body)

    async def listen(
        self,
        subject: str,
        heard: Callable[[Msg], Awaitable[None]],
        *,
        queue: str = "",
        waiting_max: int = DEFAULT_SUB_PENDING_MSGS_LIMIT,
    ) -> Subscription:
        """`queue`: each message goes to one of those in it. `waiting_max`: what comes beyond is dropped."""
        try:
            return await self.client.subscribe(subject, queue, cb=heard, pending_msgs_limit=waiting_max)
        except nats.errors.Error as error:
            raise UnavailableError(f"cannot listen on {subject}: {_said(error)}") from error

    def shed(self) -> None:
        """After too much has come: what the server has queued for us, up to 64 MiB, is given up with the connection."""
        if self.connected:
            log.warning("too much waits at the engine: connecting anew")
            _abort(_socket_of(self.client))  # who reads from it sees its end, and connects again

    async def write(
        self,
        stream: str,
        subject: str,
        body: bytes,
        *,
        id: str | None = None,
        expected: int | None = None,
        ttl_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ENGINE_WAIT_S,
    ) -> int:
        """Stored durably; the sequence. Sent again under one id until it is answered, so it is stored once.

        Raises ConflictError when the last message of the subject is not `expected`, UnavailableError (outcome unknown
        when an attempt may have been stored), StorageError when the stream is full.
        """
        id = id or secrets.token_hex(12)
        sent: dict[str, str] = {**(headers or {}), "Nats-Msg-Id": id}
        if expected is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expected)
        if ttl_s is not None:
            sent["Nats-TTL"] = str(ttl_s)

        def read(answer: bytes) -> int:
            ack = from_json(answer, _Ack)
            if ack.error is None:
                return ack.seq
            raise _error(ack.error, subject)

        try:
            return int(await self.request((subject,), body, read, headers=sent, timeout_s=timeout_s))
        except ConflictError:
            # An attempt that was not answered may be what stands there now: the server looks at the id last.
            last = await self.last(stream, subject)
            if last is not None and f"Nats-Msg-Id: {id}" in last.headers.splitlines():
                return last.sequence
            raise

    async def write_new(self, stream: str, entries: Sequence[tuple[str, bytes]], *, ttl_s: int | None = None) -> int:
        """All of these subjects, in which there is nothing, or none of them; the sequence of the last. Tried once.

        Raises ConflictError when there is something in one, UnavailableError for whatever else: it may be written yet.
        """
        await self.check_there()
        batch = secrets.token_hex(12)
        fixed = {"Nats-Batch-Id": batch, "Nats-Expected-Last-Subject-Sequence": "0"}
        if ttl_s is not None:
            fixed["Nats-TTL"] = str(ttl_s)
        async with self._batches:
            try:
                for number, (subject, body) in enumerate(entries[:-1], 1):
                    await self.client.publish(subject, body, headers={**fixed, "Nats-Batch-Sequence": str(number)})
                end = {**fixed, "Nats-Batch-Sequence": str(len(entries)), "Nats-Batch-Commit": "1"}
                subject, body = entries[-1]
                answer = await self.client.request(subject, body, timeout=_ATTEMPT_S, headers=end)
            except (nats.errors.Error, TimeoutError) as error:
                raise UnavailableError(f"the engine has not written {len(entries)} keys: {_said(error)}") from error
        ack = from_json(answer.data, _Ack)
        if ack.error is None and ack.seq >= len(entries):
            return ack.seq
        if ack.error is not None and ack.error.err_code in _WRONG_SEQUENCE:
            raise ConflictError(f"{stream}: somebody else was first")
        why = "its answer makes no sense" if ack.error is None else ack.error.description
        raise UnavailableError(f"the engine has not written {len(entries)} keys: {why}")

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message of the subject, from who is in charge of the stream: never an older one."""
        try:
            answer: _StoredAnswer = await self.ask(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}, _StoredAnswer)
        except _NoMessage:
            return None
        found = answer.message
        return Stored(found.seq, base64.b64decode(found.data), base64.b64decode(found.hdrs).decode("latin-1"))

    async def ask(self, verb: str, body: Any, kind: type[Any], *, timeout_s: float = ENGINE_WAIT_S) -> Any:
        """A request to the API of JetStream that may be done twice."""
        subject = f"$JS.API.{verb}"

        def read(answer: bytes) -> Any:
            error = from_json(answer, _Answer).error
            if error is not None:
                raise _error(error, verb)
            return from_json(answer, kind)

        return await self.request((subject,), to_json(body), read, timeout_s=timeout_s)

    async def request(
        self,
        subjects: Sequence[str],
        body: bytes,
        read: Callable[[bytes], Any],
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = ENGINE_WAIT_S,
        nobody: str = "nobody is in charge of the stream now",
    ) -> Any:
        """Until `read` takes an answer; it raises NotNow for one that may change. Each attempt goes to the next of
        `subjects`, and then to the last one. One that has begun waits through the loss of the connection."""
        await self.check_there()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        uncertain = False
        why = "it does not answer"
        attempt = 0
        while (left := until - loop.time()) > 0:
            if self._is_away:  # sent now, it would be done when nobody waits for it any more
                why = "it is away"
                await asyncio.sleep(min(_PAUSE_S, left))
                continue
            subject = subjects[min(attempt, len(subjects) - 1)]
            attempt += 1
            try:
                reply = await self.client.request(subject, body, timeout=min(_ATTEMPT_S, left), headers=headers)
                return read(reply.data)
            except nats.errors.NoRespondersError:
                why = nobody
            except nats.errors.OutboundBufferLimitError:
                why = "it is away"
            except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
                raise UnavailableError("the connection to the engine is closed", outcome=_outcome(uncertain)) from error
            except (nats.errors.Error, TimeoutError) as error:
                uncertain = True
                why = _said(error)
            except NotNow as error:
                why = error.why
            if self._is_refused(subject):
                raise ForbiddenError(f"the engine refuses {subject} to {self.settings.who}")
            await asyncio.sleep(min(_PAUSE_S, max(until - loop.time(), 0.0)))
        raise UnavailableError(
            f"the engine (NATS) has not done it within {timeout_s:g} s: {why}",
            outcome=_outcome(uncertain),
            retry_after_s=1.0,
        )

    # -- life --------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):  # of each message that is dropped
            if time.monotonic() >= self._slow_until:
                self._slow_until = time.monotonic() + _SLOW_S
                log.warning("more comes from the engine than can be looked at: some is dropped", error=_said(error))
            return
        text = _said(error)
        if any(word in text.lower() for word in _REFUSED):
            self.client.options["reconnect_time_wait"] = _REFUSED_PAUSE_S  # until it is taken
        if "permissions violation" in text.lower():
            if len(self._refused) < _REFUSALS_MAX:
                self._refused.add(text.lower())
            log.error("the engine refuses this", error=text)
        elif not isinstance(error, (OSError, nats.errors.StaleConnectionError)):  # the loss is told of by itself
            log.warning("trouble with the engine", error=text)

    def _is_refused(self, subject: str) -> bool:
        # The server does not answer what it refuses: it says so beside, in lower case once the client has it.
        found = {text for text in self._refused if f'"{subject.lower()}"' in text}
        self._refused -= found
        return bool(found)

    async def _watch_loss(self) -> None:
        """TLS waits half a minute for an answer to its goodbye, and the client for TLS before it connects again. From
        behind a cut none comes."""
        used: asyncio.BaseTransport | None = None
        while True:
            if self.connected:
                used = _socket_of(self.client)
            elif used is not None:
                self._away_s()
                _abort(used)
                used = None
            await asyncio.sleep(_LOOK_S)

    async def _on_disconnect(self) -> None:
        if not self.client.is_closed:
            self._away_s()
            log.warning("the connection to the engine is lost")

    async def _on_reconnect(self) -> None:
        self._since = time.monotonic()
        self._away_since = None
        self.client.options["reconnect_time_wait"] = _PAUSE_S
        log.info("connected to the engine again")
        for callback in list(self._reconnected):
            callback()

    async def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # whatever state a connection that never was is in
            await self.client.close()

    def _not_connected(self, error: BaseException) -> DsecError:
        text = _said(self.client.last_error or error)
        if "authorization" in text.lower():
            return ForbiddenError(
                f"the engine refuses {self.settings.who}: {text}",
                hint="issue its credentials again: dsec cluster issue",
            )
        servers = ", ".join(self.settings.servers)
        return UnavailableError(
            f"cannot connect to the engine at {servers}: {text}",
            outcome=Outcome.UNCHANGED,
            hint="is the NATS server running, and reached by this name? Its log says what it refuses",
        )


class NotNow(Exception):
    """An answer that may be another one soon."""

    def __init__(self, why: str) -> None:
        self.why = why


class _NoMessage(Exception):
    pass


def _error(error: ApiError, what: str) -> Exception:
    if error.err_code in _WRONG_SEQUENCE:
        return ConflictError(f"{what}: somebody else was first")
    if error.err_code == _NO_MESSAGE:
        return _NoMessage(what)
    if error.err_code in _FULL:
        return StorageError(
            f"the engine has no room: {error.description}",
            outcome=Outcome.UNCHANGED,
            hint="give its stream or its disk more room",
        )
    if error.err_code == _NO_STREAM:
        return UnavailableError(
            "the engine has nothing of this cluster yet",
            outcome=Outcome.UNCHANGED,
            hint="`dsec api` and `dsec watcher` set it up when they start",
        )
    if error.code in (503, 408) or error.err_code == 10158:
        return NotNow(error.description)
    return PlatformError(f"the engine refuses {what}: {error.description} ({error.err_code})")


def _socket_of(client: Client) -> asyncio.BaseTransport | None:
    writer = getattr(client._transport, "_io_writer", None)
    return None if writer is None else writer.transport


def _abort(transport: asyncio.BaseTransport | None) -> None:
    abort = getattr(transport, "abort", None)  # of asyncio and of uvloop
    if abort is not None:
        abort()


def _outcome(uncertain: bool) -> Outcome:
    return Outcome.UNKNOWN if uncertain else Outcome.UNCHANGED


def _said(error: BaseException | None) -> str:
    return str(error).strip() or type(error).__name__


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    found = _VERSION.match(str(info.get("version", "")))
    return tuple(map(int, found.groups())) if found else (0, 0, 0)
