"""A node of the simplest kind, to test what stands in front of one: a dictionary, and streams that a test can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dsec.core.errors import IdempotencyError, PathNotFoundError, SandboxNotFoundError, UnsupportedError
from dsec.core.ids import NodeId, new_sandbox_id
from dsec.wire import agent
from dsec.wire.codec import pack, unpack
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    EnvironmentInfo,
    EnvironmentPage,
    EnvironmentStats,
    EnvironmentTrace,
    PushRequest,
)
from dsec.wire.frames import Channel, Frame, FrameType, data_of, encode_data
from dsec.wire.images import ExportedImage, ExportRequest
from dsec.wire.node import (
    AGENT_ARGS,
    Caller,
    Done,
    ExecStart,
    FileCall,
    Method,
    OutputQuery,
    SetEgress,
    SetTtl,
    StdinWrite,
    Stream,
)
from dsec.wire.records import (
    CreateRequest,
    DoctorReport,
    ExecAnswer,
    ExecInfo,
    ExecPage,
    ExecQuery,
    FileInfo,
    FilePage,
    Gap,
    GapNotice,
    Health,
    ListQuery,
    Metrics,
    NodeLoad,
    Sandbox,
    SandboxPage,
    SandboxRef,
    SessionInfo,
    SessionPage,
    StdinAnswer,
    WatchNotice,
    WriteAnswer,
)

NODE = NodeId("aaaaaaaa")


@dataclass
class Held:
    """Something that waits until the test lets it go on."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    done: int = 0

    async def wait(self) -> None:
        self.entered.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.done += 1


