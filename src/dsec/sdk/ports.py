"""A connection to a port inside a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from dsec.core.errors import UnavailableError
from dsec.sdk.transport import Query, Transport

if TYPE_CHECKING:
    import aiohttp

_MESSAGE_BYTES: Final = 64 << 10


class AsyncConnection:
    """Bytes both ways. `write_eof` closes one direction, as `shutdown` does with a socket; `close` ends both."""

    def __init__(self, stack: AsyncExitStack, socket: aiohttp.ClientWebSocketResponse, transport: Transport) -> None:
        self._stack = stack
        self._socket = socket
        self._messages = transport.messages(socket)
        self._buffer = bytearray()
        self._eof = False
        self._wrote_eof = False
        self._reading = asyncio.Lock()

    async def read(self, max_bytes: int = 65_536) -> bytes:
        """At least one byte and at most `max_bytes`; empty at the other side's end-of-file.

        Raises UnavailableError when the connection is lost.
        """
        async with self._reading:
            while not self._buffer and not self._eof:
                message = await self._messages.receive()
                if message is None:
                    raise UnavailableError("the connection into the sandbox was lost")
                if isinstance(message, bytes):
                    self._eof = not message
                    self._buffer += message
            piece = bytes(self._buffer[:max_bytes])
            del self._buffer[: len(piece)]
            return piece

    async def read_exactly(self, count: int) -> bytes:
        """`count` bytes. Raises EOFError when there are fewer."""
        found = bytearray()
        while len(found) < count:
            piece = await self.read(count - len(found))
            if not piece:
                raise EOFError(f"the connection ended after {len(found)} of {count} bytes")
            found += piece
        return bytes(found)

    async def write(self, data: bytes) -> None:
        """Sends all of `data`; waits while the other side is behind."""
        if self._wrote_eof:
            raise BrokenPipeError("this direction has been closed")
        view = memoryview(data)
        for start in range(0, len(view), _MESSAGE_BYTES):
            await self._messages.send(bytes(view[start : start + _MESSAGE_BYTES]))

    async def write_eof(self) -> None:
        """The other side reads end-of-file. Reading goes on. Doing it twice is fine."""
        if not self._wrote_eof:
            self._wrote_eof = True
            await self._messages.send(b"")

    async def close(self) -> None:
        """Ends both directions. Doing it twice is fine."""
        await self._stack.aclose()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        while piece := await self.read():
            yield piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def open_connection(transport: Transport, path: str, query: Query) -> AsyncConnection:
    """Raises the error that the service tells when nobody listens."""
    async with AsyncExitStack() as stack:
        socket = await stack.enter_async_context(transport.websocket(path, query=query))
        connection = AsyncConnection(stack, socket, transport)
        first: Any = await connection._messages.receive()
        if first is None:
            raise UnavailableError("the connection into the sandbox was lost before it was made")
        connection._stack = stack.pop_all()
    return connection
