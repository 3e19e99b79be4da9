"""One connection to one agent: opening, multiplexing, and closing on whatever the contract does not allow.

Everything that comes from the agent is hostile input. Every bound is checked before anything is kept for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar, cast

from dsec.agent.checks import check_hello
from dsec.agent.errors import error_from_agent, fresh
from dsec.agent.streams import AgentStream, Call, Shape
from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    DsecError,
    LimitError,
    Outcome,
    ProtocolError,
    UnavailableError,
)
from dsec.core.limits import (
    DATA_BYTES_MAX,
    FRAME_BYTES_MAX,
    MIB,
    PREAMBLE_SCAN_BYTES_MAX,
    PREAMBLE_TIMEOUT_S,
    STREAMS_MAX,
)
from dsec.wire import agent
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import PREAMBLE_BYTES, PREAMBLE_MAGIC, Frame, FrameDecoder, FrameType, encode_frame

T = TypeVar("T")

Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[asyncio.Transport]]
"""`Instance.connect`: a new byte channel to the agent."""

REQUEST_TIMEOUT_S: Final = 30.0
UNSENT_BYTES_MAX: Final = 8 * MIB  # control frames wait for nothing; an agent that reads none of them is broken
LATE_FRAMES_MAX: Final = 4_096  # frames that crossed the end of their stream, over and above four a stream
FRAMES_PER_TURN: Final = 256  # then the loop is given back: an agent that sends tiny frames must not starve others
LATER_S: Final = 0.02
_WRITE_HIGH_BYTES: Final = 2 * DATA_BYTES_MAX
_STREAM_LAST: Final = 0xFFFF_FFFF


class AgentChannel:
    """An open channel. It is never reused: once lost, every waiter has failed, and the owner opens another.

        channel = await AgentChannel.open(instance.connect, sandbox=instance.id)
        listing = await channel.request(agent.Op.EXECS, {}, agent.ExecList)
        channel.close()

    All methods belong to one event loop. Errors: `ProtocolError` when the agent broke the contract, `UnavailableError`
    when the connection ended, and the typed error of an ERR frame.
    """

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox
        self._hello: agent.HelloReply | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[DsecError] = asyncio.get_running_loop().create_future()
        self._failure: DsecError | None = None
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._marker: bytes | None = PREAMBLE_MAGIC + os.urandom(PREAMBLE_BYTES - len(PREAMBLE_MAGIC))
        self._scan = bytearray()
        self._scanned = 0
        self._streams: dict[int, Call | AgentStream] = {}
        self._next_id = 1
        self._late = 0
        self._later = b""
        self._later_timer: asyncio.TimerHandle | None = None
        self._resumed: asyncio.Future[None] | None = None  # set while the transport is full

    @classmethod
    async def open(cls, connect: Connect, *, sandbox: str, timeout_s: float = PREAMBLE_TIMEOUT_S) -> AgentChannel:
        """Connects and says hello. Raises DeadlineError, ProtocolError, UnavailableError, UnsupportedError (no common
        generation) or what `connect` raises; no connection is left then.
        """
        channel = cls(sandbox)
        try:
            async with asyncio.timeout(timeout_s):
                await connect(cast(Any, lambda: _Wire(channel)))
                await channel._opened
        except TimeoutError as error:
            failure = DeadlineError(
                f"the agent of {sandbox} did not say hello within {timeout_s:g} s", outcome=Outcome.UNCHANGED
            )
            channel._fail(failure)
            raise failure from error
        except BaseException:
            channel.close()
            raise
        return channel

    @property
    def hello(self) -> agent.HelloReply:
        """What the agent said when the channel opened: its boot id, and every exec that it still knows."""
        assert self._hello is not None, "the channel has not opened"
        return self._hello

    @property
    def failure(self) -> DsecError | None:
        """Why the channel is closed; None while it is open."""
        return self._failure

    async def closed(self) -> DsecError:
        """Returns the reason once the channel is closed. Several may wait."""
        return await asyncio.shield(self._closed)

    async def request(
        self,
        op: str,
        args: Any,
        reply: type[T],
        *,
        check: Callable[[T], None] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> T:
        """A unary operation. Raises DeadlineError (outcome unknown: it may still happen), LimitError, CapacityError."""
        try:
            async with asyncio.timeout(timeout_s):
                body = self._request_body(op, args)
                await self.writable()
                call = Call(self, self._new_id(), op, reply, check)
                self._start(call, body)
                result: T = await call.future
                return result
        except TimeoutError as error:
            # The stream stays in the table until the agent answers; their number is bounded.
            raise DeadlineError(f"the agent did not answer {op} within {timeout_s:g} s") from error

    def request_later(self, op: str, args: Any) -> None:
        """A unary operation whose answer nobody waits for. It goes with the next frame, or after LATER_S: a wake-up of
        the agent, and its answer, are saved where requests follow each other. Lost with the channel."""
        if self._failure is not None or len(self._streams) >= STREAMS_MAX:
            return
        call = Call(self, self._new_id(), op, agent.Empty, None)
        call.future.add_done_callback(_forget)
        self._streams[call.id] = call
        self._later += encode_frame(FrameType.REQ, call.id, self._request_body(op, args))
        if self._later_timer is None:
            self._later_timer = asyncio.get_running_loop().call_later(LATER_S, self._write_later)

    async def open_stream(
        self, op: str, args: Any, shape: Shape, *, timeout_s: float | None = REQUEST_TIMEOUT_S
    ) -> tuple[AgentStream, Any]:
        """A stream and the agent's reply. Whoever gets it reads it to its end or cancels it. Raises as `request`."""
        stream: AgentStream | None = None
        try:
            async with asyncio.timeout(timeout_s):
                body = self._request_body(op, args)
                await self.writable()
                stream = AgentStream(self, self._new_id(), op, shape)
                self._start(stream, body)
                return stream, await stream.reply()
        except TimeoutError as error:
            if stream is not None:
                stream.cancel()
            raise DeadlineError(f"the agent did not answer {op} within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            raise

    def close(self) -> None:
        """Idempotent. Whoever still waits fails with UnavailableError."""
        self._fail(UnavailableError(f"the channel to the agent of {self.sandbox} was closed"))

    # -- for streams -------------------------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        """Sends now, or never: nothing is written to a closed channel."""
        transport = self._transport
        if self._failure is not None or transport is None:
            return
        if self._later_timer is not None:
            self._later_timer.cancel()
            self._later_timer = None
            frame, self._later = self._later + frame, b""
        transport.write(frame)
        if self._resumed is not None and transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._fail(ProtocolError(f"the agent of {self.sandbox} does not read what it is sent"))

    def _write_later(self) -> None:
        self.write(b"")

    def write_data(self, head: bytes, payload: memoryview) -> None:
        """A DATA frame, its payload not copied where the transport can help it."""
        if self._failure is None and self._transport is not None:
            self._transport.writelines((head, payload))

    async def writable(self) -> None:
        """Returns when the transport takes more. Raises the channel's failure."""
        while self._resumed is not None and self._failure is None:
            await asyncio.shield(self._resumed)
        self._check_open()

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)

    # -- for the wire ------------------------------------------------------------------------------

    def _connected(self, transport: asyncio.Transport) -> None:
        if self._failure is not None:
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        assert self._marker is not None
        # Hello follows at once: the agent reads on behind the preamble, and a turn is saved.
        hello = agent.Hello(agent.GENERATION_MIN, agent.GENERATION_MAX, self.sandbox)
        transport.write(self._marker + encode_frame(FrameType.HELLO, 0, pack(hello)))

    def _lost(self, error: Exception | None) -> None:
        failure = UnavailableError(f"the connection to the agent of {self.sandbox} ended")
        failure.__cause__ = error
        self._fail(failure)

    def _pause(self) -> None:
        if self._resumed is None:
            self._resumed = asyncio.get_running_loop().create_future()

    def _resume(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    def _received(self, data: bytes) -> None:
        if self._failure is not None:
            return
        try:
            if self._marker is not None:
                data = self._scan_for_marker(data, self._marker)
        except ProtocolError as error:
            self._violated(error)
            return
        self._handle(self._decoder.feed(data))

    def _read(self, count: int) -> None:
        """So many bytes were read to where the decoder wanted them, or to the scratch buffer."""
        if self._decoder.room() is None:
            # A copy: frames may be handled in a later turn, and others read into the buffer before.
            self._received(bytes(_SCRATCH[:count]))
        elif self._failure is None:
            self._handle(self._decoder.filled(count))

    def _handle(self, frames: Iterator[Frame], *, paused: bool = False) -> None:
        """A turn's worth of frames; reading is paused while there are more."""
        left = FRAMES_PER_TURN
        try:
            for frame in frames:
                self._on_frame(frame.type, frame.stream, frame.body)
                if self._failure is not None:
                    return
                left -= 1
                if left == 0:
                    self._handle_later(frames, paused=paused)
                    return
        except ProtocolError as error:
            self._violated(error)
            return
        if paused and self._transport is not None:
            self._transport.resume_reading()

    def _handle_later(self, frames: Iterator[Frame], *, paused: bool) -> None:
        if not paused and self._transport is not None:
            self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._handle_rest, frames)

    def _handle_rest(self, frames: Iterator[Frame]) -> None:
        if self._failure is None:
            self._handle(frames, paused=True)

    def _violated(self, error: ProtocolError) -> None:
        self._fail(ProtocolError(f"the agent of {self.sandbox} broke the protocol: {error.message[:500]}"))

    def _scan_for_marker(self, data: bytes, marker: bytes) -> bytes:
        """What follows the echo, else nothing. Keeps at most the marker's length between two reads."""
        self._scan += data
        found = self._scan.find(marker)
        self._scanned += len(data)
        if found < 0:
            if self._scanned > PREAMBLE_SCAN_BYTES_MAX:
                raise ProtocolError(f"{self._scanned} bytes came without the echo of the preamble")
            del self._scan[: -(PREAMBLE_BYTES - 1)]
            return b""
        rest = bytes(self._scan[found + len(marker) :])
        self._scan.clear()
        self._marker = None
        return rest

    def _on_frame(self, type: int, stream: int, body: bytes) -> None:
        if self._hello is None:
            self._on_hello(type, stream, body)
            return
        target = self._streams.get(stream)
        if target is not None:
            target.on_frame(type, body)
        elif stream % 2 == 0 or stream >= self._next_id:
            raise ProtocolError(f"a frame of type {type} for stream {stream}, which was never opened")
        elif type not in (FrameType.CREDIT, FrameType.ERR):
            raise ProtocolError(f"a frame of type {type} for stream {stream}, which is over")
        else:
            self._late += 1
            if self._late > LATE_FRAMES_MAX + 2 * self._next_id:
                raise ProtocolError(f"{self._late} frames for streams that are over")

    def _on_hello(self, type: int, stream: int, body: bytes) -> None:
        if stream != 0:
            raise ProtocolError(f"a frame for stream {stream} before hello")
        if type == FrameType.ERR:
            self._fail(error_from_agent(unpack(body, agent.AgentError), "hello"))
            return
        if type != FrameType.HELLO:
            raise ProtocolError(f"a frame of type {type} instead of hello")
        hello = unpack(body, agent.HelloReply)
        check_hello(hello)
        if not agent.GENERATION_MIN <= hello.generation <= agent.GENERATION_MAX:
            raise ProtocolError(f"the agent chose generation {hello.generation}, which was not offered")
        self._hello = hello
        if not self._opened.done():
            self._opened.set_result(None)

    # -- inside ------------------------------------------------------------------------------------

    def _request_body(self, op: str, args: Any) -> bytes:
        body = pack(agent.Request(str(op), args))
        if len(body) + 5 > FRAME_BYTES_MAX:
            raise LimitError(f"the arguments of {op} have {len(body)} bytes; the most is {FRAME_BYTES_MAX - 5}")
        return body

    def _new_id(self) -> int:
        self._check_open()
        if len(self._streams) >= STREAMS_MAX:
            raise CapacityError(f"{STREAMS_MAX} streams are open on the channel to {self.sandbox}", retry_after_s=1.0)
        if self._next_id > _STREAM_LAST:
            failure = UnavailableError("the channel has used up its stream ids")
            self._fail(failure)
            raise fresh(failure)
        self._next_id += 2
        return self._next_id - 2

    def _start(self, target: Call | AgentStream, body: bytes) -> None:
        self._streams[target.id] = target
        self.write(encode_frame(FrameType.REQ, target.id, body))

    def _check_open(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def _fail(self, error: DsecError) -> None:
        """Closes the channel; the first reason stays."""
        if self._failure is not None:
            return
        self._failure = error
        if self._later_timer is not None:
            self._later_timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        streams, self._streams = self._streams, {}
        for target in streams.values():
            target.fail(error)
        if not self._opened.done():
            self._opened.set_exception(fresh(error))
            self._opened.exception()  # nobody may be waiting: retrieved, so that asyncio does not complain
        if not self._closed.done():
            self._closed.set_result(error)
        self._resume()
        self._scan.clear()
        self._decoder = FrameDecoder()


_SCRATCH: Final = memoryview(bytearray(64 << 10))  # shared: what is read into it is taken out before the next read


def _forget(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()  # looked at, so that asyncio does not complain


class _Wire(asyncio.BufferedProtocol):
    """What the transport calls. Large frames are read into their place; for transports in memory there is
    `data_received`."""

    def __init__(self, channel: AgentChannel) -> None:
        self._channel = channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without being one.
        self._channel._connected(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._channel._received(data)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._channel._decoder.room() or _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        self._channel._read(nbytes)

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel._lost(exc)

    def pause_writing(self) -> None:
        self._channel._pause()

    def resume_writing(self) -> None:
        self._channel._resume()
