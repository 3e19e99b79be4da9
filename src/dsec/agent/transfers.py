"""Streams of files, changes and connections: what `AgentClient` hands out. Each is an async context manager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from dsec.agent.streams import AgentStream
from dsec.wire import agent
from dsec.wire.frames import Channel


class _Transfer:
    def __init__(self, stream: AgentStream) -> None:
        self._stream = stream

    def cancel(self) -> None:
        """Give up: the agent stops. Idempotent; nothing after the end."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Download(_Transfer):
    """Content that comes from the sandbox: a file's bytes, or a tar stream.

    async with await client.read(agent.ReadArgs(path=b"/etc/hostname")) as download:
        async for piece in download:
            target.write(piece)
    """

    def __init__(self, stream: AgentStream, stat: agent.FileStat) -> None:
        super().__init__(stream)
        self.stat = stat

    async def receive(self) -> bytes | None:
        """The next piece; None after the last. Raises FileError when the agent could not go on."""
        data = await self._stream.receive()
        return None if data is None else data.payload

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read()

    async def _read(self) -> AsyncIterator[bytes]:
        while (piece := await self.receive()) is not None:
            yield piece


class Upload(_Transfer):
    """Content that goes into the sandbox. Left without `finish`, a replacing write leaves no trace.

    async with await client.open_write(agent.WriteArgs(path=b"/tmp/x")) as upload:
        await upload.send(content)
        written = await upload.finish()
    """

    async def send(self, data: bytes) -> None:
        """Waits for the agent's credit. Raises the error with which the agent gave up, such as FileError ENOSPC."""
        await self._stream.send(data, channel=Channel.IN)

    async def finish(self) -> agent.Written:
        """End of input; returns when the agent has put it in place."""
        self._stream.send_end()
        await self._stream.receive()
        written: agent.Written = self._stream.end
        return written


class Watch(_Transfer):
    """Changes below a directory, as an async iterator. An `overflow` event says that some were lost."""

    async def receive(self) -> agent.WatchEvent | None:
        event: agent.WatchEvent | None = await self._stream.receive_event()
        return event

    def __aiter__(self) -> AsyncIterator[agent.WatchEvent]:
        return self._read()

    async def _read(self) -> AsyncIterator[agent.WatchEvent]:
        while (event := await self.receive()) is not None:
            yield event

    def stop(self) -> None:
        """The iterator ends after what has come already."""
        self._stream.send_end()


class Duplex(_Transfer):
    """A connection to a port or socket inside the sandbox. One task reads, one writes; each side closes for itself."""

    async def receive(self) -> bytes | None:
        """The next piece; None when the other side has closed its half."""
        data = await self._stream.receive()
        return None if data is None else data.payload

    async def send(self, data: bytes) -> None:
        await self._stream.send(data, channel=Channel.IN)

    def send_end(self) -> None:
        """Close our half. Idempotent."""
        self._stream.send_end()
