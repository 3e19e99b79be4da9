"""What a node offers (`wire.node.NodeService`): bytes in, rights checked, the right part called, bytes out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from dsec import __version__
from dsec.agent.client import AgentClient
from dsec.core import limits
from dsec.core.errors import (
    DeadlineError,
    DsecError,
    GoneError,
    InvalidArgumentError,
    LimitError,
    Outcome,
    UnsupportedError,
)
from dsec.core.ids import parse_exec_id, parse_name
from dsec.core.states import EndCause
from dsec.node import streams
from dsec.node.diskdesk import DiskDesk
from dsec.node.doctor import examine
from dsec.node.execs import NodeExec
from dsec.node.files import call_agent, decode_args, session_info, session_open
from dsec.node.holdings import kept
from dsec.node.layerdesk import LayerDesk
from dsec.node.listing import list_sandboxes, with_metrics
from dsec.node.machinedesk import MachineDesk
from dsec.node.manycreates import create_many
from dsec.node.node import Node
from dsec.node.rights import check_rights, check_source, check_store_of, check_target, project_seen
from dsec.node.supervisor import Supervisor
from dsec.node.usage import usage_page
from dsec.node.volumes import project_named
from dsec.observe.context import ids
from dsec.observe.logs import get_logger
from dsec.wire import node as wire
from dsec.wire import records, snapshots
from dsec.wire.calls import CallAnswer, CallPoolPage, CallRequest, TaskTypePage
from dsec.wire.codec import pack, unpack
from dsec.wire.collect import GcReport, GcRequest
from dsec.wire.environments import BuildRequest, EnvironmentPage, EnvironmentRef, PushRequest
from dsec.wire.events import EventQuery
from dsec.wire.iam import Holdings, HoldingsQuery
from dsec.wire.images import ExportRequest
from dsec.wire.jobs import JobCounts, JobOrder, JobPart, JobQuery
from dsec.wire.many import CreatedMany, CreateMany
from dsec.wire.node import Caller, Done, Method, Stream
from dsec.wire.plans import CreatePlan, PlanRequest
from dsec.wire.usage import UsagePage, UsageQuery
from dsec.wire.volumes import VolumePage, VolumeRef, VolumeRequest

log = get_logger(__name__)

_CALL_TIMEOUT_S_MAX: Final = limits.CREATE_TIMEOUT_S_MAX
_Unary = Callable[[Any, Caller, str | None], Awaitable[Any]]
_Streaming = Callable[[Any, Caller, Stream], Awaitable[None]]


class Service:
    """Stateless: everything is in the node. Raises DsecErrors only; what is not one is logged and told as `internal`
    by the transport."""

    def __init__(self, node: Node) -> None:
        self._node = node
        desk, machines, disks = LayerDesk(node), MachineDesk(node), DiskDesk(node)
        self._unary: dict[Method, tuple[Any, _Unary]] = {
            Method.CREATE: (records.CreateRequest, self._create),
            Method.CREATE_MANY: (CreateMany, self._create_many),
            Method.CREATE_PLAN: (PlanRequest, self._create_plan),
            Method.USAGE: (UsageQuery, self._usage),
            Method.HOLDINGS: (HoldingsQuery, self._holdings),
            Method.GET: (records.SandboxRef, self._get),
            Method.LIST: (records.ListQuery, self._list),
            Method.DESTROY: (records.SandboxRef, self._destroy),
            Method.SET_TTL: (wire.SetTtl, self._set_ttl),
            Method.SET_EGRESS: (wire.SetEgress, self._set_egress),
            Method.PAUSE: (records.PauseRequest, self._pause),
            Method.RESUME: (records.SandboxRef, self._resume),
            Method.JOB_COUNT: (JobQuery, self._job_count),
            Method.JOB_ACT: (JobOrder, self._job_act),
            Method.METRICS: (records.SandboxRef, self._metrics),
            Method.EXEC_START: (wire.ExecStart, self._exec_start),
            Method.EXEC_GET: (records.ExecQuery, self._exec_get),
            Method.EXEC_LIST: (records.SandboxRef, self._exec_list),
            Method.EXEC_STDIN: (wire.StdinWrite, self._exec_stdin),
            Method.EXEC_SIGNAL: (wire.ExecSignal, self._exec_signal),
            Method.EXEC_KILL: (records.ExecQuery, self._exec_kill),
            Method.EXEC_RESIZE: (wire.ExecResize, self._exec_resize),
            Method.SESSION_OPEN: (wire.SessionStart, self._session_open),
            Method.SESSION_LIST: (records.SandboxRef, self._session_list),
            Method.SESSION_CLOSE: (wire.SessionStop, self._session_close),
            Method.ENVIRONMENT_LIST: (wire.Nothing, self._environment_list),
            Method.ENVIRONMENT_GET: (EnvironmentRef, self._environment_get),
            Method.ENVIRONMENT_REMOVE: (EnvironmentRef, self._environment_remove),
            Method.ENVIRONMENT_STATS: (EnvironmentRef, self._environment_stats),
            Method.ENVIRONMENT_TRACE: (EnvironmentRef, self._environment_trace),
            Method.SNAPSHOT_TAKE: (snapshots.SnapshotTake, self._snapshot_take),
            Method.SNAPSHOT_LIST: (snapshots.SnapshotQuery, self._snapshot_list),
            Method.SNAPSHOT_GET: (snapshots.SnapshotRef, self._snapshot_get),
            Method.SNAPSHOT_REMOVE: (snapshots.SnapshotRef, self._snapshot_remove),
            Method.SNAPSHOT_PUBLISH: (snapshots.Publish, self._snapshot_publish),
            Method.FORK: (snapshots.Fork, self._fork),
            Method.ROLLBACK: (snapshots.Rollback, self._rollback),
            Method.VOLUME_CREATE: (VolumeRequest, self._volume_create),
            Method.VOLUME_LIST: (wire.Nothing, self._volume_list),
            Method.VOLUME_GET: (VolumeRef, self._volume_get),
            Method.VOLUME_REMOVE: (VolumeRef, self._volume_remove),
            **desk.unary(),
            **machines.unary(),
            **disks.unary(),
            Method.GC: (GcRequest, self._gc),
            Method.CALL: (CallRequest, self._run_call),
            Method.CALL_TYPES: (wire.Nothing, self._call_types),
            Method.CALL_POOLS: (wire.Nothing, self._call_pools),
            Method.DOCTOR: (wire.Nothing, self._doctor),
            Method.HEALTH: (wire.Nothing, self._health),
            **{method: (wire.FileCall, self._file_call(method)) for method in _FILE_CALLS},
        }
        self._streaming: dict[Method, tuple[Any, _Streaming]] = {
            Method.EXEC_OUTPUT: (wire.OutputQuery, self._exec_output),
            Method.EXEC_ATTACH: (wire.OutputQuery, self._exec_attach),
            Method.EVENTS: (EventQuery, self._events),
            Method.FILE_READ: (wire.FileCall, self._file_read),
            Method.FILE_WRITE: (wire.FileCall, self._file_write),
            Method.FILE_ARCHIVE: (wire.FileCall, self._file_archive),
            Method.FILE_EXTRACT: (wire.FileCall, self._file_extract),
            Method.FILE_WATCH: (wire.FileCall, self._file_watch),
            Method.CONNECT: (wire.FileCall, self._connect),
            Method.ENVIRONMENT_BUILD: (BuildRequest, self._environment_build),
            Method.ENVIRONMENT_PUSH: (PushRequest, self._environment_push),
            **desk.streaming(),
            **machines.streaming(),
            Method.ENVIRONMENT_EXPORT: (ExportRequest, self._environment_export),
        }

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        """Raises the errors of `core.errors`; DeadlineError when `timeout_s` is over (what was begun may go on)."""
        found = self._unary.get(method)
        if found is None:
            raise UnsupportedError(f"{method} is not a call")
        check_rights(caller, method, self._node.clock)
        request = unpack(body, found[0])
        try:
            async with asyncio.timeout(min(timeout_s, _CALL_TIMEOUT_S_MAX)):
                await self._settled(request, caller)
                return pack(await found[1](request, caller, key))
        except TimeoutError as error:
            raise DeadlineError(
                f"{method} was not done within {timeout_s:g} s",
                outcome=Outcome.UNKNOWN,
                hint="ask again, or wait longer",
            ) from error
        except DsecError:
            raise
        except Exception:
            log.error("a call failed in a way that it should not", method=str(method), exc_info=True)
            raise

    def load(self) -> records.NodeLoad:
        return self._node.load()

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        found = self._streaming.get(method)
        if found is None:
            raise UnsupportedError(f"{method} is not a stream")
        check_rights(caller, method, self._node.clock)
        request = unpack(body, found[0])
        try:
            await self._settled(request, caller)
            await found[1](request, caller, stream)
        except DsecError:
            raise
        except Exception:
            log.error("a stream failed in a way that it should not", method=str(method), exc_info=True)
            raise

    async def _settled(self, request: Any, caller: Caller) -> None:
        """After a restart: what is asked of one sandbox waits until that one has been taken over."""
        id = request.id if isinstance(request, records.SandboxRef) else getattr(request, "sandbox", None)
        if isinstance(id, str):
            await self._node.settled(id, project=project_seen(caller))

    def _sandbox(self, id: str, caller: Caller) -> Supervisor:
        return self._node.find(id, project=project_seen(caller))

    # -- sandboxes ---------------------------------------------------------------------------------

    async def _create(self, request: records.CreateRequest, caller: Caller, key: str | None) -> records.Sandbox:
        with ids(principal=caller.principal):
            return await self._node.creation.create(request, caller, key)

    async def _create_many(self, request: CreateMany, caller: Caller, _: str | None) -> CreatedMany:
        with ids(principal=caller.principal):
            return await create_many(self._node.creation, request, caller)

    async def _create_plan(self, request: PlanRequest, caller: Caller, key: str | None) -> CreatePlan:
        if request.create is not None:
            return await self._node.creation.plan(request.create, caller, key)
        assert request.fork is not None
        return await self._node.forks.plan(self._sandbox(request.fork.sandbox, caller), request.fork.request, key)

    async def _usage(self, request: UsageQuery, caller: Caller, _: str | None) -> UsagePage:
        return await usage_page(request, caller, self._node.registry, self._node.journal, self._node.clock.wall_s())

    async def _holdings(self, request: HoldingsQuery, caller: Caller, _: str | None) -> Holdings:
        held = self._node.registry.holdings.of(request.projects)
        if not request.kept:
            return Holdings(held)
        things = {"snapshots": self._node.snapshots.owners(), "volumes": await self._node.volumes.owners()}
        return Holdings(held, kept(request.projects, things))

    async def _get(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.Sandbox:
        return self._view(request.id, caller)

    def _view(self, id: str, caller: Caller) -> records.Sandbox:
        """Of an ended one too, while its tombstone is kept."""
        try:
            return self._sandbox(id, caller).view()
        except GoneError:
            buried = self._node.journal.tombstone(id)
            if buried is None:
                raise
            return buried.sandbox

    async def _list(self, request: records.ListQuery, caller: Caller, _: str | None) -> records.SandboxPage:
        page = list_sandboxes(self._node.registry, self._node.journal, request, project=project_seen(caller))
        return await with_metrics(self._node.registry, page) if request.metrics else page

    async def _destroy(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.Sandbox:
        try:
            sandbox = self._sandbox(request.id, caller)
        except GoneError:
            return self._view(request.id, caller)
        self._node.creation.give_up(request.id)
        return await sandbox.destroy(EndCause.DESTROYED)

    async def _set_egress(self, request: wire.SetEgress, caller: Caller, _: str | None) -> records.Sandbox:
        sandbox = self._sandbox(request.sandbox, caller)
        await self._node.set_egress(sandbox, request.request.egress)
        return sandbox.view()

    async def _set_ttl(self, request: wire.SetTtl, caller: Caller, _: str | None) -> records.Sandbox:
        sandbox = self._sandbox(request.sandbox, caller)
        await sandbox.set_ttl(request.ttl)
        return sandbox.view()

    async def _pause(self, request: records.PauseRequest, caller: Caller, _: str | None) -> records.Sandbox:
        sandbox = self._sandbox(request.id, caller)
        await sandbox.pause(deep=request.deep)
        return sandbox.view()

    async def _resume(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.Sandbox:
        sandbox = self._sandbox(request.id, caller)
        await sandbox.resume()
        return sandbox.view()

    async def _job_count(self, request: JobQuery, caller: Caller, _: str | None) -> JobCounts:
        return self._node.jobs.count(request, caller)

    async def _job_act(self, request: JobOrder, caller: Caller, _: str | None) -> JobPart:
        return await self._node.jobs.act(request, caller)

    async def _metrics(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.Metrics:
        return await self._sandbox(request.id, caller).measure()

    # -- execs -------------------------------------------------------------------------------------

    async def _exec_start(self, request: wire.ExecStart, caller: Caller, _: str | None) -> records.ExecAnswer:
        sandbox = self._sandbox(request.sandbox, caller)
        exec, existing = await sandbox.start_exec(request.exec)
        wait_s = request.exec.wait_s
        if wait_s is None:
            return exec.answer(sandbox.id, with_output=False, existing=existing)
        with exec:  # the sandbox may end meanwhile, and its records with it
            await _wait_for_end(exec, wait_s)
            return exec.answer(sandbox.id, with_output=True, existing=existing)

    async def _exec_get(self, request: records.ExecQuery, caller: Caller, _: str | None) -> records.ExecInfo:
        exec = await self._on_record(request.sandbox, request.exec, caller)
        await _wait_for_end(exec, request.wait_s)
        return exec.info(request.sandbox)

    async def _exec_list(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.ExecPage:
        execs = await self._node.execs_of(request.id, project=project_seen(caller))
        return records.ExecPage([exec.info(request.id) for exec in execs])

    async def _exec_stdin(self, request: wire.StdinWrite, caller: Caller, _: str | None) -> records.StdinAnswer:
        sandbox, exec = self._exec(request.sandbox, request.exec, caller)
        if request.offset is not None and request.offset < 0:
            raise InvalidArgumentError("offset must not be negative")
        return records.StdinAnswer(
            await sandbox.write_stdin(exec.id, request.data, offset=request.offset, eof=request.eof)
        )

    async def _exec_signal(self, request: wire.ExecSignal, caller: Caller, _: str | None) -> records.ExecInfo:
        sandbox, exec = self._exec(request.sandbox, request.exec, caller)
        await _started(exec)
        if exec.live:
            async with sandbox.operating() as client:
                await client.signal(exec.id, request.signal.signal, tree=request.signal.tree)
        return exec.info(sandbox.id)

    async def _exec_kill(self, request: records.ExecQuery, caller: Caller, _: str | None) -> records.ExecInfo:
        sandbox, exec = self._exec(request.sandbox, request.exec, caller)
        await _started(exec)
        if exec.live:
            async with sandbox.operating() as client:
                await client.kill(exec.id)
        await _wait_for_end(exec, request.wait_s)
        return exec.info(sandbox.id)

    async def _exec_resize(self, request: wire.ExecResize, caller: Caller, _: str | None) -> records.ExecInfo:
        sandbox, exec = self._exec(request.sandbox, request.exec, caller)
        if not exec.start.tty:
            raise InvalidArgumentError("the exec has no terminal", sandbox=sandbox.id, exec=exec.id)
        await _started(exec)
        if exec.live:
            async with sandbox.operating() as client:
                await client.resize(exec.id, cols=request.size.cols, rows=request.size.rows)
        return exec.info(sandbox.id)

    def _exec(self, sandbox: str, exec: str, caller: Caller) -> tuple[Supervisor, NodeExec]:
        found = self._sandbox(sandbox, caller)
        return found, found.execs.get(parse_exec_id(exec))

    async def _on_record(self, sandbox: str, exec: str, caller: Caller) -> NodeExec:
        """Of an ended sandbox too: only to be read."""
        id = parse_exec_id(exec)
        return (await self._node.execs_of(sandbox, project=project_seen(caller))).get(id)

    async def _exec_output(self, request: wire.OutputQuery, caller: Caller, stream: Stream) -> None:
        exec = await self._on_record(request.sandbox, request.exec, caller)
        await streams.send_output(exec, _checked(request), stream)

    async def _exec_attach(self, request: wire.OutputQuery, caller: Caller, stream: Stream) -> None:
        try:
            sandbox, exec = self._exec(request.sandbox, request.exec, caller)
        except GoneError:
            await self._exec_output(request, caller, stream)  # there is nobody to take input
        else:
            await streams.attach(sandbox, exec, _checked(request), stream)

    async def _events(self, request: EventQuery, caller: Caller, stream: Stream) -> None:
        events, now = self._node.journal.events, self._node.clock.wall_s()
        await streams.tell_events(events, request, project_seen(caller), stream, now)

    # -- sessions ----------------------------------------------------------------------------------

    async def _session_open(self, request: wire.SessionStart, caller: Caller, _: str | None) -> records.SessionInfo:
        async with self._sandbox(request.sandbox, caller).operating() as client:
            return session_info(await client.session_open(session_open(request.session)))

    async def _session_list(self, request: records.SandboxRef, caller: Caller, _: str | None) -> records.SessionPage:
        async with self._sandbox(request.id, caller).operating() as client:
            return records.SessionPage([session_info(state) for state in await client.sessions()])

    async def _session_close(self, request: wire.SessionStop, caller: Caller, _: str | None) -> Done:
        name = parse_name(request.name, "session name")
        async with self._sandbox(request.sandbox, caller).operating() as client:
            await client.session_close(name)
        return Done()

    # -- files and connections ---------------------------------------------------------------------

    def _file_call(self, method: Method) -> _Unary:
        async def call(request: wire.FileCall, caller: Caller, _: str | None) -> Any:
            sandbox = self._sandbox(request.sandbox, caller)
            args = decode_args(method, request)
            async with sandbox.operating() as client:
                return await call_agent(client, method, args)

        return call

    @asynccontextmanager
    async def _agent_of(
        self, method: Method, request: wire.FileCall, caller: Caller
    ) -> AsyncIterator[tuple[AgentClient, Any]]:
        """The agent and the checked arguments of a stream; the sandbox counts as used for as long as it lasts."""
        sandbox = self._sandbox(request.sandbox, caller)
        args = decode_args(method, request)
        async with sandbox.operating(short=False) as client:
            yield client, args

    async def _file_read(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.FILE_READ, request, caller) as (client, args):
            await streams.send_download(await client.read(args), stream, offset=args.offset)

    async def _file_archive(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.FILE_ARCHIVE, request, caller) as (client, args):
            await streams.send_download(await client.archive(args), stream, offset=0)

    async def _file_write(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.FILE_WRITE, request, caller) as (client, args):
            await streams.take_upload(await client.open_write(args), stream)

    async def _file_extract(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.FILE_EXTRACT, request, caller) as (client, args):
            await streams.take_upload(await client.open_extract(args), stream)

    async def _file_watch(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.FILE_WATCH, request, caller) as (client, args):
            await streams.send_changes(await client.watch(args), stream)

    async def _connect(self, request: wire.FileCall, caller: Caller, stream: Stream) -> None:
        async with self._agent_of(Method.CONNECT, request, caller) as (client, args):
            await streams.relay(await client.open_connection(args), stream)

    # -- environments and the node -----------------------------------------------------------------

    async def _environment_list(self, request: wire.Nothing, caller: Caller, _: str | None) -> EnvironmentPage:
        return EnvironmentPage(await self._node.environments.list())

    async def _environment_get(self, request: EnvironmentRef, caller: Caller, _: str | None) -> Any:
        return await self._node.environments.get(request.name)

    async def _environment_remove(self, request: EnvironmentRef, caller: Caller, _: str | None) -> Done:
        await self._node.calls.drop({request.name})
        await self._node.warm.drop((await self._node.environments.get(request.name)).layers)
        async with self._node.snapshots.changing:  # none is named while it is looked which layers they have
            await self._node.environments.remove(request.name, live=self._node.layers_in_use())
        await self._node.let_layers_go()
        return Done()

    async def _environment_build(self, request: BuildRequest, caller: Caller, stream: Stream) -> None:
        check_source(request, caller)
        await streams.send_build(self._node.environments.build(request), stream)

    async def _environment_push(self, request: PushRequest, caller: Caller, stream: Stream) -> None:
        check_store_of(request.store, caller)
        await streams.send_build(self._node.environments.push(request), stream)

    async def _environment_export(self, request: ExportRequest, caller: Caller, stream: Stream) -> None:
        check_target(request, caller)
        await streams.send_build(self._node.environments.export(request), stream)

    async def _environment_stats(self, request: EnvironmentRef, caller: Caller, _: str | None) -> Any:
        return await self._node.environments.stats(request.name)

    async def _environment_trace(self, request: EnvironmentRef, caller: Caller, _: str | None) -> Any:
        return await self._node.environments.trace(request.name)

    # -- snapshots ---------------------------------------------------------------------------------

    async def _snapshot_take(
        self, request: snapshots.SnapshotTake, caller: Caller, key: str | None
    ) -> snapshots.SnapshotInfo:
        return await self._node.snapshots.take(self._sandbox(request.sandbox, caller), request.request, caller, key)

    async def _snapshot_list(
        self, request: snapshots.SnapshotQuery, caller: Caller, _: str | None
    ) -> snapshots.SnapshotPage:
        return self._node.snapshots.list(request, project=project_seen(caller))

    async def _snapshot_get(
        self, request: snapshots.SnapshotRef, caller: Caller, _: str | None
    ) -> snapshots.SnapshotInfo:
        found = self._node.snapshots.find(request.snapshot, project=project_seen(caller), own=caller.project)
        return found.info

    async def _snapshot_remove(self, request: snapshots.SnapshotRef, caller: Caller, _: str | None) -> Done:
        await self._node.snapshots.remove(request.snapshot, project=project_seen(caller), own=caller.project)
        return Done()

    async def _snapshot_publish(self, request: snapshots.Publish, caller: Caller, _: str | None) -> snapshots.Published:
        row = self._node.snapshots.find(request.snapshot, project=project_seen(caller), own=caller.project)
        return await self._node.snapshots.publish(row, request.request)

    async def _fork(self, request: snapshots.Fork, caller: Caller, key: str | None) -> snapshots.Forked:
        sandbox = self._sandbox(request.sandbox, caller)
        return snapshots.Forked(await self._node.forks.fork(sandbox, request.request, caller, key))

    async def _rollback(self, request: snapshots.Rollback, caller: Caller, _: str | None) -> records.Sandbox:
        sandbox = self._sandbox(request.sandbox, caller)
        await self._node.rollbacks.roll_back(sandbox, request.request.snapshot, caller)
        return sandbox.view()

    async def _volume_create(self, request: VolumeRequest, caller: Caller, _: str | None) -> Any:
        return await self._node.volumes.create(request, caller.project)

    async def _volume_list(self, request: wire.Nothing, caller: Caller, _: str | None) -> VolumePage:
        return VolumePage(await self._node.volumes.list(project_seen(caller)))

    async def _volume_get(self, request: VolumeRef, caller: Caller, _: str | None) -> Any:
        return await self._node.volumes.get(request.name, project_named(caller, request.project))

    async def _volume_remove(self, request: VolumeRef, caller: Caller, _: str | None) -> Done:
        await self._node.volumes.remove(request.name, project_named(caller, request.project))
        return Done()

    async def _gc(self, request: GcRequest, caller: Caller, _: str | None) -> GcReport:
        return await self._node.collector.collect(dry_run=request.dry_run)

    # -- calls -------------------------------------------------------------------------------------

    async def _run_call(self, request: CallRequest, caller: Caller, _: str | None) -> CallAnswer:
        return await self._node.calls.call(request, caller.project)

    async def _call_types(self, request: wire.Nothing, caller: Caller, _: str | None) -> TaskTypePage:
        return TaskTypePage(self._node.calls.list_types())

    async def _call_pools(self, request: wire.Nothing, caller: Caller, _: str | None) -> CallPoolPage:
        return CallPoolPage(self._node.calls.list_pools())

    async def _doctor(self, request: wire.Nothing, caller: Caller, _: str | None) -> records.DoctorReport:
        return await examine(self._node)

    async def _health(self, request: wire.Nothing, caller: Caller, _: str | None) -> records.Health:
        return records.Health(
            version=__version__,
            node=self._node.id,
            started_at=self._node.started_at,
            sandboxes=len(self._node.registry),
            pid=os.getpid(),
        )


_FILE_CALLS: Final = (
    Method.FILE_STAT,
    Method.FILE_LIST,
    Method.FILE_MKDIR,
    Method.FILE_MOVE,
    Method.FILE_REMOVE,
    Method.FILE_CHMOD,
    Method.FILE_CHOWN,
    Method.FILE_SYMLINK,
)


async def _started(exec: NodeExec) -> None:
    """What is asked of an exec that is just being started comes after the start."""
    if exec.live:
        with suppress(DsecError):
            await asyncio.shield(exec.started)


async def _wait_for_end(exec: NodeExec, wait_s: float | None) -> None:
    if not wait_s or not exec.live:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(min(wait_s, limits.WAIT_S_MAX)):
            await exec.ended()


def _checked(query: wire.OutputQuery) -> wire.OutputQuery:
    if query.out < 0 or query.err < 0:
        raise LimitError("offsets must not be negative")
    return query
