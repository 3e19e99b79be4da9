"""Listening: uvicorn's protocols on our own sockets, with bounds and deadlines that uvicorn leaves to a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from dsec.api import errors
from dsec.api.app import Application
from dsec.core.errors import DsecError, ForbiddenError, HostError, InvalidArgumentError, LimitError, UnavailableError
from dsec.core.limits import (
    BODY_IDLE_S,
    CONNECTIONS_MAX,
    HEAD_TIMEOUT_S,
    HEADERS_BYTES_MAX,
    KEEP_ALIVE_S,
    URL_BYTES_MAX,
    WEBSOCKET_MESSAGE_BYTES_MAX,
)
from dsec.iam.peers import peer_of
from dsec.observe.context import new_request_id
from dsec.observe.logs import get_logger
from dsec.wire.codec import to_json

log = get_logger(__name__)

SOCKET_PATH_BYTES_MAX: Final = 100  # sun_path holds 107; some languages' clients add a few

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 2_048


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int  # 0: any that is free


class HttpServer:
    """Serves one application on any number of sockets, until `close`."""

    def __init__(self, application: Application) -> None:
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            # Whatever is worth telling the application has logged; the rest is what clients make uvicorn say.
            logging.getLogger(name).disabled = True
        self._config = uvicorn.Config(
            application,
            http=Connection,
            ws=WebSocketsSansIOProtocol,
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            ws_max_size=WEBSOCKET_MESSAGE_BYTES_MAX,
            # A client that is behind has reading paused, its pongs unread: a ping's timeout would cut it off.
            ws_ping_interval=None,
            ws_per_message_deflate=False,
        )
        self._config.load()
        self.state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._paths: list[Path] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def listen_unix(self, path: Path) -> None:
        """A socket that only its owner (and root) can open. Raises HostError; a stale socket file is replaced."""
        listener = _bind_unix(path)
        self._paths.append(path)
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._protocol, sock=listener, backlog=_BACKLOG))
        self._start_sweeping()

    async def listen_tcp(
        self, address: TcpAddress, *, tls: ssl.SSLContext | None = None, insecure: bool = False
    ) -> list[TcpAddress]:
        """The addresses listened on. Raises ForbiddenError for one that others can reach, without TLS or `insecure`."""
        if tls is None and not insecure and not _is_loopback(address.host):
            raise ForbiddenError(
                f"tokens would cross the network to {address.host} unencrypted",
                hint="give a certificate, listen on 127.0.0.1, or pass --insecure where the network is yours",
            )
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                self._protocol, address.host, address.port, ssl=tls, backlog=_BACKLOG, reuse_address=True
            )
        except (OSError, UnicodeError) as error:
            raise HostError(f"cannot listen on {address.host}:{address.port}: {error}") from error
        self._servers.append(server)
        self._start_sweeping()
        names = [listener.getsockname() for listener in server.sockets]
        return [TcpAddress(str(name[0]), int(name[1])) for name in names]

    async def stop_accepting(self) -> None:
        """New connections are refused, idle ones closed; requests under way go on."""
        for server in self._servers:
            server.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()
        for connection in list(self.state.connections):
            if isinstance(connection, Connection):
                connection.shutdown()

    async def settle(self, *, grace_s: float) -> None:
        """Returns when no request is under way any more, or after `grace_s`."""
        if self.state.tasks:
            await asyncio.wait(set(self.state.tasks), timeout=grace_s)

    async def close(self, *, grace_s: float) -> None:
        """Gives requests under way `grace_s`, then ends them. Afterwards nothing of the server is left."""
        await self.stop_accepting()
        if grace_s > 0:
            await self.settle(grace_s=grace_s)
        for connection in list(self.state.connections):
            connection.shutdown()
        left = [task for task in self.state.tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in list(self.state.connections):
            connection.transport.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    def _protocol(self) -> asyncio.Protocol:
        return Connection(self._config, self.state, {})

    def _start_sweeping(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), name="api deadlines")

    async def _sweep(self) -> None:
        # One timer for all connections: a request costs no timer of its own.
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            for connection in list(self.state.connections):
                if isinstance(connection, Connection) and now >= connection.due:
                    connection.expire()


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

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
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

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._progress = True

    def on_message_complete(self) -> None:
        self._progress = self._in_head = True
        super().on_message_complete()
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


def load_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises HostError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise HostError(f"cannot use the certificate {certificate} with the key {key}: {error}") from error
    return context


def check_socket_path(path: Path) -> None:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise InvalidArgumentError(
            f"the path of the socket has {len(os.fsencode(path))} bytes; the most is {SOCKET_PATH_BYTES_MAX}: {path}",
            hint="choose a shorter run directory with --run-dir",
        )


def _bind_unix(path: Path) -> socket.socket:
    check_socket_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise HostError(f"{path} is there and is not a socket")
            path.unlink()
        # Before bind, so that there is no moment at which others could connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise HostError(f"cannot listen on {path}: {error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
