"""One stream on a connection: a lane in, and a window out that the other side opens as it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dsec.cluster.link.connection import Connection
from dsec.cluster.streams import Lane
from dsec.core.errors import ProtocolError, UnavailableError
from dsec.core.limits import FRAME_BYTES_MAX, LINK_FRAME_COST_BYTES, STREAM_QUEUE_BYTES_MAX
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import ErrorBody, body_of, error_of
from dsec.wire.frames import Frame
from dsec.wire.link import Kind, pack_credit, unpack_credit

_WINDOW: Final = STREAM_QUEUE_BYTES_MAX
_QUARTER: Final = _WINDOW // 4


class LinkStream:
    """One end (`wire.node.Stream`). `ended` is called once both sides have closed."""

    def __init__(
        self, connection: Connection, id: int, ended: Callable[[], None], *, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        """`frame_bytes_max`: of what comes in."""
        self._connection = connection
        self._id = id
        self._ended = ended
        self._frame_bytes_max = frame_bytes_max
        self._in = Lane()
        self._held = 0  # came in and is not granted back, whether it was read or not
        self._owed = 0  # read, and not granted back yet
        self._out = 0  # sent, and not granted back yet
        self._senders: set[asyncio.Future[None]] = set()  # that wait for room
        self._closed = False  # by us
        self._peer_closed = asyncio.Event()

    # -- wire.node.Stream --------------------------------------------------------------------------

    async def send(self, frame: Frame) -> None:
        cost = _cost(frame)
        while not self._closed and not self._peer_closed.is_set() and self._is_full(cost):
            await self._change()
        if self._closed or self._peer_closed.is_set():
            raise UnavailableError("the stream is closed")
        self._out += cost
        try:
            await self._connection.send_in_turn(Kind.FRAME, self._id, bytes((frame.type,)), frame.body, frame.payload)
        except BaseException:
            self._out -= cost  # cancelled before its turn
            raise

    async def recv(self) -> Frame | None:
        frame = await self._in.get()
        if frame is not None:
            self._owed += _cost(frame)
            if self._owed >= _QUARTER and not self._peer_closed.is_set():
                self._connection.send(Kind.CREDIT, self._id, pack_credit(self._owed))
                self._held -= self._owed
                self._owed = 0
        return frame

    async def close(self, error: BaseException | None = None) -> None:
        self.shut(error)

    def shut(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._in.abandon()
        self._connection.send(Kind.CLOSE, self._id, *(() if error is None else (pack(body_of(error)),)))
        self._wake()
        if self._peer_closed.is_set():
            self._ended()

    # -- of the connection -------------------------------------------------------------------------

    def take(self, kind: int, body: bytes) -> None:
        """Raises ProtocolError."""
        match kind:
            case Kind.FRAME:
                self._take_frame(body)
            case Kind.CREDIT:
                self._out = max(self._out - unpack_credit(body), 0)
                self._wake()
            case Kind.CLOSE:
                self.end(error_of(unpack(body, ErrorBody)) if body else None)
            case _:
                raise ProtocolError(f"a packet of kind {kind} for a stream")

    def end(self, error: BaseException | None) -> None:
        """The other side has closed, or is gone."""
        if self._peer_closed.is_set():
            return
        self._peer_closed.set()
        self._in.finish(error)
        self._wake()
        if self._closed:
            self._ended()

    async def other_side(self) -> None:
        """Returns once it has closed."""
        await self._peer_closed.wait()

    def _take_frame(self, body: bytes) -> None:
        if not body or len(body) > self._frame_bytes_max + 1:
            raise ProtocolError(f"a frame of {len(body)} bytes")
        frame = Frame(body[0], 0, body[1:])
        self._held += _cost(frame)
        if self._held > _WINDOW + self._frame_bytes_max + LINK_FRAME_COST_BYTES:
            raise ProtocolError("more was sent on a stream than was granted")
        if not self._closed and not self._peer_closed.is_set():
            self._in.push(frame)

    def _is_full(self, cost: int) -> bool:
        # A sender that holds a quarter or less may send a frame of any size. The reader grants by quarters, so one of
        # them always has something to do.
        return self._out > _QUARTER and self._out + cost > _WINDOW

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._senders.add(waiter)
        try:
            await waiter
        finally:
            self._senders.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._senders:
            if not waiter.done():
                waiter.set_result(None)


def _cost(frame: Frame) -> int:
    return frame.size + LINK_FRAME_COST_BYTES