class NodeDouble:
    """Records what it was asked; `fail` makes a method raise, `hold` makes it wait."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.keys: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.files: dict[bytes, bytes] = {}
        self.args: list[tuple[Method, Any]] = []
        self.callers: list[Caller] = []
        self.call_keys: list[str | None] = []
        self.fail: dict[Method, BaseException] = {}
        self.hold: dict[Method, Held] = {}
        self.frames_sent = 0
        self.streams_live = 0
        self.received: list[Frame] = []
        self.output: list[Frame] = []
        self.creates_live = 0
        self.creates_live_max = 0

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        self.callers.append(caller)
        self.call_keys.append(key)
        if held := self.hold.get(method):
            await held.wait()
        if error := self.fail.get(method):
            raise error
        if method in AGENT_ARGS:
            return pack(self._file(method, body, caller))
        handler: Callable[..., Awaitable[Any]] = getattr(self, f"_{method}")
        return pack(await handler(body, caller, key))

    def load(self) -> NodeLoad:
        return NodeLoad(sandboxes=len(self.sandboxes))

    # ---- sandboxes -------------------------------------------------------------------------------

    def add(self, project: str = "/", **more: Any) -> Sandbox:
        sandbox = Sandbox(
            id=new_sandbox_id(NODE),
            state="running",
            node=NODE,
            substrate="fake",
            environment="base",
            project=project,
            created_at=1.0,
            cpu=1.0,
            memory_bytes=1,
            disk_bytes=1,
            pids_max=4,
            network="none",
            **more,
        )
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    def _own(self, id: str, caller: Caller) -> Sandbox:
        found = self.sandboxes.get(id)
        if found is None or not (caller.project == "/" or found.project == caller.project):
            raise SandboxNotFoundError(f"there is no sandbox {id}", sandbox=id)
        return found

    async def _create(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        request = unpack(body, CreateRequest)
        if key is not None and (known := self.keys.get((caller.project, key))):
            if known[0] != body:
                raise IdempotencyError("the key was used for something else")
            return self.sandboxes[known[1]]
        self.creates_live += 1
        self.creates_live_max = max(self.creates_live, self.creates_live_max)
        await asyncio.sleep(0)
        self.creates_live -= 1
        sandbox = self.add(caller.project, name=request.spec.name, labels=request.spec.labels)
        if key is not None:
            self.keys[(caller.project, key)] = (body, sandbox.id)
        return sandbox

    async def _get(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        return self._own(unpack(body, SandboxRef).id, caller)

    async def _list(self, body: bytes, caller: Caller, key: str | None) -> SandboxPage:
        query = unpack(body, ListQuery)
        self.args.append((Method.LIST, query))
        found = [x for x in self.sandboxes.values() if caller.project in ("/", x.project)]
        return SandboxPage([x for x in found if query.labels.items() <= x.labels.items()][: query.limit])

    async def _destroy(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        return self._changed(self._own(unpack(body, SandboxRef).id, caller), state="gone", cause="destroyed")

    async def _pause(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        self._own(unpack(body, SandboxRef).id, caller)
        raise UnsupportedError("the double cannot pause")

    _resume = _pause

    async def _set_ttl(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        request = unpack(body, SetTtl)
        return self._changed(self._own(request.sandbox, caller), ttl_idle_s=request.ttl.ttl_idle_s)

    async def _set_egress(self, body: bytes, caller: Caller, key: str | None) -> Sandbox:
        request = unpack(body, SetEgress)
        return self._changed(self._own(request.sandbox, caller), egress=request.request.egress)

    def _changed(self, sandbox: Sandbox, **more: Any) -> Sandbox:
        self.sandboxes[sandbox.id] = changed = msgspec.structs.replace(sandbox, **more)
        return changed

    async def _metrics(self, body: bytes, caller: Caller, key: str | None) -> Metrics:
        self._own(unpack(body, SandboxRef).id, caller)
        return Metrics(at=1.0)

    # ---- execs and sessions ----------------------------------------------------------------------

    async def _exec_start(self, body: bytes, caller: Caller, key: str | None) -> ExecAnswer:
        request = unpack(body, ExecStart)
        self._own(request.sandbox, caller)
        self.args.append((Method.EXEC_START, request.exec))
        out = b"\xff\x00" if request.exec.wait_s is not None else None
        return ExecAnswer(exec=_info(request.exec.id, request.sandbox), out=out, err=b"" if out else None)

    async def _exec_get(self, body: bytes, caller: Caller, key: str | None) -> ExecInfo:
        query = unpack(body, ExecQuery)
        self._own(query.sandbox, caller)
        self.args.append((Method.EXEC_GET, query))
        return _info(query.exec, query.sandbox)

    _exec_kill = _exec_get

    async def _exec_list(self, body: bytes, caller: Caller, key: str | None) -> ExecPage:
        self._own(unpack(body, SandboxRef).id, caller)
        return ExecPage()

    async def _exec_stdin(self, body: bytes, caller: Caller, key: str | None) -> StdinAnswer:
        write = unpack(body, StdinWrite)
        self._own(write.sandbox, caller)
        self.args.append((Method.EXEC_STDIN, write))
        return StdinAnswer((write.offset or 0) + len(write.data))

    async def _exec_signal(self, body: bytes, caller: Caller, key: str | None) -> ExecInfo:
        request = msgspec.msgpack.decode(body)
        self._own(request["sandbox"], caller)
        return _info(request["exec"], request["sandbox"])

    _exec_resize = _exec_signal

    async def _session_open(self, body: bytes, caller: Caller, key: str | None) -> SessionInfo:
        request = msgspec.msgpack.decode(body)
        self._own(request["sandbox"], caller)
        return SessionInfo(name=request["session"]["name"], pid=1)

    async def _session_list(self, body: bytes, caller: Caller, key: str | None) -> SessionPage:
        self._own(unpack(body, SandboxRef).id, caller)
        return SessionPage([SessionInfo(name="main")])

    async def _session_close(self, body: bytes, caller: Caller, key: str | None) -> Done:
        self._own(msgspec.msgpack.decode(body)["sandbox"], caller)
        return Done()

    # ---- the host --------------------------------------------------------------------------------

    async def _health(self, body: bytes, caller: Caller, key: str | None) -> Health:
        return Health(version="9", node=NODE, started_at=1.0, pid=7)

    async def _doctor(self, body: bytes, caller: Caller, key: str | None) -> DoctorReport:
        return DoctorReport(node=NODE, version="9")

    async def _environment_list(self, body: bytes, caller: Caller, key: str | None) -> EnvironmentPage:
        return EnvironmentPage([_environment("base")])

    async def _environment_get(self, body: bytes, caller: Caller, key: str | None) -> EnvironmentInfo:
        return _environment(msgspec.msgpack.decode(body)["name"])

    async def _environment_remove(self, body: bytes, caller: Caller, key: str | None) -> Done:
        return Done()

    async def _environment_stats(self, body: bytes, caller: Caller, key: str | None) -> EnvironmentStats:
        return EnvironmentStats(name=msgspec.msgpack.decode(body)["name"], layers=())

    async def _environment_trace(self, body: bytes, caller: Caller, key: str | None) -> EnvironmentTrace:
        return EnvironmentTrace(name=msgspec.msgpack.decode(body)["name"], layers=())

    # ---- files -----------------------------------------------------------------------------------

    def _file(self, method: Method, body: bytes, caller: Caller) -> Any:
        args = self._file_args(method, body, caller)
        if method == Method.FILE_STAT:
            return _file_info(args.path, self._content(args.path))
        if method == Method.FILE_LIST:
            return FilePage([_file_info(path, data) for path, data in sorted(self.files.items())])
        return Done()

    def _file_args(self, method: Method, body: bytes, caller: Caller) -> Any:
        call = unpack(body, FileCall)
        self._own(call.sandbox, caller)
        args = unpack(bytes(call.args), AGENT_ARGS[method])
        self.args.append((method, args))
        return args

    def _content(self, path: bytes) -> bytes:
        if path not in self.files:
            raise PathNotFoundError("no such file")
        return self.files[path]

    # ---- streams ---------------------------------------------------------------------------------

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        self.callers.append(caller)
        self.streams_live += 1
        try:
            if error := self.fail.get(method):
                raise error
            await getattr(self, f"_stream_{method}")(body, stream, caller)
        finally:
            self.streams_live -= 1

    async def _stream_exec_output(self, body: bytes, stream: Stream, caller: Caller) -> None:
        query = unpack(body, OutputQuery)
        self._own(query.sandbox, caller)
        self.args.append((Method.EXEC_OUTPUT, query))
        for frame in self.output:
            await self._send(stream, frame)
        if held := self.hold.get(Method.EXEC_OUTPUT):
            await held.wait()
        if error := self.fail.get(Method.EXEC_GET):  # after output has begun
            raise error
        await self._send(stream, Frame(FrameType.END, 0, pack(_info(query.exec, query.sandbox))))

    async def _stream_exec_attach(self, body: bytes, stream: Stream, caller: Caller) -> None:
        query = unpack(body, OutputQuery)
        self._own(query.sandbox, caller)
        await stream.send(data_frame(b"hello\n"))
        while (frame := await stream.recv()) is not None:
            self.received.append(frame)
            if frame.type == FrameType.END:
                await stream.send(Frame(FrameType.END, 0, pack(_info(query.exec, query.sandbox))))
                return
            await stream.send(data_frame(data_of(frame).payload.upper()))

    async def _stream_file_read(self, body: bytes, stream: Stream, caller: Caller) -> None:
        args = self._file_args(Method.FILE_READ, body, caller)
        data = self._content(args.path)
        shown = b"" if args.path.startswith(b"/proc/") else data
        await stream.send(Frame(FrameType.RES, 0, pack(_file_info(args.path, shown))))
        end = None if args.length is None else args.offset + args.length
        await self._send_bytes(stream, data[args.offset : end])
        if error := self.fail.get(Method.FILE_STAT):  # half way
            raise error
        await stream.send(Frame(FrameType.END, 0, pack(Done())))

    async def _stream_file_archive(self, body: bytes, stream: Stream, caller: Caller) -> None:
        args = self._file_args(Method.FILE_ARCHIVE, body, caller)
        await stream.send(Frame(FrameType.RES, 0, pack(FileInfo(name="d", kind="directory"))))
        await self._send_bytes(stream, self._content(args.path))
        await stream.send(Frame(FrameType.END, 0, pack(Done())))

    async def _stream_file_write(self, body: bytes, stream: Stream, caller: Caller) -> None:
        args = self._file_args(Method.FILE_WRITE, body, caller)
        if held := self.hold.get(Method.FILE_WRITE):
            await held.wait()
        data = bytearray()
        while (frame := await stream.recv()) is not None:
            if frame.type == FrameType.END:
                assert unpack(frame.body, agent.StdinEnd).offset == len(data)
                self.files[args.path] = bytes(data)
                await stream.send(Frame(FrameType.END, 0, pack(WriteAnswer(len(data), 1))))
                return
            piece = data_of(frame)
            assert piece.offset == len(data)
            data += piece.payload

    async def _stream_file_extract(self, body: bytes, stream: Stream, caller: Caller) -> None:
        self._file_args(Method.FILE_EXTRACT, body, caller)
        size = 0
        while (frame := await stream.recv()) is not None and frame.type != FrameType.END:
            size += len(data_of(frame).payload)
        await stream.send(Frame(FrameType.END, 0, pack(WriteAnswer(size, 2))))

    async def _stream_file_watch(self, body: bytes, stream: Stream, caller: Caller) -> None:
        self._file_args(Method.FILE_WATCH, body, caller)
        await stream.send(Frame(FrameType.RES, 0, pack(Done())))
        await stream.send(Frame(FrameType.EVENT, 0, pack(WatchNotice(kind="created", path="a"))))
        while await stream.recv() is not None:
            pass

    async def _stream_connect(self, body: bytes, stream: Stream, caller: Caller) -> None:
        self._file_args(Method.CONNECT, body, caller)
        await stream.send(Frame(FrameType.RES, 0, pack(Done())))
        while (frame := await stream.recv()) is not None:
            if frame.type == FrameType.END:
                await stream.send(Frame(FrameType.END, 0, pack(Done())))
                return
            await stream.send(data_frame(data_of(frame).payload[::-1]))

    async def _stream_environment_build(self, body: bytes, stream: Stream, caller: Caller) -> None:
        request = unpack(body, BuildRequest)
        await stream.send(Frame(FrameType.EVENT, 0, pack(BuildEvent(kind="progress", stage="resolve"))))
        if error := self.fail.get(Method.ENVIRONMENT_GET):
            raise error
        await stream.send(Frame(FrameType.END, 0, pack(_environment(request.name))))

    async def _stream_environment_push(self, body: bytes, stream: Stream, caller: Caller) -> None:
        request = unpack(body, PushRequest)
        self.args.append((Method.ENVIRONMENT_PUSH, request))
        await stream.send(Frame(FrameType.EVENT, 0, pack(BuildEvent(kind="progress", stage="push"))))
        await stream.send(Frame(FrameType.END, 0, pack(_environment(request.name))))

    async def _stream_environment_export(self, body: bytes, stream: Stream, caller: Caller) -> None:
        request = unpack(body, ExportRequest)
        self.args.append((Method.ENVIRONMENT_EXPORT, request))
        await stream.send(Frame(FrameType.EVENT, 0, pack(BuildEvent(kind="progress", stage="push"))))
        exported = ExportedImage(reference="example.org/x@sha256:1", digest="sha256:1", size_bytes=1)
        await stream.send(Frame(FrameType.END, 0, pack(exported)))

    async def _send(self, stream: Stream, frame: Frame) -> None:
        await stream.send(frame)
        self.frames_sent += 1

    async def _send_bytes(self, stream: Stream, data: bytes) -> None:
        for start in range(0, len(data), 65_536):
            await self._send(stream, data_frame(data[start : start + 65_536], offset=start))


def data_frame(payload: bytes, *, channel: int = Channel.OUT, offset: int = 0) -> Frame:
    return Frame(FrameType.DATA, 0, encode_data(0, channel, offset, 0, payload)[9:])


def gap_frame(start: int, end: int) -> Frame:
    return Frame(FrameType.EVENT, 0, pack(GapNotice(Gap(1, start, end))))


def _info(id: str, sandbox: str) -> ExecInfo:
    return ExecInfo(id=id, sandbox=sandbox, state="ended", status="exited", exit_code=0)


def _file_info(path: bytes, data: bytes) -> FileInfo:
    name = path.rpartition(b"/")[2]
    return FileInfo(name=name.decode("utf-8", "replace"), name_bytes=name, kind="file", size=len(data), mode=0o644)


def _environment(name: str) -> EnvironmentInfo:
    return EnvironmentInfo(name=name, layers=(), size_bytes=1, created_at=1.0, source="test")
