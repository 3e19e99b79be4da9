"""Two asyncio transports joined in memory, with the flow control and the endings of a socket pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

_HIGH_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 256 * 1024


class MemoryTransport(asyncio.Transport):
    """One end. What is written here is delivered to the peer's protocol in a later turn of the loop."""

    __slots__ = (
        "_buffer",
        "_closing",
        "_high",
        "_loop",
        "_lost",
        "_low",
        "_paused",
        "_peer",
        "_protocol",
        "_reading",
        "_scheduled",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._peer: MemoryTransport | None = None
        self._buffer = bytearray()  # written here, not yet read by the peer
        self._high = _HIGH_BYTES
        self._low = _HIGH_BYTES // 4
        self._paused = False
        self._reading = True
        self._closing = False
        self._lost = False
        self._scheduled = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._closing or self._lost or not data:
            return
        self._buffer += data
        if len(self._buffer) > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()
        self._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._peer is not None:
            self._peer._schedule()

    def is_reading(self) -> bool:
        return self._reading and not self._lost

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        """What was written is still delivered."""
        if not self._closing:
            self._closing = True
            self._schedule()

    def abort(self) -> None:
        self._buffer.clear()
        self.close()

    def _schedule(self) -> None:
        if not self._scheduled and not self._lost:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        peer = self._peer
        if self._lost or peer is None:
            return
        if not peer._reading and not peer._lost:
            return  # as with a socket, whoever does not read does not see the end either
        if self._buffer and not peer._lost:
            piece = bytes(self._buffer[:_PIECE_BYTES])
            del self._buffer[:_PIECE_BYTES]
            self._resume_if_low()
            peer._protocol.data_received(piece)
        if self._buffer and not peer._lost:
            self._schedule()
        elif self._closing:
            self._lose()
            peer._lose()

    def _resume_if_low(self) -> None:
        if self._paused and len(self._buffer) <= self._low:
            self._paused = False
            self._protocol.resume_writing()

    def _lose(self) -> None:
        if self._lost:
            return
        self._lost = True
        self._closing = True
        self._buffer.clear()
        self._loop.call_soon(self._protocol.connection_lost, None)


def connect_in_memory(
    host: Callable[[], asyncio.Protocol], agent: Callable[[], asyncio.Protocol]
) -> tuple[MemoryTransport, MemoryTransport]:
    """Both ends, connected: `connection_made` has been called on both protocols."""
    loop = asyncio.get_running_loop()
    host_end, agent_end = MemoryTransport(loop, host()), MemoryTransport(loop, agent())
    host_end._peer, agent_end._peer = agent_end, host_end
    agent_end._protocol.connection_made(agent_end)
    host_end._protocol.connection_made(host_end)
    return host_end, agent_end
