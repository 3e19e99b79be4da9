"""The ends of a link whose two sandboxes are on two nodes: bytes in frames, as `streams.relay` has them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from dsec.core.errors import ProtocolError, UnavailableError
from dsec.core.limits import LINK_CHUNK_BYTES
from dsec.wire.codec import pack
from dsec.wire.frames import Channel, Frame, FrameType, data_frame, data_of
from dsec.wire.node import Done, Stream
from dsec.wire.peers import LinkDial

if TYPE_CHECKING:
    from dsec.agent.transfers import Duplex


class Far(Protocol):
    """Other nodes of the cluster."""

    async def dial(self, dial: LinkDial) -> Stream:
        """To the sandbox that is meant, which its node connects to. Raises DsecError."""
        ...


class FarConnection:
    """To a port of a sandbox on another node. One task reads, one writes; each side closes for itself."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sent = 0

    async def begun(self) -> None:
        """The other node has connected. Raises the error with which it has not."""
        frame = await self._stream.recv()
        if frame is None or frame.type != FrameType.RES:
            raise UnavailableError("the other node did not connect")

    async def receive(self) -> bytes | None:
        """The next piece; None when the other side has closed its half."""
        frame = await self._stream.recv()
        if frame is None:
            raise UnavailableError("the other node has cut the connection")
        if frame.type == FrameType.END:
            return None
        data = data_of(frame) if frame.type == FrameType.DATA else None
        if data is None or data.channel != Channel.OUT:
            raise ProtocolError(f"a frame of type {frame.type} where data was expected")
        return data.payload

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), LINK_CHUNK_BYTES):
            piece = data[start : start + LINK_CHUNK_BYTES]
            await self._stream.send(data_frame(Channel.IN, self._sent, 0, piece))
            self._sent += len(piece)

    async def end(self) -> None:
        await self._stream.send(Frame(FrameType.END, 0, pack(Done())))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The other side cuts, and does not end, what has not come to its end here.
        await self._stream.close(None if error is None else UnavailableError("the connection was cut"))


class InPieces:
    """A connection inside, of which no piece is larger than other nodes take (`streams.Relayed`)."""

    def __init__(self, inside: Duplex) -> None:
        self._inside = inside
        self._left = b""

    async def receive(self) -> bytes | None:
        if not self._left:
            found = await self._inside.receive()
            if found is None:
                return None
            self._left = found
        piece, self._left = self._left[:LINK_CHUNK_BYTES], self._left[LINK_CHUNK_BYTES:]
        return piece

    async def send(self, data: bytes) -> None:
        await self._inside.send(data)

    def send_end(self) -> None:
        self._inside.send_end()

    async def __aenter__(self) -> Self:
        await self._inside.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inside.__aexit__(kind, error, trace)
