"""Output of an exec, from the node's record and then live: as frames, or as lines for curl."""

from __future__ import annotations

from typing import Final

from dsec.api.errors import error_line, told
from dsec.api.query import Kind, Param
from dsec.api.request import ClientGoneError, Request
from dsec.api.routing import Route
from dsec.core.errors import ProtocolError
from dsec.wire.api import TYPE_FRAMES, TYPE_NDJSON
from dsec.wire.codec import pack, to_json, unpack
from dsec.wire.frames import Frame, FrameType, decode_data, encode_frame
from dsec.wire.node import Method, OutputQuery, Right, Stream
from dsec.wire.records import ExecInfo, GapNotice

OFFSETS: Final = (
    Param("out", Kind.INT, "offset in stdout to begin at", default=0),
    Param("err", Kind.INT, "offset in stderr to begin at", default=0),
)


async def read_output(request: Request) -> None:
    query = OutputQuery(sandbox=request.sandbox, exec=request.exec, **request.query)
    stream = await request.open(Method.EXEC_OUTPUT, query)
    try:
        # Errors that come before any output have their own status.
        first = await stream.recv()
        if request.accepts(TYPE_NDJSON):
            await request.start(200, TYPE_NDJSON, [])
            await _lines(request, stream, first)
        else:
            await request.start(200, TYPE_FRAMES, [])
            await _frames(request, stream, first)
        await request.end()
    finally:
        await stream.close()


async def _frames(request: Request, stream: Stream, frame: Frame | None) -> None:
    try:
        while frame is not None:
            await request.write(encode_frame(frame.type, 0, frame.body))
            frame = await stream.recv()
    except ClientGoneError:
        raise
    except Exception as error:
        await request.write(encode_frame(FrameType.ERR, 0, pack(told(error))))


async def _lines(request: Request, stream: Stream, frame: Frame | None) -> None:
    try:
        while frame is not None:
            await request.write(_line(frame) + b"\n")
            frame = await stream.recv()
    except ClientGoneError:
        raise
    except Exception as error:
        await request.write(error_line(error) + b"\n")


def _line(frame: Frame) -> bytes:
    match frame.type:
        case FrameType.DATA:
            data = decode_data(frame.body)
            return to_json({"channel": data.channel, "offset": data.offset, "data": data.payload})
        case FrameType.EVENT:
            return to_json(unpack(frame.body, GapNotice))
        case FrameType.END:
            return to_json({"exec": unpack(frame.body, ExecInfo)})
    raise ProtocolError(f"the node sent a frame of type {frame.type}")


ROUTES = (
    Route(
        "GET",
        "/v1/sandboxes/{id}/execs/{exec}/output",
        read_output,
        "Output from the offsets on, then live until the exec's end. With `Accept: application/x-ndjson` as lines "
        "`{channel, offset, data}`, `{gap}`, and last `{exec}`.",
        Right.READ,
        params=(*OFFSETS, Param("follow", Kind.BOOL, "false: only what is recorded now", default=True)),
        answer={TYPE_FRAMES: bytes, TYPE_NDJSON: dict},
    ),
)
