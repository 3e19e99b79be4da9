"""Answers that come as one JSON record a line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from dsec.core.errors import ProtocolError
from dsec.sdk.transport import decode_reply
from dsec.wire.errors import ErrorBody, error_of

if TYPE_CHECKING:
    from dsec.sdk.http import Response

T = TypeVar("T")
_LINE_BYTES_MAX: Final = 4 << 20


class _Last(msgspec.Struct):
    error: ErrorBody | None = None


async def json_lines(response: Response, kind: type[T]) -> AsyncIterator[T]:
    """Records as they come. A line `{"error": …}` and nothing else is raised as the error that it tells."""
    buffer = bytearray()
    async for piece in response.pieces():
        buffer += piece
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        if len(buffer) > _LINE_BYTES_MAX:
            raise ProtocolError("the service sent a line without an end")
        for line in lines:
            if not line.strip():
                continue
            if line.startswith(b'{"error":') and (found := decode_reply(bytes(line), _Last).error):
                raise error_of(found)
            yield decode_reply(bytes(line), kind)
