"""What `dsec-call` is told and what it answers (native/call/src/wire.rs): a length (u32, little endian) and one map.

Answers come out of a container: they are checked here, and one that is not as agreed is the end of that container.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.core.errors import ProtocolError
from dsec.wire.codec import pack, unpack

VERSION: Final = 3
MESSAGE_BYTES_MAX: Final = 64 << 20  # as the other side has it


class NewFile(msgspec.Struct, frozen=True, kw_only=True):
    path: bytes
    data: bytes
    mode: int


class Warm(msgspec.Struct, frozen=True, kw_only=True):
    argv: list[bytes]
    env: list[bytes]
    wait_ms: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    files: list[NewFile]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    argv: list[bytes]
    env: list[bytes]
    warm: bool
    stdin: bytes
    wall_ms: int
    cpu_ms: int
    output_bytes: int
    pids: int
    file_bytes: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    collect: list[bytes]
    bytes_max: int


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of these."""

    warm: Warm | None = None
    place: Place | None = None
    run: Run | None = None
    finish: Finish | None = None
    check: bool = False


class Ready(msgspec.Struct, frozen=True):
    version: int


class Placed(msgspec.Struct, frozen=True):
    directory: bytes


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    why: str  # ended | wall | cpu | output | start | lost
    code: int | None = None
    signal: int | None = None
    out: bytes = b""
    err: bytes = b""
    wall_us: int = 0
    cpu_us: int = 0
    rss_bytes: int = 0
    detail: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    files: list[NewFile] = []
    missing: list[bytes] = []
    dirty: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    ready: Ready | None = None
    placed: Placed | None = None
    ran: Ran | None = None
    finished: Finished | None = None
    refused: str | None = None


def encode(order: Order) -> bytes:
    body = pack(order)
    return len(body).to_bytes(4, "little") + body


class Decoder:
    """Bytes as they come, answers as they are complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        self._held += data

    def next(self) -> Answer | None:
        """Raises ProtocolError for what is no answer."""
        if len(self._held) < 4:
            return None
        length = int.from_bytes(self._held[:4], "little")
        if length > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"an answer of {length} bytes from a call's container")
        if len(self._held) < 4 + length:
            return None
        body = bytes(self._held[4 : 4 + length])
        del self._held[: 4 + length]
        return unpack(body, Answer)
