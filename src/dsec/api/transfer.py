"""Bytes of files between HTTP bodies and node streams, never more than a window of them in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from dsec.api.errors import Headers, RangeError
from dsec.api.request import ClientGoneError, Request
from dsec.core.errors import ProtocolError, UnavailableError
from dsec.core.limits import DATA_BYTES_MAX
from dsec.wire import agent
from dsec.wire.api import HEADER_FILE_INFO, TYPE_BYTES, TYPE_TAR
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Channel, Frame, FrameType, data_frame, data_of
from dsec.wire.node import Stream
from dsec.wire.records import FileInfo

_HEADER_CHARS_MAX = 8_000  # clients refuse longer ones


async def send_file(request: Request, stream: Stream, *, offset: int, length: int | None, partial: bool) -> None:
    """A file's bytes as the answer: RES FileInfo, DATA, END.

    A file that shrinks meanwhile cuts the connection short; one that grows is sent as long as it was.
    """
    info = await receive_info(stream)
    headers: Headers = [file_header(info), (b"accept-ranges", b"bytes")]
    if partial and offset >= max(info.size, 1):
        raise RangeError(info.size)
    left: int | None = None
    if info.size:  # files of /proc say 0 and have content
        left = info.size - offset if length is None else min(length, info.size - offset)
        headers.append((b"content-length", b"%d" % left))
    partial = partial and left is not None
    if partial:
        assert left is not None
        headers.append((b"content-range", b"bytes %d-%d/%d" % (offset, offset + left - 1, info.size)))
    await request.start(206 if partial else 200, TYPE_BYTES, headers)
    while left is None or left > 0:
        piece = await receive_piece(stream)
        if piece is None:
            break
        piece = piece if left is None else piece[:left]
        left = None if left is None else left - len(piece)
        await request.write(piece)
    if left:
        raise ProtocolError("the file became shorter while it was read")
    await request.end()


async def send_archive(request: Request, stream: Stream) -> None:
    info = await receive_info(stream)
    await request.start(200, TYPE_TAR, [file_header(info)])
    while (piece := await receive_piece(stream)) is not None:
        await request.write(piece)
    await request.end()


async def receive_info(stream: Stream) -> FileInfo:
    frame = await stream.recv()
    if frame is None or frame.type != FrameType.RES:
        raise ProtocolError("the node did not begin its answer with RES")
    return unpack(frame.body, FileInfo)


async def receive_piece(stream: Stream) -> bytes | None:
    """The next bytes, None at their end. Raises ProtocolError when the stream ends without END."""
    frame = await stream.recv()
    if frame is not None and frame.type == FrameType.DATA:
        return data_of(frame).payload
    if frame is not None and frame.type == FrameType.END:
        return None
    raise ProtocolError("the node's stream ended without END")


async def send_body(request: Request, stream: Stream) -> bytes:
    """The request's body into the stream; the body of the node's END.

    A body that is cut is not ended: the node then undoes the write. Raises what the node closed the stream with.
    """
    try:
        sender = DataSender(stream)
        async for chunk in request.chunks():
            await sender.send(chunk)
        await sender.end()
    except UnavailableError:
        await _why_closed(stream)
        raise
    except ClientGoneError:
        await stream.close(UnavailableError("the caller has gone away"))
        raise
    while (frame := await stream.recv()) is not None:
        if frame.type == FrameType.END:
            return frame.body
    raise ProtocolError("the node's stream ended without END")


class DataSender:
    """Bytes towards the node as DATA frames of channel 0, then END."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._offset = 0
        self._sequence = 0

    async def send(self, data: bytes) -> None:
        if len(data) <= DATA_BYTES_MAX:
            pieces: Iterable[bytes | memoryview] = (data,) if data else ()
        else:
            view = memoryview(data)
            pieces = (view[start : start + DATA_BYTES_MAX] for start in range(0, len(view), DATA_BYTES_MAX))
        for piece in pieces:
            await self._stream.send(data_frame(Channel.IN, self._offset, self._sequence, piece))
            self._offset += len(piece)
            self._sequence += 1

    async def end(self) -> None:
        await self._stream.send(Frame(FrameType.END, 0, pack(agent.StdinEnd(self._offset))))


def file_header(info: FileInfo) -> tuple[bytes, bytes]:
    """FileInfo as JSON of ASCII only, so that no name can break a header."""
    text = json.dumps(msgspec.to_builtins(info), separators=(",", ":"))
    if len(text) > _HEADER_CHARS_MAX:
        text = json.dumps(msgspec.to_builtins(msgspec.structs.replace(info, target=None, target_bytes=None)))
    return HEADER_FILE_INFO.lower().encode(), text.replace("\x7f", "\\u007f").encode()


async def _why_closed(stream: Stream) -> None:
    """Raises the node's error, if it closed the stream with one."""
    while await stream.recv() is not None:
        pass
