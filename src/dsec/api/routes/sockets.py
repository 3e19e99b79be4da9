"""What goes both ways or on for long: attach to an exec, connect to a port, watch a directory."""

from __future__ import annotations

import ipaddress

from dsec.api.query import Kind, Param
from dsec.api.request import ClientGoneError, Request
from dsec.api.routes.files import PATH, file_call
from dsec.api.routes.output import OFFSETS
from dsec.api.routing import WEBSOCKET, Route
from dsec.api.transfer import DataSender
from dsec.api.websocket import Socket, bridge
from dsec.core.errors import InvalidArgumentError, ProtocolError, UnavailableError
from dsec.wire import agent
from dsec.wire.codec import pack, to_json, unpack
from dsec.wire.frames import Channel, Frame, FrameDecoder, FrameType, data_of, decode_data, encode_frame
from dsec.wire.node import Done, Method, OutputQuery, Right, Stream
from dsec.wire.records import WatchNotice

# ---- attach --------------------------------------------------------------------------------------


async def attach(request: Request, socket: Socket) -> None:
    query = OutputQuery(sandbox=request.sandbox, exec=request.exec, follow=True, **request.query)
    stream = await request.open(Method.EXEC_ATTACH, query)
    try:
        await socket.accept()
        await bridge(_input(socket, stream), _output(socket, stream))
        await socket.close()
    finally:
        await stream.close()


async def _input(socket: Socket, stream: Stream) -> None:
    """stdin until its END; after that anything more is an error. Ends with ClientGoneError."""
    ended = False
    while True:
        frame = _input_frame(await socket.recv())
        if ended:
            raise InvalidArgumentError("standard input was closed before")
        ended = frame.type == FrameType.END
        try:
            await stream.send(frame)
        except UnavailableError:
            return  # the exec has ended; the outward side tells of it


def _input_frame(message: bytes | str) -> Frame:
    if isinstance(message, str):
        raise InvalidArgumentError("attach takes binary messages, one frame each")
    decoder = FrameDecoder()
    try:
        frames = list(decoder.feed(message))
        if len(frames) != 1 or decoder.pending_bytes:
            raise InvalidArgumentError("a message must be exactly one frame")
        type, body = frames[0].type, frames[0].body
        if type == FrameType.DATA and decode_data(body).channel == Channel.IN:
            return Frame(type, 0, body)
    except ProtocolError as error:
        raise InvalidArgumentError(f"the message is not a frame: {error.message}") from error
    if type == FrameType.END:
        return Frame(type, 0, body or pack(agent.StdinEnd()))
    raise InvalidArgumentError(f"a frame of type {type} cannot be sent here", hint="DATA of channel 0, or END")


async def _output(socket: Socket, stream: Stream) -> None:
    while (frame := await stream.recv()) is not None:
        await socket.send_bytes(encode_frame(frame.type, 0, frame.body))


# ---- connect -------------------------------------------------------------------------------------


async def connect(request: Request, socket: Socket) -> None:
    stream = await request.open(Method.CONNECT, file_call(request, _address(request)))
    try:
        await expect_res(stream)
        await socket.accept()
        await socket.send_text(b"{}")
        await bridge(bytes_in(socket, stream), bytes_out(socket, stream))
        await socket.close()
    finally:
        await stream.close()


def _address(request: Request) -> agent.ConnectArgs:
    port, path, host = request.query["port"], request.query["path"], request.query["host"]
    if (port is None) == (path is None):
        raise InvalidArgumentError("exactly one of port and path must be given")
    if path is not None:
        return agent.ConnectArgs(path=path)
    if port == 0:
        raise InvalidArgumentError("there is no port 0")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError as error:
            raise InvalidArgumentError(f"host {host[:80]!r} must be localhost or an IP address") from error
    return agent.ConnectArgs(host=host, port=port)


async def bytes_in(socket: Socket, stream: Stream) -> None:
    sender = DataSender(stream)
    ended = False
    while True:
        message = await socket.recv()
        if isinstance(message, str) or ended:
            raise InvalidArgumentError("connect takes binary messages, and none after the empty one")
        try:
            if message:
                await sender.send(message)
            else:
                ended = True
                await sender.end()
        except UnavailableError:
            return  # closed by the other side, which the outward side tells


async def bytes_out(socket: Socket, stream: Stream) -> None:
    """Until the stream is over, which is after both directions have ended, or one has failed."""
    while (frame := await stream.recv()) is not None:
        match frame.type:
            case FrameType.DATA:
                if payload := data_of(frame).payload:  # an empty message means end-of-file
                    await socket.send_bytes(payload)
            case FrameType.END:
                await socket.send_bytes(b"")
            case _:
                raise ProtocolError(f"the node sent a frame of type {frame.type}")


# ---- watch ---------------------------------------------------------------------------------------


async def watch(request: Request, socket: Socket) -> None:
    args = agent.WatchArgs(path=request.query["path"], recursive=request.query["recursive"])
    stream = await request.open(Method.FILE_WATCH, file_call(request, args))
    try:
        await expect_res(stream)
        await socket.accept()
        await socket.send_text(b"{}")
        await bridge(_until_gone(socket, stream), _notices(socket, stream))
        await socket.close()
    finally:
        await stream.close()


async def _until_gone(socket: Socket, stream: Stream) -> None:
    """Nothing is expected from the client but its close, which is also how the node learns to stop."""
    try:
        await socket.recv()
    except ClientGoneError:
        await stream.send(Frame(FrameType.END, 0, pack(Done())))
        raise
    raise InvalidArgumentError("watch takes no messages")


async def _notices(socket: Socket, stream: Stream) -> None:
    while (frame := await stream.recv()) is not None:
        if frame.type == FrameType.EVENT:
            await socket.send_text(to_json(unpack(frame.body, WatchNotice)))


async def expect_res(stream: Stream) -> None:
    frame = await stream.recv()
    if frame is None or frame.type != FrameType.RES:
        raise ProtocolError("the node did not begin its answer with RES")


ROUTES = (
    Route(
        WEBSOCKET,
        "/v1/sandboxes/{id}/execs/{exec}/attach",
        attach,
        "Binary messages, each one frame. In: DATA of channel 0, END. Out: DATA of channels 1 and 2, EVENT, END.",
        Right.USE,
        params=OFFSETS,
    ),
    Route(
        WEBSOCKET,
        "/v1/sandboxes/{id}/connect",
        connect,
        "Bytes to and from a port or UNIX socket inside; first a text message `{}`. An empty message is end-of-file.",
        Right.USE,
        params=(
            Param("port", Kind.INT, "TCP port", maximum=65_535),
            Param("host", Kind.TEXT, "localhost or an IP address", default="localhost"),
            Param("path", Kind.PATH, "a UNIX socket instead"),
        ),
    ),
    Route(
        WEBSOCKET,
        "/v1/sandboxes/{id}/watch",
        watch,
        "Changes below a directory: first a text message `{}`, then a WatchNotice each.",
        Right.USE,
        params=(PATH, Param("recursive", Kind.BOOL, "everything below too", default=False)),
    ),
)
