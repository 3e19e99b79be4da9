"""Ports inside on which the imagined agent listens for the host: each connection is taken by a stream of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from dsec.backends.fake.connection import ServerStream
from dsec.backends.fake.failures import AgentFailure
from dsec.wire import agent

_PIECE: Final = 64 * 1024


class Ports:
    def __init__(self, listen: Callable[[str, int], socket.socket]) -> None:
        """`listen`: raises OSError."""
        self._listen = listen
        self._open: dict[tuple[str, int], socket.socket] = {}

    def listen(self, stream: ServerStream, args: agent.ListenArgs) -> None:
        at = (args.host, args.port)
        if not args.host.startswith("127.") or not 0 < args.port < 1 << 16:
            raise AgentFailure("invalid", "an address of the loopback, and a port")
        if at not in self._open:
            try:
                self._open[at] = self._listen(*at)
            except OSError as error:
                number = errno.errorcode.get(error.errno or 0, "EIO")
                raise AgentFailure("connect_failed", os.strerror(error.errno or 0), number) from error
        stream.reply(agent.Empty(), last=True)

    def accept(self, stream: ServerStream, args: agent.ListenArgs) -> None:
        listening = self._open.get((args.host, args.port))
        if listening is None:
            raise AgentFailure("invalid", "nothing listens there")
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        stream.on_data = lambda _, data: pieces.put_nowait(data)
        stream.on_end = lambda: pieces.put_nowait(None)
        stream.run(_relay(stream, listening, pieces))

    def close(self) -> None:
        """With the connection of the host."""
        for listening in self._open.values():
            listening.close()
        self._open.clear()


async def _relay(stream: ServerStream, listening: socket.socket, pieces: asyncio.Queue[bytes | None]) -> None:
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listening)
    with connection:
        stream.reply(agent.Empty())

        async def up() -> None:
            sent = 0
            while data := await loop.sock_recv(connection, _PIECE):
                sent = await stream.send(sent, data)
            stream.end(agent.Empty(), last=False)

        async def down() -> None:
            while (piece := await pieces.get()) is not None:
                await loop.sock_sendall(connection, piece)
                stream.grant(len(piece))
            connection.shutdown(socket.SHUT_WR)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(up())
                group.create_task(down())
        except* OSError as error:
            raise AgentFailure("connect_failed", "the connection was reset", "ECONNRESET") from error
        stream.over()
