"""One sandbox: the only place where its state changes. Everybody else asks, and is served one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeVar

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, Instance, InstanceUsage
from dsec.core import limits
from dsec.core.errors import (
    DsecError,
    GoneError,
    Outcome,
    SandboxError,
    SandboxFaultError,
    SandboxStateError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import SandboxId
from dsec.core.states import ENDED, EndCause, SandboxState
from dsec.node.accounting import UsageMeter
from dsec.node.environments import Hold, Resolved
from dsec.node.execdesk import ExecDesk
from dsec.node.execs import NodeExec, request_hash
from dsec.node.exectable import ExecTable
from dsec.node.lifetime import Lifetime
from dsec.node.link import AgentLink
from dsec.node.pausing import Pausing
from dsec.node.rows import ImageRow, KeyRow, SandboxRow, Tombstone
from dsec.node.runner import write_stdin
from dsec.node.services import Services
from dsec.node.shortops import ShortOperations
from dsec.node.tasks import Tasks, result_of
from dsec.node.view import gone_error, metrics_of, view_of
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire import records

log = get_logger(__name__)

T = TypeVar("T")

_FAILURES: Final = frozenset(EndCause) - {EndCause.DESTROYED, EndCause.TTL_RUNNING, EndCause.TTL_IDLE}


class Supervisor:
    def __init__(self, row: SandboxRow, *, backend: Backend, services: Services, hold: Hold | None = None) -> None:
        self.row = row
        self.backend = backend
        self.hold = hold
        self.tombstone: Tombstone | None = None
        self.instance: Instance | None = None
        self._services = services
        self._link: AgentLink | None = None
        self._lock = asyncio.Lock()
        self._tasks = Tasks(f"sandbox {row.id}")
        self.short = ShortOperations()
        self.pausing = Pausing(self, services)
        self._retry_s, self._retrying = 0.5, False
        self._disk_change: str | None = None
        clock = services.clock
        self.meter = UsageMeter(clock.monotonic_s(), memory_gib_s=row.memory_gib_s)
        self.lifetime = Lifetime.of_row(row, clock, services.config.idle.ladder if backend.capabilities.pause else ())
        metrics.SANDBOXES.labels(row.spec.substrate, row.state).inc()
        self.execs = ExecTable(row.id, services.records)
        self._desk = ExecDesk(
            self.execs,
            link=self.open_link,
            clock=clock,
            tasks=self._tasks,
            substrate=row.spec.substrate,
            oom_kills_seen=lambda: self.meter.oom_kills,
            limit_hit=self._limit_hit,
            on_begin=self.lifetime.begin,
            on_end=self._activity_over,
        )

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def state(self) -> SandboxState:
        return SandboxState(self.row.state)

    @property
    def ended(self) -> bool:
        return self.tombstone is not None

    # -- starting ----------------------------------------------------------------------------------

    async def begin(self, instance: Instance, client: AgentClient | None, *, deadline_s: float) -> None:
        """The first hello of a fresh instance, unless it has come to `client` already. Raises what the channel raises;
        the caller removes everything then."""
        self.instance = instance
        # It knows now what it did not when it was intended, such as its process.
        self.row = msgspec.structs.replace(self.row, record=instance.record)
        self._make_link(instance)
        if client is None:
            await self.open_link().open(timeout_s=deadline_s)
        else:
            self.open_link().take(client)
        self._watch(instance)

    async def begin_claimed(
        self, instance: Instance, client: AgentClient, *, spare: str, key: KeyRow | None, create_ms: float | None
    ) -> None:
        """A spare is this sandbox's from here on, whatever happens: running if `create_ms` says that nothing is left to
        be done. One write, since nothing of a caller has run before it. Raises StorageError and SandboxFaultError."""
        self.instance = instance
        self.row = msgspec.structs.replace(self.row, record=instance.record)
        self._make_link(instance)
        self.open_link().take(client)
        row = self.row
        if create_ms is not None:
            row = msgspec.structs.replace(row, state=str(SandboxState.RUNNING), create_ms=create_ms)
        await self._services.journal.claim(spare, row, key)
        if create_ms is not None:
            self._set(SandboxState.RUNNING, create_ms=create_ms)
        self._watch(instance)

    async def take_over(self, instance: Instance) -> None:
        """An adopted instance: its execs are followed again from where their records end."""
        self.instance = instance
        self._desk.load()
        self._make_link(instance)
        self._watch(instance)
        if self.state is SandboxState.PAUSED:
            self.open_link().suspend()
            return
        if self.state is not SandboxState.RUNNING:
            # It was being frozen or thawed: running is where both can be told apart from nothing.
            await instance.resume()
            await self.pausing.reach_agent(self.pausing.note_resumed())
        else:
            # A busy machine, with many to take over, is no reason to end one.
            await self.open_link().open(tries=limits.RECONNECTS_MAX)
        await self.move(SandboxState.RUNNING)

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[None]:
        """Whoever asks for anything meanwhile waits, and sees the sandbox running or gone."""
        async with self._lock:
            yield

    def settle(self, resolved: Resolved) -> None:
        """What its environment stands for now; held from here on."""
        spec = self.row.spec
        self.hold = resolved.hold
        self.row = msgspec.structs.replace(
            self.row,
            layers=tuple(layer.digest for layer in resolved.layers),
            user=spec.user if spec.user is not None else resolved.user,
            workdir=spec.workdir if spec.workdir is not None else resolved.workdir,
            image=ImageRow(resolved.env, resolved.entrypoint, resolved.command),
        )

    async def start_main(self, request: records.ExecRequest) -> NodeExec:
        """The environment's program, within `creating`: other execs wait for the end of that."""
        return await self._desk.start(request, request_hash(request))

    async def created(self, create_ms: float) -> None:
        if self.state is not SandboxState.RUNNING:
            await self.move(SandboxState.RUNNING, create_ms=create_ms)
        self.lifetime.touch()
        self.arm()

    async def intend(self, record: bytes, key: KeyRow | None) -> None:
        """Durable before the backend touches the host."""
        self.row = msgspec.structs.replace(self.row, record=record)
        await self._services.journal.intend(self.row, key)

    async def abandon(self, detail: str) -> bool:
        """A create that failed: whatever there is of it is removed, and nothing says that it was. False when something
        could not be removed; the node goes on trying then."""
        self.row = msgspec.structs.replace(self.row, end_cause=str(EndCause.LAUNCH_FAILED), end_detail=detail[:500])
        await self._stop_following()
        try:
            await self._remove()
            await self.execs.remove()
            await self._services.journal.forget(self.row)
        except Exception as error:
            log.error("a failed create left something", sandbox=self.id, exc_info=error)
            self._set(SandboxState.DESTROYING)
            self._retry_later()
            return False
        self.uncount()
        self.row = msgspec.structs.replace(self.row, state=str(SandboxState.FAILED))
        if self.hold is not None:
            self.hold.release()
            self.hold = None
        self._services.forget(self.id)
        return True

    def _make_link(self, instance: Instance) -> None:
        self._link = AgentLink(
            instance, boot_id=self.row.agent_boot_id, on_hello=self._on_hello, on_fault=self._on_link_fault
        )

    def open_link(self) -> AgentLink:
        if self._link is None:
            raise SandboxStateError(f"the sandbox is {self.row.state}", sandbox=self.id)
        return self._link

    def _watch(self, instance: Instance) -> None:
        self._tasks.spawn(self._watch_exit(instance))

    async def _watch_exit(self, instance: Instance) -> None:
        ended = await instance.wait()
        if self.state in (SandboxState.CREATING, SandboxState.DESTROYING) or self.ended or self._services.closing:
            return  # a create notices by itself
        cause = ended.cause if ended.cause in _FAILURES else EndCause.SANDBOX_FAULT
        self.fail(cause, ended.detail or "the agent ended")

    def _on_link_fault(self, failure: SandboxFaultError) -> None:
        self.fail(EndCause.SANDBOX_FAULT, failure.message)

    # -- state -------------------------------------------------------------------------------------

    async def move(self, state: SandboxState, **changes: Any) -> None:
        """Journalled when it returns. Raises StorageError, and then nothing has changed."""
        before = self.row
        self._set(state, **changes)
        try:
            await self._services.journal.put(self.row)
        except DsecError as error:
            self._set(SandboxState(before.state))
            self.row, error.outcome = before, Outcome.UNCHANGED
            raise

    async def move_anyway(self, state: SandboxState, **changes: Any) -> None:
        """For moves that a full disk must not prevent. A restarted node then finds the sandbox as it was before, and
        sees what is true from the instance."""
        self._set(state, **changes)
        with suppress(StorageError):
            await self._services.journal.put(self.row)

    def _set(self, state: SandboxState, **changes: Any) -> None:
        gauge = metrics.SANDBOXES
        gauge.labels(self.row.spec.substrate, self.row.state).dec()
        gauge.labels(self.row.spec.substrate, state).inc()
        self.row = msgspec.structs.replace(self.row, state=str(state), **changes)

    def view(self) -> records.Sandbox:
        """As its owner sees it."""
        if self.tombstone is not None:
            return self.tombstone.sandbox
        return view_of(
            self.row,
            node=self._services.journal.node_id,
            now=self._services.clock.wall_s(),
            idle_since=self.lifetime.idle_since_wall,
            execs=self.execs,
            meter=self.meter,
        )

    def gone(self) -> GoneError:
        return gone_error(self.view())

    # -- being used --------------------------------------------------------------------------------

    @asynccontextmanager
    async def operating(self, *, short: bool = True) -> AsyncIterator[AgentClient]:
        """The agent, for an operation of a caller: resumes the sandbox first, and keeps it from counting as idle.

        `short`: a pause waits for it. Raises GoneError when the sandbox has ended.
        """
        self.lifetime.begin()
        held = short and self.state is SandboxState.RUNNING
        self.short.begin(held)
        try:
            # One that waits for a resume is not counted: it would hold up the pause that it waits for.
            await self.ensure_running()
            yield await self.client()
        except DsecError as error:
            error.sandbox = error.sandbox or self.id
            if isinstance(error, UnavailableError) and self.state in (SandboxState.DESTROYING, *ENDED):
                raise self.gone() from error
            raise
        finally:
            self.short.finish(held)
            self._activity_over()

    async def client(self) -> AgentClient:
        """The agent, as it is: neither resumes the sandbox nor counts as use. Raises GoneError when it has ended."""
        try:
            return await self.open_link().client()
        except (GoneError, SandboxStateError):
            raise
        except DsecError:
            if self.state in (SandboxState.DESTROYING, *ENDED):
                raise self.gone() from None
            raise

    async def ensure_running(self) -> None:
        while self.state is not SandboxState.RUNNING:
            if self.state in (SandboxState.DESTROYING, *ENDED):
                raise self.gone()
            if self.state in (SandboxState.PAUSED, SandboxState.PAUSING):
                await self.resume()
            else:
                async with self._lock:  # somebody is creating or resuming it
                    pass
                if self.state is SandboxState.CREATING:
                    raise SandboxStateError("the sandbox is still being created", sandbox=self.id)

    def _activity_over(self) -> None:
        self._services.egress.tell_soon(self.id)
        if self.lifetime.finish():
            self.arm()

    def arm(self) -> None:
        """Tell the reaper when to look next."""
        due = self.lifetime.next_deadline()
        if due is not None and not self.ended:
            self._services.schedule(self.id, due[0])

    # -- execs -------------------------------------------------------------------------------------

    async def start_exec(self, request: records.ExecRequest) -> tuple[NodeExec, bool]:
        """The exec, started; and whether it was known already. Raises ConflictError for another request of that id."""
        hash = request_hash(request)
        known = await self._desk.known(request, hash)
        if known is not None:
            return known, True
        async with self.operating():
            # Somebody may have started it while the sandbox was being resumed.
            known = await self._desk.known(request, hash)
            if known is not None:
                return known, True
            return await self._desk.start(request, hash), False

    async def write_stdin(self, id: str, data: bytes, *, offset: int | None, eof: bool) -> int:
        """Input for an exec; returns how much it has had in all. Resumes a paused sandbox (ruling 19)."""
        exec = self.execs.get(id)
        async with self.operating(short=False):
            return await write_stdin(exec, data, offset=offset, eof=eof)

    def _on_hello(self, client: AgentClient) -> None:
        self.row = msgspec.structs.replace(self.row, agent_boot_id=client.hello.boot_id)
        self._desk.reconcile(client)

    async def _limit_hit(self, exec: NodeExec) -> str | None:
        layer, _ = await asyncio.gather(self._services.read_failure(self.row.layers, exec.began_s), self.sample())
        return self.meter.limit_hit(exec.oom_kills_before, layer)

    # -- its disk ----------------------------------------------------------------------------------

    @contextmanager
    def changing_disk(self, what: str) -> Iterator[None]:
        """Snapshots and rollbacks of one sandbox exclude each other. Raises SandboxStateError, which says `what`."""
        if self._disk_change is not None:
            raise SandboxStateError(self._disk_change, sandbox=self.id, hint="ask again when that is done")
        self._disk_change = what
        try:
            yield
        finally:
            self._disk_change = None

    async def present_instance(self) -> Instance:
        """Once nobody creates, pauses or resumes it. Raises GoneError, SandboxStateError."""
        async with self._lock:
            self.check_alive()
            if self.instance is None:
                raise SandboxStateError(f"the sandbox is {self.row.state}", sandbox=self.id)
            return self.instance

    async def replace_instance(
        self, instance: Instance, client: AgentClient, row: SandboxRow, *, spare: str, hold: Hold
    ) -> Instance:
        """`row` and the spare are what the sandbox is from now on. The instance before is given to be destroyed.

        In the sandbox's turn. One write decides: before it everything is as it was, and this raises StorageError.
        """
        assert self.instance is not None
        before, old_hold = self.instance, self.hold
        await self.sample()
        row = msgspec.structs.replace(
            row, record=instance.record, leftover=before.record, memory_gib_s=self.meter.memory_gib_s
        )
        await self._services.journal.claim(spare, row, None)
        if self._link is not None:
            await self._link.close(SandboxStateError("the sandbox was rolled back meanwhile", sandbox=self.id))
        await self._tasks.settle()
        self._desk.end_all("rolled_back")
        self.meter.begin_anew()
        self._set(SandboxState(row.state))
        self.row, self.instance, self.hold = row, instance, hold
        if old_hold is not None:
            old_hold.release()
        self._make_link(instance)
        self.open_link().take(client)
        self._watch(instance)
        self.arm()
        return before

    async def drop_leftover(self) -> None:
        """Nothing is left of the instance before a rollback. Raises what the backend raises, StorageError."""
        if self.row.leftover:
            await self.backend.discard(SandboxId(self.id), self.row.leftover)
            self.row = msgspec.structs.replace(self.row, leftover=b"")
            await self._services.journal.put(self.row)

    # -- pause and resume --------------------------------------------------------------------------

    async def pause(self, *, deep: bool = False) -> None:
        """Raises UnsupportedError, FreezeTimeoutError (it runs on), GoneError. Paused already is success."""
        if not self.backend.capabilities.pause:
            raise UnsupportedError(
                f"{self.row.spec.substrate} sandboxes on this node cannot be paused", sandbox=self.id
            )
        await self.serially(lambda: self.pausing.pause(deep=deep))

    async def resume(self) -> None:
        await self.pausing.resume_when_there_is_memory()

    def running_instance(self) -> Instance:
        if self.state is not SandboxState.RUNNING or self.instance is None:
            raise SandboxStateError(f"the sandbox is {self.row.state}", sandbox=self.id)
        return self.instance

    def check_alive(self) -> None:
        if self.state in (SandboxState.DESTROYING, *ENDED):
            raise self.gone()

    async def serially(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One at a time, and to its end: whoever asked may go away in the middle."""

        async def run() -> T:
            async with self._lock:
                return await action()

        return await result_of(self._services.tasks.spawn(run(), awaited=True, finishes=True))

    # -- time to live ------------------------------------------------------------------------------

    async def set_ttl(self, request: records.TtlRequest) -> None:
        async def act() -> None:
            self.check_alive()
            self.lifetime.set(running_left_s=request.ttl_running_s, ttl_idle_s=request.ttl_idle_s)
            paused = self.row.paused_at is not None
            now = self._services.clock.monotonic_s()
            until = None if request.ttl_running_s is None else now + request.ttl_running_s
            await self.move(
                self.state,
                ttl_running_s=request.ttl_running_s,
                ttl_idle_s=request.ttl_idle_s,
                running_until=None if paused else until,
                running_left_s=request.ttl_running_s if paused else None,
            )
            self.arm()

        await self.serially(act)

    # -- usage -------------------------------------------------------------------------------------

    async def sample(self) -> None:
        if self.instance is not None:
            with suppress(DsecError):
                self.meter.sample(await self.instance.usage(), self._services.clock.monotonic_s())
                await self._services.egress.measure(self)

    async def measure(self) -> records.Metrics:
        """As it is now. Neither resumes it nor counts as use."""
        usage = InstanceUsage()
        if self.instance is not None and self.state not in ENDED:
            usage = await self.instance.usage()
            self.meter.sample(usage, self._services.clock.monotonic_s())
        return metrics_of(
            self.row.spec,
            usage,
            limited=self.backend.capabilities,
            at=self._services.clock.wall_s(),
            execs_live=self.execs.live_count,
            output=self.execs.output_bytes(),
        )

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, cause: EndCause, detail: str) -> None:
        """It has ended by a fault: what is left of it is removed, and its tombstone says why."""
        if self.ended or self.state is SandboxState.DESTROYING or self._services.closing:
            return
        log.warning("a sandbox has failed", sandbox=self.id, cause=str(cause), detail=detail)
        self._services.tasks.spawn(self._fail(cause, detail))

    async def _fail(self, cause: EndCause, detail: str) -> None:
        with suppress(DsecError):
            await self.destroy(cause, detail)

    async def destroy(self, cause: EndCause, detail: str | None = None) -> records.Sandbox:
        """Ended already is success. Raises SandboxError when something could not be removed: it is tried again."""

        async def act() -> records.Sandbox:
            return await self._end(cause, detail)

        return await self.serially(act)

    async def _end(self, cause: EndCause, detail: str | None) -> records.Sandbox:
        if self.tombstone is not None:
            return self.tombstone.sandbox
        if self.state is SandboxState.FAILED or (cause is EndCause.TTL_IDLE and not self.lifetime.is_idle):
            return self.view()  # while whoever asks waited: abandoned, and nothing is to be told; or wanted again
        if self.state is not SandboxState.DESTROYING:
            await self.sample()
            await self.move_anyway(
                SandboxState.DESTROYING,
                end_cause=str(cause),
                end_detail=None if detail is None else detail[:500],
                memory_gib_s=self.meter.memory_gib_s,
            )
        await self._stop_following()
        try:
            await self._remove()
            return await self._bury()
        except Exception as error:
            self._retry_later()
            raise SandboxError(
                "the sandbox could not be removed whole; the node goes on trying",
                sandbox=self.id,
                outcome=Outcome.UNKNOWN,
            ) from error

    async def _stop_following(self) -> None:
        if self._link is not None:
            await self._link.close(self.gone())
        await self._tasks.close()
        lost = self.row.end_cause in {str(cause) for cause in _FAILURES}
        self._desk.end_all("agent_lost" if lost else "killed")

    async def _remove(self) -> None:
        if self.instance is not None:
            await self.instance.destroy()
        elif self.row.record:
            await self.backend.discard(SandboxId(self.id), self.row.record)
        if self.row.leftover:
            await self.backend.discard(SandboxId(self.id), self.row.leftover)

    async def _bury(self) -> records.Sandbox:
        cause = EndCause(self.row.end_cause or EndCause.DESTROYED)
        state = SandboxState.FAILED if cause in _FAILURES else SandboxState.GONE
        view = msgspec.structs.replace(
            self.view(), state=str(state), ended_at=self._services.clock.wall_s(), idle_since=None, execs_live=0
        )
        tombstone = Tombstone(sandbox=view, principal=self.row.principal)
        await self._services.journal.bury(tombstone)
        self.tombstone = tombstone
        self.uncount()
        metrics.ENDS.labels(self.row.spec.substrate, str(cause)).inc()
        self.row = msgspec.structs.replace(self.row, state=str(state))
        if self.hold is not None:
            self.hold.release()
            self.hold = None
        self._services.forget(self.id)
        if self.row.forked:
            self._services.collect()
        log.info("sandbox ended", sandbox=self.id, cause=str(cause))
        return view

    def uncount(self) -> None:
        metrics.SANDBOXES.labels(self.row.spec.substrate, self.row.state).dec()

    def _retry_later(self) -> None:
        if self._retrying or self._services.closing:
            return
        self._retrying = True
        self._services.tasks.spawn(self._retry())

    async def _retry(self) -> None:
        """Removes what is left, with growing back-off, until nothing is."""
        try:
            while not self.ended and not self._services.closing:
                await self._services.sleep(self._retry_s)
                self._retry_s = min(self._retry_s * 2, limits.DESTROY_RETRY_S_MAX)
                with suppress(SandboxError):
                    await self.destroy(EndCause.DESTROYED)
        finally:
            self._retrying = False

    async def leave(self) -> None:
        """The node stops and the sandbox runs on: nothing of it is touched."""
        await self.sample()
        self.row = msgspec.structs.replace(self.row, memory_gib_s=self.meter.memory_gib_s)
        if not self.ended:
            with suppress(DsecError):
                await self._services.journal.put(self.row)
        if self._link is not None:
            await self._link.close(SandboxError("the node stops", sandbox=self.id))
        await self._tasks.close()
        self.execs.close()
        if self.hold is not None:
            self.hold.release()
            self.hold = None
