"""Bodies of calls and answers, which may be larger than one packet."""

from __future__ import annotations

from typing import Final

from dsec.cluster.link.connection import Connection
from dsec.core.errors import LimitError, ProtocolError
from dsec.core.limits import LINK_BODY_BYTES_MAX, LINK_PART_BYTES
from dsec.wire.link import Kind, with_head

_PARTED: Final = LINK_PART_BYTES


class Assembly:
    """A body on its way in."""

    def __init__(self, size: int) -> None:
        """Raises ProtocolError for a size above LINK_BODY_BYTES_MAX."""
        if not 0 <= size <= LINK_BODY_BYTES_MAX:
            raise ProtocolError(f"a body of {size} bytes")
        self.size = size
        self._parts: list[bytes] = []
        self._had = 0

    def add(self, part: bytes) -> bool:
        """Whether it is whole now. Raises ProtocolError for more than was announced."""
        self._had += len(part)
        if self._had > self.size:
            raise ProtocolError(f"a body of {self.size} bytes goes on after its end")
        self._parts.append(part)
        return self._had == self.size

    def body(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


def check_size(body: bytes) -> None:
    if len(body) > LINK_BODY_BYTES_MAX:
        raise LimitError(f"a body of {len(body)} bytes is over {LINK_BODY_BYTES_MAX}")


async def send_body(connection: Connection, kind: Kind, id: int, head: bytes, body: bytes) -> None:
    """In parts, between which others have their turns."""
    if len(body) <= _PARTED:
        await connection.send_in_turn(kind, id, *with_head(head, body))
        return
    view = memoryview(body)
    await connection.send_in_turn(kind, id, *with_head(head, view[:_PARTED]))
    for start in range(_PARTED, len(body), _PARTED):
        await connection.send_in_turn(Kind.PART, id, view[start : start + _PARTED])
