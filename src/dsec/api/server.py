"""Listening: uvicorn's protocols on our own sockets, from the first connection to the last."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from dsec.api.app import Application
from dsec.api.connection import Connection
from dsec.core.errors import ForbiddenError, HostError, InvalidArgumentError
from dsec.core.limits import KEEP_ALIVE_S, WEBSOCKET_MESSAGE_BYTES_MAX
from dsec.observe.logs import get_logger

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
            raise _no_listener(address, error) from error
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


def _no_listener(address: TcpAddress, error: OSError | UnicodeError) -> HostError:
    where = f"{address.host}:{address.port}"
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return HostError(
            f"cannot listen on {where}: another program does",
            hint=f"choose another port with --listen; `ss -ltnp 'sport = :{address.port}'` shows who has this one",
        )
    if number == errno.EACCES:
        return HostError(f"cannot listen on {where}: ports below 1024 are for root", hint="choose a higher one")
    if number == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return HostError(f"cannot listen on {where}: this machine has no such address", hint="`ip addr` shows which")
    return HostError(f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}")


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
