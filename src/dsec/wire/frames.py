"""Frames between node and agent; the same framing carries output and streams to the SDK.

    u32be length | u8 type | u32be stream | body          length counts type, stream and body (5 … 1 MiB)

A DATA body is `u8 channel | u64be offset | u64be sequence | bytes`; every other body is one msgpack map.
The contract is docs/internals/protocol.md; native/protocol is its twin, and native/protocol/vectors binds both.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from dsec.core.errors import ProtocolError
from dsec.core.limits import DATA_BYTES_MAX, FRAME_BYTES_MAX

PREAMBLE_MAGIC = b"DSEC"
PREAMBLE_BYTES = 20  # magic and a 16-byte nonce

_HEADER = struct.Struct(">IBI")
_DATA = struct.Struct(">BQQ")
_FULL = struct.Struct(">IBIBQQ")
_DATA_OVERHEAD = 5 + _DATA.size


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


def encode_data_body(channel: int, offset: int, sequence: int, payload: bytes | memoryview) -> bytes:
    """The body alone, for a Frame that is not bytes yet."""
    if len(payload) > DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA payload of {len(payload)} bytes is over {DATA_BYTES_MAX}")
    return _DATA.pack(channel, offset, sequence) + payload


def decode_data(body: bytes) -> Data:
    if len(body) < _DATA.size or len(body) > _DATA.size + DATA_BYTES_MAX:
        raise ProtocolError(f"a DATA body of {len(body)} bytes")
    channel, offset, sequence = _DATA.unpack_from(body)
    if channel > Channel.ERR:
        raise ProtocolError(f"a DATA frame for channel {channel}")
    return Data(channel, offset, sequence, body[_DATA.size :])


class FrameDecoder:
    """Incremental: feed bytes as they come, iterate over whole frames. Holds at most one frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Raises ProtocolError on an impossible length or type; the channel is then unusable."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _HEADER.size:
                length, type, stream = _HEADER.unpack_from(self._buffer, position)
                if not 5 <= length <= FRAME_BYTES_MAX:
                    raise ProtocolError(f"a frame length of {length}")
                if not FrameType.HELLO <= type <= FrameType.EVENT:
                    raise ProtocolError(f"a frame of type {type}")
                end = position + 4 + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[position + _HEADER.size : end])
                position = end
                yield Frame(type, stream, body)
        finally:
            del self._buffer[:position]

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)
