"""The way to the agent of a guest by two serial ports, each a socket of the monitor (docs/internals/protocol.md, 8)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.backends.vm.qmp import MonitorError, connect_socket
from dsec.wire.frames import PREAMBLE_BYTES

_MAGIC: Final = b"RING"
_LEFT: Final = b"LEFT"
_PASSED_BYTES_MAX: Final = 64 * PREAMBLE_BYTES  # of earlier connections' bells
_CONNECT_S: Final = 10.0


class AgentPorts:
    """Of one machine. The newest connection supersedes the one of before."""

    def __init__(self, directory: Path, *, owner: int) -> None:
        self._directory = directory
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._bell: asyncio.Transport | None = None
        self._turn = asyncio.Lock()

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float = _CONNECT_S
    ) -> asyncio.Transport:
        """Raises MonitorError: nobody answers, or not in time."""
        async with self._turn:
            self.close()
            mark = _MAGIC + os.urandom(PREAMBLE_BYTES - len(_MAGIC))
            try:
                async with asyncio.timeout(timeout_s):
                    bell = await self._ring(mark)
                    try:
                        return await self._follow(factory, mark, bell)
                    except BaseException:
                        bell.close()
                        raise
            except TimeoutError as error:
                raise MonitorError(f"the agent did not answer the bell within {timeout_s:g} s") from error

    def close(self) -> None:
        """The monitor serves one connection of each port at a time."""
        for transport in (self._transport, self._bell):
            if transport is not None:
                transport.abort()
        self._transport = self._bell = None

    async def _ring(self, mark: bytes) -> socket.socket:
        """The agent has let go of the connection of before when this returns."""
        loop = asyncio.get_running_loop()
        bell = await connect_socket(self._directory / "bell", timeout_s=_CONNECT_S, owner=self._owner)
        try:
            await loop.sock_sendall(bell, mark)
            heard, passed = b"", 0
            while mark not in heard:
                more = await loop.sock_recv(bell, _PASSED_BYTES_MAX)
                passed += len(more)
                if not more:
                    raise MonitorError("the machine has ended")
                if passed > _PASSED_BYTES_MAX:
                    raise MonitorError("the bell says much, and not what was rung")
                heard = (heard + more)[-2 * _PASSED_BYTES_MAX :]
        except OSError as error:
            bell.close()
            raise MonitorError(f"the machine has ended: {error}") from error
        except BaseException:
            bell.close()
            raise
        return bell

    async def _follow(
        self, factory: Callable[[], asyncio.Protocol], mark: bytes, bell: socket.socket
    ) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        data = await connect_socket(self._directory / "agent", timeout_s=_CONNECT_S, owner=self._owner)
        try:
            await loop.sock_sendall(data, mark)
            transport, _ = await loop.create_unix_connection(factory, sock=data)
        except OSError as error:
            data.close()
            raise MonitorError(f"the machine has ended: {error}") from error
        except BaseException:
            data.close()
            raise
        self._transport = transport
        self._bell, _ = await loop.create_unix_connection(lambda: _Bell(transport, mark), sock=bell)
        return transport


class _Bell(asyncio.Protocol):
    """Tells when the agent has let go, which a port does not; and bounds what it may say."""

    def __init__(self, transport: asyncio.Transport, mark: bytes) -> None:
        self._data = transport
        self._left = _LEFT + mark[len(_LEFT) :]
        self._heard = b""
        self._passed = 0

    def data_received(self, data: bytes) -> None:
        self._heard = (self._heard + data)[-2 * PREAMBLE_BYTES :]
        self._passed += len(data)
        if self._left in self._heard or self._passed > _PASSED_BYTES_MAX:
            self._data.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._data.abort()
