"""The fake agent's end of one channel: opening, frames, streams, credit both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from dsec.backends.fake.failures import AgentFailure
from dsec.core.errors import ProtocolError
from dsec.core.limits import CREDIT_INITIAL_BYTES, DATA_BYTES_MAX
from dsec.wire import agent
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import (
    PREAMBLE_BYTES,
    PREAMBLE_MAGIC,
    Channel,
    Frame,
    FrameDecoder,
    FrameType,
    decode_data,
    encode_data,
    encode_frame,
)

_GRANT_BYTES: Final = CREDIT_INITIAL_BYTES // 4


class Service(Protocol):
    """What answers."""

    def hello(self) -> agent.HelloReply: ...

    def opened(self, connection: AgentConnection) -> None: ...

    def lost(self, connection: AgentConnection) -> None: ...

    def request(self, stream: ServerStream, op: str, args: Any) -> None: ...


class AgentConnection(asyncio.Protocol):
    """Drops the connection on any violation by the host, as the real agent does."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._scan: bytearray | None = bytearray()
        self._decoder = FrameDecoder()
        self._greeted = False
        self._last_id = -1
        self._streams: dict[int, ServerStream] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.drop()
        self._service.lost(self)

    def data_received(self, data: bytes) -> None:
        try:
            if self._scan is not None:
                data = self._find_preamble(data)
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except ProtocolError:
            self.abort()

    def write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def _find_preamble(self, data: bytes) -> bytes:
        assert self._scan is not None
        self._scan += data
        at = self._scan.find(PREAMBLE_MAGIC)
        if at < 0:
            del self._scan[: -len(PREAMBLE_MAGIC)]
            return b""
        if len(self._scan) - at < PREAMBLE_BYTES:
            return b""
        marker, rest = bytes(self._scan[at : at + PREAMBLE_BYTES]), bytes(self._scan[at + PREAMBLE_BYTES :])
        self._scan = None
        self._service.opened(self)
        self.write(marker)
        return rest

    def _on_frame(self, frame: Frame) -> None:
        if not self._greeted:
            self._on_hello(frame)
        elif frame.type == FrameType.REQ:
            self._on_request(frame)
        elif (stream := self._streams.get(frame.stream)) is not None:
            stream.on_frame(frame)
        elif frame.stream > self._last_id or frame.stream % 2 == 0:
            raise ProtocolError("a frame for a stream that was never opened")

    def _on_hello(self, frame: Frame) -> None:
        if frame.type != FrameType.HELLO or frame.stream != 0:
            raise ProtocolError("something else than hello")
        hello = unpack(frame.body, agent.Hello)
        if hello.generation_max < agent.GENERATION_MIN or hello.generation_min > agent.GENERATION_MAX:
            error = agent.AgentError("no_common_generation", f"this agent speaks {agent.GENERATION_MIN} only")
            self.write(encode_frame(FrameType.ERR, 0, pack(error)))
            self.close()
            return
        self._greeted = True
        self.write(encode_frame(FrameType.HELLO, 0, pack(self._service.hello())))

    def _on_request(self, frame: Frame) -> None:
        if frame.stream % 2 == 0 or frame.stream <= self._last_id:
            raise ProtocolError("a stream id that is even or was used before")
        self._last_id = frame.stream
        stream = ServerStream(self, frame.stream)
        self._streams[frame.stream] = stream
        try:
            request = unpack(frame.body, agent.Request)
        except ProtocolError as error:
            stream.fail(AgentFailure("invalid", str(error)))
            return
        self._service.request(stream, request.op, request.args)


