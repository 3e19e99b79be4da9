"""One stream of an agent channel: its reply, its data in both directions, its credit, its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dsec.agent.errors import error_from_agent, fresh
from dsec.core.errors import ConflictError, DsecError, ProtocolError
from dsec.core.limits import CREDIT_INITIAL_BYTES, DATA_BYTES_MAX, MIB, WATCH_EVENTS_QUEUED_MAX
from dsec.wire import agent
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Channel, Data, FrameType, data_head, decode_data, encode_frame

GRANT_BYTES: Final = (
    CREDIT_INITIAL_BYTES // 4
)  # grants are gathered up to this, so that small chunks cost no frame each
CHUNKS_MAX: Final = 1024  # unconsumed chunks of a stream kept apart; above it they are joined
JOIN_BYTES_MAX: Final = 64 * 1024
# An agent grants what it has consumed, so one window; stdin that it still held from streams of before may add to it.
CREDIT_OUTSTANDING_MAX: Final = 64 * CREDIT_INITIAL_BYTES
GRANTS_MAX: Final = 4_096  # CREDIT frames on a stream, over and above those that follow from what was sent
GRANTS_PER_FRAME: Final = 64  # one DATA frame, consumed in pieces of 4 KiB
OFFSET_MAX: Final = 1 << 62
EVENT_BYTES_MAX: Final = 8 * MIB  # events that nobody has taken; they have no credit


class StreamOwner(Protocol):
    """What a stream needs of its channel."""

    def write(self, frame: bytes) -> None: ...

    def write_data(self, head: bytes, payload: memoryview) -> None: ...

    async def writable(self) -> None: ...

    def forget(self, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What the agent may send on a stream of one operation."""

    reply: type[Any]
    check: Callable[[Any], None] | None = None  # of the reply; raises ProtocolError
    offsets: Callable[[Any], dict[int, int]] | None = None  # reply → first offset of each channel that it may send
    end: type[Any] | None = agent.Empty  # body of its END; None: it sends none
    end_check: Callable[[Any], None] | None = None
    event: type[Any] | None = None
    event_check: Callable[[Any], None] | None = None
    both_end: bool = False  # over only when both sides have ended
    bytes_max: int | None = None  # of its data in all


class Call:
    """A unary operation: one reply or error, and the stream is over."""

    __slots__ = ("_check", "_op", "_owner", "_reply_type", "future", "id")

    def __init__(
        self, owner: StreamOwner, id: int, op: str, reply: type[Any], check: Callable[[Any], None] | None
    ) -> None:
        self.id = id
        self._owner = owner
        self._op = op
        self._reply_type = reply
        self._check = check
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_frame(self, type: int, body: bytes) -> None:
        """Raises ProtocolError for what the contract does not allow."""
        if type == FrameType.RES:
            reply = unpack(body, self._reply_type)
            if self._check is not None:
                self._check(reply)
            self._owner.forget(self.id)
            if not self.future.done():
                self.future.set_result(reply)
        elif type == FrameType.ERR:
            error = error_from_agent(unpack(body, agent.AgentError), self._op)
            self._owner.forget(self.id)
            self.fail(error)
        else:
            raise ProtocolError(f"a frame of type {type} on a stream for {self._op}")

    def fail(self, error: DsecError) -> None:
        if not self.future.done():
            self.future.set_exception(fresh(error))


