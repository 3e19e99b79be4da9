"""A stream within one process: two ends, each direction bounded, so that a slow reader holds back its writer."""

from __future__ import annotations

import asyncio
from collections import deque

from dsec.core.errors import UnavailableError
from dsec.core.limits import STREAM_QUEUE_BYTES_MAX, STREAM_QUEUE_FRAMES_MAX
from dsec.wire.frames import Frame


class StreamEnd:
    """One end (`wire.node.Stream`). Made by `stream_pair`."""

    def __init__(self, inbound: Lane, outbound: Lane) -> None:
        self._in = inbound
        self._out = outbound

    async def send(self, frame: Frame) -> None:
        """Waits while the other side is behind. Raises UnavailableError once either side has closed."""
        await self._out.put(frame)

    async def recv(self) -> Frame | None:
        """The next frame, None after the other side's close. Raises the error with which it closed."""
        return await self._in.get()

    async def close(self, error: BaseException | None = None) -> None:
        """Idempotent. What was sent before still arrives, then the end or the error; what comes in is dropped."""
        self.shut(error)

    def shut(self, error: BaseException | None = None) -> None:
        self._out.finish(error)
        self._in.abandon()

    @property
    def queued_bytes(self) -> int:
        """What waits to be received at this end."""
        return self._in.size_bytes


def stream_pair() -> tuple[StreamEnd, StreamEnd]:
    one, other = Lane(), Lane()
    return StreamEnd(one, other), StreamEnd(other, one)


class Lane:
    """One direction. Bounded by frames and bytes; a single frame of any legal size always fits an empty lane."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self.size_bytes = 0
        self._finished = False  # the writer has closed
        self._abandoned = False  # the reader has closed
        self._error: BaseException | None = None
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[asyncio.Future[None]] = deque()

    async def put(self, frame: Frame) -> None:
        while True:
            if self._abandoned or self._finished:
                raise UnavailableError("the stream is closed")
            if not self._frames or self._has_room(frame.size):
                break
            await _wait(self._writers)
        self._frames.append(frame)
        self.size_bytes += frame.size
        _wake_one(self._readers)
        if self._has_room(0):
            _wake_one(self._writers)

    def push(self, frame: Frame) -> None:
        """Without waiting: for who bounds it by other means."""
        if not self._abandoned and not self._finished:
            self._frames.append(frame)
            self.size_bytes += frame.size
            _wake_one(self._readers)

    async def get(self) -> Frame | None:
        while not self._frames:
            if self._abandoned or self._finished:
                if self._error is not None and not self._abandoned:
                    raise self._error
                return None
            await _wait(self._readers)
        frame = self._frames.popleft()
        self.size_bytes -= frame.size
        _wake_one(self._writers)
        if self._frames:
            _wake_one(self._readers)
        return frame

    def finish(self, error: BaseException | None) -> None:
        if not self._finished:
            self._finished = True
            self._error = error
            self._wake_all()

    def abandon(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            self._frames.clear()
            self.size_bytes = 0
            self._wake_all()

    def _has_room(self, more_bytes: int) -> bool:
        return len(self._frames) < STREAM_QUEUE_FRAMES_MAX and self.size_bytes + more_bytes <= STREAM_QUEUE_BYTES_MAX

    def _wake_all(self) -> None:
        for waiter in (*self._readers, *self._writers):
            if not waiter.done():
                waiter.set_result(None)


async def _wait(queue: deque[asyncio.Future[None]]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    queue.append(waiter)
    try:
        await waiter
    except asyncio.CancelledError:
        # Woken and cancelled in one turn of the loop: the wake-up belongs to the next in line.
        if waiter.done() and not waiter.cancelled():
            _wake_one(queue)
        raise
    finally:
        if waiter in queue:
            queue.remove(waiter)


def _wake_one(queue: deque[asyncio.Future[None]]) -> None:
    while queue:
        waiter = queue.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return