class ServerStream:
    """One stream as the agent sees it. A handler sets what happens on input, on its end and when it is given up."""

    __slots__ = (
        "_changed",
        "_connection",
        "_credit",
        "_expected",
        "_owed",
        "_task",
        "_window",
        "host_ended",
        "id",
        "on_cancel",
        "on_credit",
        "on_data",
        "on_end",
        "open",
        "skips",
    )

    def __init__(self, connection: AgentConnection, id: int) -> None:
        self.id = id
        self.open = True
        self.host_ended = False
        self.on_data: Callable[[int, bytes], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_cancel: Callable[[], None] | None = None
        self.on_credit: Callable[[], None] | None = None
        self.skips = False  # input may begin at any offset, for an exec's stdin
        self._connection = connection
        self._credit = CREDIT_INITIAL_BYTES
        self._window = CREDIT_INITIAL_BYTES
        self._owed = 0
        self._expected = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def credit(self) -> int:
        return self._credit

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """The stream's own task: a failure becomes ERR, and it ends with the connection."""
        self._task = asyncio.get_running_loop().create_task(self._guard(work))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except AgentFailure as failure:
            self.fail(failure)

    def reply(self, record: Any, *, last: bool = False) -> None:
        self._write(encode_frame(FrameType.RES, self.id, pack(record)))
        if last:
            self._leave()

    def fail(self, failure: AgentFailure) -> None:
        error = agent.AgentError(failure.code, failure.message, failure.errno)
        self._write(encode_frame(FrameType.ERR, self.id, pack(error)))
        self._leave()

    def event(self, record: Any) -> None:
        self._write(encode_frame(FrameType.EVENT, self.id, pack(record)))

    def end(self, record: Any, *, last: bool = True) -> None:
        self._write(encode_frame(FrameType.END, self.id, pack(record)))
        if last:
            self._leave()

    def over(self) -> None:
        """Both sides have ended."""
        self._leave()

    def data(self, channel: int, offset: int, sequence: int, payload: bytes | memoryview) -> None:
        """Within the credit: callers look at `credit` first."""
        self._credit -= len(payload)
        self._write(encode_data(self.id, channel, offset, sequence, bytes(payload)))

    async def send(self, offset: int, payload: bytes) -> int:
        """Sends on channel 1 as credit allows; returns the offset after it."""
        left = memoryview(payload)
        while left and self.open:
            if self._credit <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            size = min(len(left), self._credit, DATA_BYTES_MAX)
            self.data(Channel.OUT, offset, 0, left[:size])
            offset += size
            left = left[size:]
        return offset

    def grant(self, size: int) -> None:
        """The input was consumed."""
        self._owed += size
        if self._owed >= _GRANT_BYTES:
            self._window += self._owed
            self._write(encode_frame(FrameType.CREDIT, self.id, pack(agent.Credit(self._owed))))
            self._owed = 0

    def on_frame(self, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            self._on_data(frame.body)
        elif frame.type == FrameType.CREDIT:
            credit = unpack(frame.body, agent.Credit).bytes
            if credit <= 0:
                raise ProtocolError("credit of nothing")
            self._credit += credit
            self._changed.set()
            if self.on_credit is not None:
                self.on_credit()
        elif frame.type == FrameType.END:
            self._on_end(unpack(frame.body, agent.StdinEnd))
        elif frame.type == FrameType.ERR:
            self.fail(AgentFailure("cancelled", "given up by the host"))
            self.drop()
        else:
            raise ProtocolError(f"a frame of type {frame.type} from the host")

    def drop(self) -> None:
        """The stream is over without a word: its connection is lost, or it was given up."""
        self.open = False
        if self._task is not None:
            self._task.cancel()
        if self.on_cancel is not None:
            self.on_cancel()

    def _on_data(self, body: bytes) -> None:
        channel, offset, _, payload = decode_data(body)
        if channel != Channel.IN or self.on_data is None or self.host_ended:
            raise ProtocolError("data that no one asked for")
        if not self.skips and offset != self._expected:
            raise ProtocolError("data with a hole")
        self._expected = offset + len(payload)
        self._window -= len(payload)
        if self._window < 0:
            raise ProtocolError("data beyond the credit")
        self.on_data(offset, payload)

    def _on_end(self, end: agent.StdinEnd) -> None:
        if self.host_ended:
            raise ProtocolError("a second end")
        self.host_ended = True
        if self.on_end is not None:
            self.on_end()

    def _write(self, frame: bytes) -> None:
        if self.open:
            self._connection.write(frame)

    def _leave(self) -> None:
        self.open = False
        self._connection.forget(self.id)
