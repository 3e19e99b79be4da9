"""The stream methods: frames to and from a caller, at the pace of the slower side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Protocol

from dsec.agent.transfers import Download, Upload, Watch
from dsec.core.errors import ConflictError, ProtocolError, UnavailableError
from dsec.core.limits import DATA_BYTES_MAX, READ_CHUNK_BYTES
from dsec.node.execs import NodeExec
from dsec.node.files import file_info, watch_notice
from dsec.node.record import OutputRecord
from dsec.node.recordstore import ERR, OUT
from dsec.node.supervisor import Supervisor
from dsec.wire.codec import pack
from dsec.wire.environments import BuildEvent
from dsec.wire.errors import error_of
from dsec.wire.events import EventQuery
from dsec.wire.following import EventSource, serve_events
from dsec.wire.frames import Channel, Data, Frame, FrameType, data_frame, data_of, encode_data_body
from dsec.wire.node import Done, OutputQuery, Stream
from dsec.wire.records import Gap, WriteAnswer

_IN: Final = int(Channel.IN)
_OUT: Final = int(Channel.OUT)


async def send_output(exec: NodeExec, query: OutputQuery, stream: Stream) -> None:
    """Recorded output, and what is recorded meanwhile when following; gaps are stated; then the exec as it is."""
    await _while_open(stream, _send_record(exec, query, stream), _ignore)


async def attach(sandbox: Supervisor, exec: NodeExec, query: OutputQuery, stream: Stream) -> None:
    """As `send_output`, and takes stdin."""

    async def take(frame: Frame) -> None:
        with _ended_is_fine(exec):
            if frame.type == FrameType.DATA:
                data = _data_in(frame)
                await sandbox.write_stdin(exec.id, data.payload, offset=data.offset, eof=False)
            elif frame.type == FrameType.END:
                await sandbox.write_stdin(exec.id, b"", offset=None, eof=True)

    await _while_open(stream, _send_record(exec, query, stream), take)


async def send_download(download: Download, stream: Stream, *, offset: int) -> None:
    async with download:
        await stream.send(Frame(FrameType.RES, 0, pack(file_info(download.stat))))
        async for piece in download:
            await stream.send(data_frame(_OUT, offset, 0, piece))
            offset += len(piece)
        await _end(stream, Done())


async def take_upload(upload: Upload, stream: Stream) -> None:
    """A caller that goes away before its END has changed nothing (a replacing write) or what had come (the others)."""
    async with upload:
        while True:
            frame = await stream.recv()
            if frame is None:
                raise UnavailableError("the caller closed before the end of its data")
            if frame.type == FrameType.END:
                break
            await upload.send(_data_in(frame).payload)
        written = await upload.finish()
        await _end(stream, WriteAnswer(written.bytes, written.entries))


async def send_changes(watch: Watch, stream: Stream) -> None:
    async def work() -> None:
        async for event in watch:
            await stream.send(Frame(FrameType.EVENT, 0, pack(watch_notice(event))))

    async def take(frame: Frame) -> None:
        if frame.type == FrameType.END:
            watch.stop()

    async with watch:
        await stream.send(Frame(FrameType.RES, 0, pack(Done())))
        await _while_open(stream, work(), take)
        await _end(stream, Done())


class Relayed(Protocol):
    """A connection of bytes: a `Duplex`, or what is made like one."""

    async def receive(self) -> bytes | None: ...

    async def send(self, data: bytes) -> None: ...

    def send_end(self) -> None: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


async def relay(connection: Relayed, stream: Stream) -> None:
    """Bytes both ways until both sides have ended. A side that is gone ends the other."""
    ours_ended = asyncio.Event()

    async def work() -> None:
        offset = 0
        while (piece := await connection.receive()) is not None:
            await stream.send(data_frame(_OUT, offset, 0, piece))
            offset += len(piece)
        await _end(stream, Done())
        await ours_ended.wait()

    async def take(frame: Frame) -> None:
        if frame.type == FrameType.END:
            connection.send_end()
            ours_ended.set()
        else:
            await connection.send(_data_in(frame).payload)

    async with connection:
        await stream.send(Frame(FrameType.RES, 0, pack(Done())))
        await _while_open(stream, work(), take)


async def send_build(events: AsyncIterator[BuildEvent], stream: Stream) -> None:
    """A caller that goes away ends the build."""

    async def work() -> None:
        try:
            async for event in events:
                if event.kind == "error" and event.error is not None:
                    raise error_of(event.error)
                await stream.send(Frame(FrameType.EVENT, 0, pack(event)))
                if event.kind == "done":
                    await _end(stream, event.environment or event.exported or event.machine)
                    return
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    await _while_open(stream, work(), _ignore)


# -- output ----------------------------------------------------------------------------------------


async def _send_record(exec: NodeExec, query: OutputQuery, stream: Stream) -> None:
    at = {OUT: query.out, ERR: query.err}
    with exec as record:
        while True:
            while await _send_next(record, at, stream):
                pass
            if not exec.live or not query.follow:
                break
            await exec.changed()
    await _end(stream, exec.info(query.sandbox))


async def _send_next(record: OutputRecord, at: dict[int, int], stream: Stream) -> bool:
    """One piece, or one gap, from where the reader stands. False when it has all there is."""
    chosen = record.choose(at[OUT], at[ERR])
    if chosen is None:
        return False
    channel, size = chosen
    piece = record.read(channel, at[channel], min(size, READ_CHUNK_BYTES))
    start = record.tracks[channel].produced if piece is None else piece.offset
    if start > at[channel]:
        gap = Gap(channel, at[channel], start)
        at[channel] = start
        await stream.send(Frame(FrameType.EVENT, 0, pack({"gap": gap})))
    if piece is not None:
        at[channel] = piece.offset + len(piece.payload)
        body = encode_data_body(channel, piece.offset, piece.sequence, piece.payload)
        await stream.send(Frame(FrameType.DATA, 0, body))
    return True


async def tell_events(source: EventSource, query: EventQuery, seen: str | None, stream: Stream, now: float) -> None:
    """Until the caller closes; without `follow` to what there is now."""
    await _while_open(stream, serve_events(source, query, seen, stream, now), _ignore)


# -- frames ----------------------------------------------------------------------------------------


async def _while_open(
    stream: Stream, work: Coroutine[Any, Any, None], take: Callable[[Frame], Awaitable[None]]
) -> None:
    """Runs `work` to its end while the caller's frames are taken. A caller that closes ends it early; an error of
    either side is raised."""
    worker = asyncio.create_task(work)
    taker = asyncio.create_task(_take_all(stream, take))
    try:
        await asyncio.wait({worker, taker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
        else:
            taker.result()
    finally:
        for task in (worker, taker):
            task.cancel()
        await asyncio.wait({worker, taker})
        for task in (worker, taker):
            if not task.cancelled():
                task.exception()  # the first one was raised above


async def _take_all(stream: Stream, take: Callable[[Frame], Awaitable[None]]) -> None:
    while (frame := await stream.recv()) is not None:
        await take(frame)


async def _ignore(frame: Frame) -> None:
    return None


async def _end(stream: Stream, record: Any) -> None:
    await stream.send(Frame(FrameType.END, 0, pack(record)))


def _data_in(frame: Frame) -> Data:
    if frame.type != FrameType.DATA:
        raise ProtocolError(f"a frame of type {frame.type} where data was expected")
    if frame.size > DATA_BYTES_MAX + 64:
        raise ProtocolError(f"a frame of {frame.size} bytes")
    data = data_of(frame)
    if data.channel != _IN:
        raise ProtocolError(f"data of channel {data.channel} from a caller")
    return data


class _ended_is_fine:
    """Input for an exec that has just ended is nobody's fault: its end is on its way to the caller."""

    def __init__(self, exec: NodeExec) -> None:
        self._exec = exec

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ConflictError) and (not self._exec.live or error.detail.get("code") == "ended")
