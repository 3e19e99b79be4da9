"""Frames between node and agent; the same framing carries output and streams to the SDK.

    u32be length | u8 type | u32be stream | body          length counts type, stream and body (5 … 1 MiB)

A DATA body is `u8 channel | u64be offset | u64be sequence | bytes`; every other body is one msgpack map.
The contract is docs/internals/protocol.md; native/protocol is its twin, and native/protocol/vectors binds both.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

from dsec.core.errors import ProtocolError
from dsec.core.limits import DATA_BYTES_MAX, FRAME_BYTES_MAX

PREAMBLE_MAGIC = b"DSEC"
PREAMBLE_BYTES = 20  # magic and a 16-byte nonce

_HEADER = struct.Struct(">IBI")
_DATA = struct.Struct(">BQQ")
_FULL = struct.Struct(">IBIBQQ")
_DATA_OVERHEAD = 5 + _DATA.size
LARGE_BYTES: Final = 80 << 10  # bodies from here on are put together in place; output of execs comes in smaller pieces


class FrameType(enum.IntEnum):
    HELLO = 1
    REQ = 2
    RES = 3
    ERR = 4
    DATA = 5
    CREDIT = 6
    END = 7
    EVENT = 8


class Channel(enum.IntEnum):
    IN = 0
    OUT = 1
    ERR = 2


class Frame(NamedTuple):
    type: int
    stream: int
    body: bytes
    payload: bytes | memoryview = b""
    """What follows `body`, apart so that large content is not copied within a process: see `data_frame`, `data_of`."""

    @property
    def size(self) -> int:
        return len(self.body) + len(self.payload)


class Data(NamedTuple):
    channel: int
    offset: int  # bytes of this channel before these
    sequence: int  # chunks of this exec before this one, over both channels
    payload: bytes


def encode_frame(type: int, stream: int, body: bytes) -> bytes:
    length = 5 + len(body)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes is over {FRAME_BYTES_MAX}")
    return _HEADER.pack(length, type, stream) + body


def encode_data(stream: int, channel: int, offset: int, sequence: int, payload: bytes | memoryview) -> bytes:
    if len(payload) > DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA payload of {len(payload)} bytes is over {DATA_BYTES_MAX}")
    head = _FULL.pack(_DATA_OVERHEAD + len(payload), FrameType.DATA, stream, channel, offset, sequence)
    return head + payload


def data_head(stream: int, channel: int, offset: int, sequence: int, size: int) -> bytes:
    """What comes before a payload of `size` bytes, for who writes both without joining them."""
    if size > DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA payload of {size} bytes is over {DATA_BYTES_MAX}")
    return _FULL.pack(_DATA_OVERHEAD + size, FrameType.DATA, stream, channel, offset, sequence)


def data_frame(channel: int, offset: int, sequence: int, payload: bytes | memoryview) -> Frame:
    """A frame that is not bytes yet; its payload is not copied."""
    if len(payload) > DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA payload of {len(payload)} bytes is over {DATA_BYTES_MAX}")
    return Frame(FrameType.DATA, 0, _DATA.pack(channel, offset, sequence), payload)


def data_of(frame: Frame) -> Data:
    """The content of a DATA frame, however it was made."""
    if not frame.payload:
        return decode_data(frame.body)
    channel, offset, sequence = _DATA.unpack(frame.body)
    return Data(channel, offset, sequence, cast(bytes, frame.payload))  # used as bytes are: cut, measured, written


def encode_data_body(channel: int, offset: int, sequence: int, payload: bytes | memoryview) -> bytes:
    """The body alone, for a Frame that is not bytes yet."""
    if len(payload) > DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA payload of {len(payload)} bytes is over {DATA_BYTES_MAX}")
    return _DATA.pack(channel, offset, sequence) + payload


def decode_data(body: bytes | memoryview) -> Data:
    if len(body) < _DATA.size or len(body) > _DATA.size + DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA body of {len(body)} bytes")
    channel, offset, sequence = _DATA.unpack_from(body)
    if channel > Channel.ERR:
        raise ProtocolError(f"a DATA frame for channel {channel}")
    return Data(channel, offset, sequence, cast(bytes, body[_DATA.size :]))


class FrameDecoder:
    """Incremental: feed bytes as they come, iterate over whole frames. Holds at most one frame and one read.

    The body of a large DATA frame is put together in place and is then a memoryview: `room` is where the rest of one
    that has begun belongs, for who can read into it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._large: tuple[int, int, memoryview] | None = None  # type, stream, body
        self._had = 0  # of the large body

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Raises ProtocolError on an impossible length or type; the channel is then unusable."""
        if (room := self.room()) is not None:
            view = memoryview(data)
            count = min(len(room), len(view))
            room[:count] = view[:count]
            yield from self.filled(count)
            data = view[count:]
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _HEADER.size:
                length, type, stream = _HEADER.unpack_from(self._buffer, position)
                if not 5 <= length <= FRAME_BYTES_MAX:
                    raise ProtocolError(f"a frame length of {length}")
                if not FrameType.HELLO <= type <= FrameType.EVENT:
                    raise ProtocolError(f"a frame of type {type}")
                start, end = position + _HEADER.size, position + 4 + length
                if len(self._buffer) < end:
                    if type == FrameType.DATA and LARGE_BYTES <= length <= _DATA_OVERHEAD + DATA_BYTES_MAX:
                        self._begin_large(type, stream, length - 5, start)
                        position = len(self._buffer)
                    break
                with memoryview(self._buffer) as whole:
                    body = bytes(whole[start:end])
                position = end
                yield Frame(type, stream, body)
        finally:
            del self._buffer[:position]

    def room(self) -> memoryview | None:
        """Where the next bytes belong, when a large frame has begun; `filled` follows."""
        return None if self._large is None else self._large[2][self._had :]

    def filled(self, count: int) -> Iterator[Frame]:
        self._had += count
        if self._large is not None and self._had == len(self._large[2]):
            (type, stream, body), self._large = self._large, None
            yield Frame(type, stream, cast(bytes, body))

    def _begin_large(self, type: int, stream: int, size: int, start: int) -> None:
        body = memoryview(bytearray(size))
        self._had = len(self._buffer) - start
        with memoryview(self._buffer) as whole:
            body[: self._had] = whole[start:]
        self._large = (type, stream, body)

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer) + (0 if self._large is None else self._had)
