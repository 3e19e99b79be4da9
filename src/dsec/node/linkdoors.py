"""Where a link begins: a port on the loopback of a sandbox, and the connections that come there.

Of a container the node listens there itself; of a machine its agent does, and hands each connection over.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Final, Protocol

from dsec.agent.transfers import Duplex
from dsec.core.errors import PathNotFoundError, UnavailableError, UnsupportedError
from dsec.core.limits import HOSTS_BYTES_MAX, LINK_CHUNK_BYTES
from dsec.core.states import SandboxState
from dsec.wire import agent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec.agent.client import AgentClient
    from dsec.node.supervisor import Supervisor

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing says that it was refused, and not that all was sent
_ALL_SENT: Final = struct.pack("ii", 0, 0)
_FEATURE: Final = "listen"  # of an agent
_HOSTS: Final = b"/etc/hosts"


class Arrived(Protocol):
    """A connection that came, as whoever made it sees the other side."""

    async def receive(self) -> bytes:
        """Empty: it has closed its half."""
        ...

    async def send(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    def whole(self) -> None:
        """All was sent both ways: closing it is its end, and no cut."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Door(Protocol):
    async def accept(self) -> Arrived:
        """Raises OSError or DsecError; then again, a little later."""
        ...

    def close(self) -> None: ...


class SocketDoor:
    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening

    async def accept(self) -> Arrived:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listening)
        return _OverSocket(connection)

    def close(self) -> None:
        self._listening.close()


class _OverSocket:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # until it is known that all was sent
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            connection.close()
            raise

    async def receive(self) -> bytes:
        return await self._loop.sock_recv(self._connection, LINK_CHUNK_BYTES)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._connection, data)

    async def end(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)

    def whole(self) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ALL_SENT)

    def close(self) -> None:
        self._connection.close()


class AgentDoor:
    def __init__(self, sandbox: Supervisor, address: str, port: int) -> None:
        self._sandbox = sandbox
        self._at = agent.ListenArgs(host=address, port=port)
        self._client: AgentClient | None = None  # over which it listens: with another connection it is asked anew

    async def open(self) -> AgentClient:
        """Raises FileError with its errno when the port is taken, UnsupportedError."""
        if self._sandbox.state in (SandboxState.PAUSING, SandboxState.PAUSED):
            raise UnavailableError("it is paused: what is lost of its links is made again when it runs")
        client = await self._sandbox.client()
        if client is not self._client:
            if _FEATURE not in client.hello.features:
                raise UnsupportedError("the agent of this machine knows no links: its image is of an older version")
            await client.listen(self._at)
            self._client = client
        return client

    async def accept(self) -> Arrived:
        return _OverAgent(await (await self.open()).accept(self._at))

    def close(self) -> None:
        """The agent closes it with the connection, at the latest; what it accepts until then nobody takes."""
        self._client = None


class _OverAgent:
    """The agent resets it when it is given up, and closes it when both sides have ended."""

    def __init__(self, connection: Duplex) -> None:
        self._connection = connection

    async def receive(self) -> bytes:
        return await self._connection.receive() or b""

    async def send(self, data: bytes) -> None:
        await self._connection.send(data)

    async def end(self) -> None:
        self._connection.send_end()

    def whole(self) -> None:
        """It knows."""

    def close(self) -> None:
        self._connection.cancel()


async def name_inside(client: AgentClient, addresses: Mapping[str, str]) -> None:
    """The names of links, in a machine whose /etc/hosts is its own. Once for each line. Raises FileError."""
    content = b""
    try:
        async with await client.read(agent.ReadArgs(path=_HOSTS, length=HOSTS_BYTES_MAX)) as download:
            async for piece in download:
                content += piece
    except PathNotFoundError:
        pass
    if len(content) >= HOSTS_BYTES_MAX:
        raise UnavailableError(f"/etc/hosts of the sandbox has {HOSTS_BYTES_MAX} bytes or more")
    known = set(content.splitlines())
    lines = [line for name, address in addresses.items() if (line := f"{address}\t{name}".encode()) not in known]
    if lines:
        # In place: it is a mount of its own, which nothing can take the place of.
        begin = b"" if not content or content.endswith(b"\n") else b"\n"
        await client.write(agent.WriteArgs(path=_HOSTS, append=True), begin + b"\n".join(lines) + b"\n")