class AgentStream:
    """A stream that stays open. One task receives and one sends; what is buffered is bounded by the credit granted.

    The agent may send up to 256 KiB that nobody has taken. `receive` grants what it hands over.
    """

    __slots__ = (
        "_agent_ended",
        "_cancelled",
        "_chunks",
        "_credit",
        "_end",
        "_error",
        "_event_bytes",
        "_events",
        "_grants_left",
        "_host_ended",
        "_next",
        "_op",
        "_overflow",
        "_owed",
        "_owner",
        "_received",
        "_receiver",
        "_replied",
        "_reply",
        "_sender",
        "_sent",
        "_sequence",
        "_shape",
        "_window",
        "id",
        "over",
    )

    def __init__(self, owner: StreamOwner, id: int, op: str, shape: Shape) -> None:
        self.id = id
        self._owner = owner
        self._op = op
        self._shape = shape
        self.over = False  # nothing more comes or goes
        self._reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replied = False
        self._next: dict[int, int] = {}
        self._sequence: dict[int, int] = {}
        self._chunks: deque[_Chunk] = deque()
        self._events: deque[tuple[int, Any]] = deque()
        self._event_bytes = 0
        self._overflow = False
        self._received = 0
        self._window = CREDIT_INITIAL_BYTES  # what the agent may still send
        self._owed = 0  # taken by the consumer and not granted again yet
        self._credit = CREDIT_INITIAL_BYTES  # what we may still send
        self._grants_left = GRANTS_MAX
        self._sent = 0
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self._agent_ended = False
        self._host_ended = False
        self._cancelled = False
        self._end: Any = None
        self._error: DsecError | None = None

    # -- for the caller ----------------------------------------------------------------------------

    async def reply(self) -> Any:
        """The agent's RES. Raises the typed error of its ERR, or of the lost channel."""
        return await self._reply

    async def receive(self) -> Data | None:
        """The next chunk; None once the agent has ended. Taking a chunk grants its size again.

        Raises the error with which the stream ended; of a lost channel at once, of an ERR after what came before it.
        """
        while not self._chunks:
            if self._error is not None:
                raise fresh(self._error)
            if self._agent_ended:
                return None
            await self._wait_receive()
        chunk = self._chunks.popleft()
        self._grant(chunk.size)
        return chunk.take()

    async def receive_event(self) -> Any | None:
        """The next event; None once the agent has ended. Raises as `receive` does."""
        while not self._events:
            if self._error is not None:
                raise fresh(self._error)
            if self._agent_ended:
                return None
            await self._wait_receive()
        size, event = self._events.popleft()
        self._event_bytes -= size
        if not self._events:
            self._overflow = False
        return event

    async def send(self, payload: bytes | bytearray | memoryview, *, channel: int = Channel.IN) -> None:
        """Sends all of it, waiting for the agent's credit. Raises the stream's error; ConflictError when it is over."""
        view = memoryview(payload)
        while view:
            while self._credit <= 0:
                self._check_sendable()
                await self._wait_send()
            await self._owner.writable()
            self._check_sendable()
            size = min(len(view), self._credit, DATA_BYTES_MAX)
            if size <= 0:
                continue
            self._owner.write_data(data_head(self.id, channel, self._sent, 0, size), view[:size])
            self._credit -= size
            self._grants_left += GRANTS_PER_FRAME
            self._sent += size
            view = view[size:]

    def send_end(self) -> None:
        """No more input. Nothing when that was said, or when the stream is over."""
        if self._host_ended or self._cancelled or self.over:
            return
        self._host_ended = True
        self._owner.write(encode_frame(FrameType.END, self.id, pack(agent.StdinEnd(self._sent))))
        self._leave_if_ended()

    def cancel(self) -> None:
        """Give up: what the agent still sends is dropped. Idempotent; nothing when the stream is over."""
        if self._cancelled or self.over:
            return
        self._cancelled = True
        self._chunks.clear()
        self._events.clear()
        self._owner.write(
            encode_frame(FrameType.ERR, self.id, pack(agent.AgentError("cancelled", "given up by the host")))
        )
        self._error = ConflictError(f"{self._op}: the stream was cancelled", detail={"code": "cancelled"})
        self._wake()

    def widen(self, bytes: int) -> None:
        """The agent may have so much more under way at once: for one that sends much."""
        self._window += bytes
        self._owner.write(encode_frame(FrameType.CREDIT, self.id, pack(agent.Credit(bytes))))

    def start_sending_at(self, offset: int) -> None:
        """The offset of the next byte that is sent: where an exec's stdin goes on."""
        self._sent = offset

    @property
    def sent(self) -> int:
        return self._sent

    @property
    def end(self) -> Any:
        """The body of the agent's END; None before."""
        return self._end

    # -- for the channel ---------------------------------------------------------------------------

    def on_frame(self, type: int, body: bytes) -> None:
        """Raises ProtocolError for what the contract does not allow."""
        if type == FrameType.DATA:
            self._on_data(decode_data(body))
        elif type == FrameType.CREDIT:
            self._on_credit(unpack(body, agent.Credit).bytes)
        elif type == FrameType.END:
            self._on_end(body)
        elif type == FrameType.EVENT:
            self._on_event(body)
        elif type == FrameType.RES:
            self._on_reply(body)
        elif type == FrameType.ERR:
            self._on_error(body)
        else:
            raise ProtocolError(f"a frame of type {type} on a stream for {self._op}")

    def fail(self, error: DsecError) -> None:
        """The channel is lost: every waiter fails at once, and what was buffered is dropped."""
        self._chunks.clear()
        self._events.clear()
        self.over = True
        self._settle(error)

    # -- frames ------------------------------------------------------------------------------------

    def _on_reply(self, body: bytes) -> None:
        if self._replied:
            raise ProtocolError(f"a second reply to {self._op}")
        reply = unpack(body, self._shape.reply)
        if self._shape.check is not None:
            self._shape.check(reply)
        if self._shape.offsets is not None:
            self._next = self._shape.offsets(reply)
        self._replied = True
        if not self._reply.done():
            self._reply.set_result(reply)

    def _on_data(self, data: Data) -> None:
        channel, offset, sequence, payload = data
        if not self._replied or self._agent_ended:
            raise ProtocolError(f"data out of turn on a stream for {self._op}")
        expected = self._next.get(channel)
        if expected is None:
            raise ProtocolError(f"data of channel {channel} on a stream for {self._op}")
        if offset != expected or offset > OFFSET_MAX:
            raise ProtocolError(f"data of {self._op} at offset {offset} where {expected} follows")
        size = len(payload)
        if size == 0:
            raise ProtocolError(f"an empty chunk on a stream for {self._op}")
        if size > self._window:
            raise ProtocolError(f"{self._op}: {size} bytes where {self._window} were granted")
        if not self._sequence.get(channel, 0) <= sequence <= OFFSET_MAX:
            raise ProtocolError(f"{self._op}: sequence number {sequence} falls")
        self._received += size
        if self._shape.bytes_max is not None and self._received > self._shape.bytes_max:
            raise ProtocolError(f"{self._op}: more than the {self._shape.bytes_max} bytes that were asked for")
        self._window -= size
        self._next[channel] = offset + size
        if self._cancelled:
            return
        self._sequence[channel] = sequence
        self._keep(channel, offset, sequence, payload)
        self._wake_receiver()

    def _keep(self, channel: int, offset: int, sequence: int, payload: bytes) -> None:
        """Joins small neighbours: a command that writes byte by byte must not cost us an object a byte."""
        chunks = self._chunks
        if chunks:
            last = chunks[-1]
            if last.channel == channel and last.size + len(payload) <= JOIN_BYTES_MAX:
                last.add(payload)
                return
            if len(chunks) >= CHUNKS_MAX:
                # Only alternating tiny chunks that nobody takes come here. Their order across the two pipes is best
                # effort by contract, so each joins the last of its own channel.
                for other in reversed(chunks):
                    if other.channel == channel and other.size + len(payload) <= DATA_BYTES_MAX:
                        other.add(payload)
                        return
                    if other.channel == channel:
                        break
        chunks.append(_Chunk(channel, offset, sequence, payload))

    def _on_credit(self, amount: int) -> None:
        self._grants_left -= 1
        if amount <= 0 or self._credit + amount > CREDIT_OUTSTANDING_MAX or self._grants_left < 0:
            raise ProtocolError(f"{self._op}: credit of {amount} bytes where {self._credit} are granted")
        self._credit += amount
        self._wake_sender()

    def _on_event(self, body: bytes) -> None:
        if self._shape.event is None or not self._replied or self._agent_ended:
            raise ProtocolError(f"an event on a stream for {self._op}")
        event = unpack(body, self._shape.event)
        if self._shape.event_check is not None:
            self._shape.event_check(event)
        if self._cancelled or self._overflow:
            return
        if len(self._events) >= WATCH_EVENTS_QUEUED_MAX or self._event_bytes >= EVENT_BYTES_MAX:
            # Events have no credit. Here too a full queue gives one overflow event, and the rest is not kept.
            self._overflow = True
            event = agent.WatchEvent(kind="overflow")
        self._events.append((len(body), event))
        self._event_bytes += len(body)
        self._wake_receiver()

    def _on_end(self, body: bytes) -> None:
        if self._shape.end is None or not self._replied or self._agent_ended:
            raise ProtocolError(f"an end out of turn on a stream for {self._op}")
        end = unpack(body, self._shape.end)
        if self._shape.end_check is not None:
            self._shape.end_check(end)
        self._end = end
        self._agent_ended = True
        self._leave_if_ended()
        self._wake()

    def _on_error(self, body: bytes) -> None:
        error = error_from_agent(unpack(body, agent.AgentError), self._op)
        self._leave()
        self._settle(error)

    # -- inside ------------------------------------------------------------------------------------

    def _settle(self, error: DsecError) -> None:
        if self._error is None:
            self._error = error
        if not self._reply.done():
            self._reply.set_exception(fresh(self._error))
        self._wake()

    def _leave_if_ended(self) -> None:
        if self._agent_ended and (self._host_ended or not self._shape.both_end):
            self._leave()

    def _leave(self) -> None:
        self.over = True
        self._owner.forget(self.id)

    def _grant(self, size: int) -> None:
        self._owed += size
        if self._owed >= GRANT_BYTES and not self._agent_ended and self._error is None:
            self._owner.write(encode_frame(FrameType.CREDIT, self.id, pack(agent.Credit(self._owed))))
            self._window += self._owed
            self._owed = 0

    def _check_sendable(self) -> None:
        if self._error is not None:
            raise fresh(self._error)
        if self._host_ended:
            raise ConflictError(f"{self._op}: the end of input was sent already")
        if self._agent_ended and not self._shape.both_end:
            raise ConflictError(f"{self._op}: it has ended and takes no more input", detail={"code": "ended"})

    async def _wait_receive(self) -> None:
        assert self._receiver is None, "one task receives"
        self._receiver = asyncio.get_running_loop().create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None

    async def _wait_send(self) -> None:
        assert self._sender is None, "one task sends"
        self._sender = asyncio.get_running_loop().create_future()
        try:
            await self._sender
        finally:
            self._sender = None

    def _wake(self) -> None:
        self._wake_receiver()
        self._wake_sender()

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def _wake_sender(self) -> None:
        if self._sender is not None and not self._sender.done():
            self._sender.set_result(None)


class _Chunk:
    """A chunk that waits for the consumer, and grows by its neighbours."""

    __slots__ = ("_payload", "channel", "offset", "sequence", "size")

    def __init__(self, channel: int, offset: int, sequence: int, payload: bytes) -> None:
        self.channel = channel
        self.offset = offset
        self.sequence = sequence
        self.size = len(payload)
        self._payload: bytes | bytearray = payload

    def add(self, payload: bytes) -> None:
        if isinstance(self._payload, bytes):
            self._payload = bytearray(self._payload)
        self._payload += payload
        self.size += len(payload)

    def take(self) -> Data:
        payload = self._payload
        # One that came in a large frame is handed on as it is; no view of a buffer that may still grow gets out.
        whole = bytes(payload) if isinstance(payload, bytearray) else payload
        return Data(self.channel, self.offset, self.sequence, whole)
