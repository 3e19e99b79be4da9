"""Frames of a connection between API and node, and the records at their beginning.

    u32be length | u8 kind | u32be id | body          length counts kind, id and body

The API connects, sends HELLO and gets WELCOME, or FAIL and the end. It chooses ids; a call or stream has one while it
lives. A body of a call or answer that is larger than a part follows in PARTs. Streams have a window in each direction:
who has more than a quarter of it not granted back yet waits. docs/internals/cluster.md says the rest.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from dsec.core.errors import ProtocolError
from dsec.core.limits import LINK_FRAME_BYTES_MAX
from dsec.wire.errors import ErrorBody
from dsec.wire.node import Caller
from dsec.wire.records import NodeLoad

GENERATION_MIN: Final = 1
GENERATION_MAX: Final = 1

_HEADER: Final = struct.Struct(">IBI")
_SIZE: Final = struct.Struct(">I")
_OVERHEAD: Final = 5  # kind and id


class Kind(enum.IntEnum):
    HELLO = 1  # Hello
    WELCOME = 2  # Welcome
    CALL = 3  # u32be size of head | CallHead | first part of the body
    PART = 4  # more of a body, in either direction
    ANSWER = 5  # u32be size of head | AnswerHead | first part of the body
    FAIL = 6  # Failed
    CANCEL = 7  # of a call: nobody waits for its answer
    FRAME = 8  # of a stream: u8 type | body
    CLOSE = 9  # of a stream: nothing more goes out and nothing is taken in; an ErrorBody, or nothing
    CREDIT = 10  # of a stream: u32be that may be sent again
    PING = 11  # a sign of life
    BYE = 12  # the node stops: what is under way is finished, nothing more is begun


class Hello(msgspec.Struct, frozen=True):
    low: int  # generations of this protocol that the API speaks
    high: int
    node: str  # who it means to speak to


class Welcome(msgspec.Struct, frozen=True):
    generation: int  # of this protocol, that both speak from here on
    node: str
    term: int  # of the node's membership; one that is older than what is known is of a process that is not in charge


class CallHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    method: str
    caller: Caller
    size: int  # of the whole body
    timeout_s: float = 0.0
    key: str | None = None
    stream: bool = False


class AnswerHead(msgspec.Struct, frozen=True):
    size: int
    load: NodeLoad


class Failed(msgspec.Struct, frozen=True):
    error: ErrorBody
    load: NodeLoad | None = None


class Packet(NamedTuple):
    kind: int
    id: int
    body: bytes


def packet(kind: Kind, id: int, *parts: bytes | memoryview) -> list[bytes | memoryview]:
    """Its bytes, not joined: large content is copied once, on its way out."""
    length = _OVERHEAD + sum(map(len, parts))
    return [_HEADER.pack(length, kind, id), *parts]


def with_head(head: bytes, body: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return _SIZE.pack(len(head)), head, body


def split_head(body: bytes) -> tuple[bytes, bytes]:
    """The head, and what came of the body. Raises ProtocolError."""
    if len(body) < _SIZE.size:
        raise ProtocolError("a call without a head")
    (size,) = _SIZE.unpack_from(body)
    if size > len(body) - _SIZE.size:
        raise ProtocolError(f"a head of {size} bytes in a frame of {len(body)}")
    return body[_SIZE.size : _SIZE.size + size], body[_SIZE.size + size :]


def pack_credit(size: int) -> bytes:
    return _SIZE.pack(size)


def unpack_credit(body: bytes) -> int:
    """Raises ProtocolError."""
    if len(body) != _SIZE.size:
        raise ProtocolError(f"a credit of {len(body)} bytes")
    return int(_SIZE.unpack(body)[0])


class PacketDecoder:
    """Incremental; holds at most one packet and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Raises ProtocolError on an impossible length; the connection is then unusable."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _HEADER.size:
                length, kind, id = _HEADER.unpack_from(self._buffer, position)
                if not _OVERHEAD <= length <= LINK_FRAME_BYTES_MAX + _OVERHEAD:
                    raise ProtocolError(f"a packet of {length} bytes")
                end = position + 4 + length
                if len(self._buffer) < end:
                    return
                with memoryview(self._buffer) as whole:
                    body = bytes(whole[position + _HEADER.size : end])
                position = end
                yield Packet(kind, id, body)
        finally:
            del self._buffer[:position]
