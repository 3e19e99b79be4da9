"""The way to the agent of a guest under Firecracker: its vsock, behind a socket of the monitor.

Whoever connects there says `CONNECT port`, is told `OK number` once the guest has taken it, and has a stream from then
on. Nobody listening is a connection that ends at once; a guest that does not run never answers.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.backends.vm.qmp import MonitorError, connect_socket

_ANSWER_BYTES_MAX: Final = 32
_TRY_S: Final = 2.0  # a guest that boots answers none of those that came before its driver was there
_POLL_S: Final = 0.01
_CONNECT_S: Final = 10.0


class _NotYetError(Exception):
    """The monitor is there, and the agent is not."""


class AgentVsock:
    """Of one machine. A new connection supersedes the one of before: its agent sees to that."""

    def __init__(self, path: Path, port: int, *, owner: int) -> None:
        self._path = path
        self._port = port
        self._owner = owner
        self._transport: asyncio.Transport | None = None

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float = _CONNECT_S
    ) -> asyncio.Transport:
        """Raises MonitorError: nobody answers in time, or the monitor is gone."""
        self.close()
        until = asyncio.get_running_loop().time() + timeout_s
        while True:
            left = until - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(0.0, min(_TRY_S, left))):
                    return await self._connect(factory)
            except (_NotYetError, TimeoutError, OSError) as error:
                if left <= _POLL_S:
                    raise MonitorError(f"the agent did not answer within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    async def _connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        connection = await connect_socket(self._path, timeout_s=_TRY_S, owner=self._owner)
        try:
            await loop.sock_sendall(connection, b"CONNECT %d\n" % self._port)
            await _taken(connection)
            transport, _ = await loop.create_unix_connection(factory, sock=connection)
        except BaseException:
            connection.close()
            raise
        self._transport = transport
        return transport


async def _taken(connection: socket.socket) -> None:
    """Byte by byte: what follows the line is the agent's."""
    said = b""
    while not said.endswith(b"\n"):
        more = await asyncio.get_running_loop().sock_recv(connection, 1)
        if not more:
            raise _NotYetError("nobody listens in the guest")
        said += more
        if len(said) > _ANSWER_BYTES_MAX:
            break
    if re.fullmatch(rb"OK \d+\n", said) is None:
        raise _NotYetError("the monitor's answer is strange")
