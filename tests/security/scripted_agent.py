"""An agent that says what a test tells it to, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dsec.agent.client import AgentClient
from dsec.backends.fake.transport import connect_in_memory
from dsec.wire import agent
from dsec.wire.codec import pack
from dsec.wire.frames import PREAMBLE_BYTES, Frame, FrameDecoder, FrameType, encode_data, encode_frame

HELLO = agent.HelloReply(1, "scripted", "boot")


class ScriptedAgent(asyncio.Protocol):
    """Echoes the preamble after `noise`, answers hello with `hello` (a record or raw frames), keeps what comes."""

    def __init__(self, *, hello: Any = HELLO, noise: bytes = b"", echo: bool = True) -> None:
        self.frames: list[Frame] = []
        self._hello = hello
        self._noise = noise
        self._echo = echo
        self._start = b""
        self._decoder = FrameDecoder()
        self._changed = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """As `Instance.connect`."""
        transport, _ = connect_in_memory(factory, lambda: self)
        return transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send(self._noise)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        if len(self._start) < PREAMBLE_BYTES:
            self._start += data
            if len(self._start) < PREAMBLE_BYTES or not self._echo:
                return
            self.send(self._start[:PREAMBLE_BYTES])
            data = self._start[PREAMBLE_BYTES:]
        for frame in self._decoder.feed(data):
            if frame.type == FrameType.HELLO:
                hello = self._hello
                self.send(hello if isinstance(hello, bytes) else encode_frame(FrameType.HELLO, 0, pack(hello)))
            self.frames.append(frame)
            self._changed.set()

    def send(self, data: bytes) -> None:
        assert self.transport is not None
        if data:
            self.transport.write(data)

    async def delivered(self, *, below: int = 1) -> None:
        """Returns once fewer bytes than this wait to be read by the host."""
        assert self.transport is not None
        # Nothing tells of a read in memory; each turn of the loop delivers a piece.
        while self.transport.get_write_buffer_size() >= below:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def request(self, op: str) -> int:
        """The stream of the last request for this operation, once it has come."""
        async with asyncio.timeout(60):
            while True:
                for frame in reversed(self.frames):
                    if frame.type == FrameType.REQ and op.encode() in frame.body:
                        return frame.stream
                self._changed.clear()
                await self._changed.wait()


async def scripted_client(**options: Any) -> tuple[ScriptedAgent, AgentClient]:
    scripted = ScriptedAgent(**options)
    return scripted, await AgentClient.connect(scripted.connect, sandbox="sbx", open_timeout_s=60.0)


def frame(type: int, stream: int, record: Any) -> bytes:
    return encode_frame(type, stream, record if isinstance(record, bytes) else pack(record))


def data(stream: int, channel: int, offset: int, payload: bytes, sequence: int = 0) -> bytes:
    return encode_data(stream, channel, offset, sequence, payload)
