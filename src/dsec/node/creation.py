"""Makes sandboxes: each once per idempotency key, whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, Instance, InstanceSpec
from dsec.backends.forwarding import NETWORK
from dsec.backends.machines import HasDisks
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    DsecError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    LaunchError,
    LimitError,
    NotFoundError,
    Outcome,
    UnsupportedError,
)
from dsec.core.ids import NodeId, SandboxId, new_sandbox_id
from dsec.core.spec import NetworkMode, SandboxSpec, Substrate
from dsec.core.states import EndCause, SandboxState
from dsec.node.admission import Room, refusal
from dsec.node.approach import Approach
from dsec.node.devices import Devices
from dsec.node.environments import Environments, Resolved
from dsec.node.execs import NodeExec
from dsec.node.facts import check_place, facts_of
from dsec.node.once import Once
from dsec.node.origins import Origin
from dsec.node.registry import Registry
from dsec.node.rights import project_seen
from dsec.node.rows import KeyRow, SandboxRow
from dsec.node.services import Services
from dsec.node.snapshots import Snapshots
from dsec.node.startup import Readiness, main_request
from dsec.node.supervisor import Supervisor
from dsec.node.tasks import result_of
from dsec.node.warmpool import WarmPool
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire import agent
from dsec.wire.codec import pack
from dsec.wire.errors import body_of
from dsec.wire.node import Caller
from dsec.wire.plans import CreatePlan
from dsec.wire.records import CreateRequest, ExecRequest, Sandbox

log = get_logger(__name__)

_ANSWERED_S: Final = 0.001  # by then its answer is out

# Nothing of these is a failed launch: the request, or the moment, was wrong.
_PASSED = (InvalidArgumentError, NotFoundError, ConflictError, UnsupportedError, CapacityError)


class Creation:
    def __init__(
        self,
        services: Services,
        registry: Registry,
        backends: Mapping[Substrate, Backend],
        environments: Environments,
        room: Callable[[], Room],
        boot_id: str,
        warm: WarmPool,
        *,
        snapshots: Snapshots,
    ) -> None:
        self._services = services
        self._snapshots = snapshots
        self._warm = warm
        self._registry = registry
        self._backends = backends
        self._environments = environments
        self._room = room
        self._boot_id = boot_id
        self._devices = Devices(services.config.calls.cdi_dirs)
        self._once: Once[Sandbox] = Once(services.tasks, "create")
        self._turn = asyncio.Semaphore(services.config.creates_at_once_max)
        self._limits: dict[str, asyncio.Timeout] = {}  # of sandboxes that are being made

    async def create(self, request: CreateRequest, caller: Caller, key: str | None) -> Sandbox:
        """A running sandbox. Raises CapacityError, EnvironmentNotFoundError, ConflictError (name), IdempotencyError,
        UnsupportedError; LaunchError with the step that failed, and then nothing is left and the key is free again."""
        if key is None:
            return await self._without_key(request, caller)
        if not 1 <= len(key.encode("utf-8", "surrogatepass")) <= limits.IDEMPOTENCY_KEY_BYTES_MAX:
            raise LimitError(f"an idempotency key has 1 to {limits.IDEMPOTENCY_KEY_BYTES_MAX} bytes")
        hash = _hash(request)
        scope = (caller.project, key)
        # It goes on without its caller: with the same key they get it, or learn why not.
        return await self._once.done(
            scope, hash, lambda: self._make(request, caller, key, hash), lambda: self._known(scope, hash)
        )

    def knows(self, project: str, key: str) -> bool:
        """Whether a create of this key is under way, or there is what came of it."""
        return self._once.is_under_way((project, key)) or self._services.journal.key(project, key) is not None

    async def _without_key(self, request: CreateRequest, caller: Caller) -> Sandbox:
        task = self._services.tasks.spawn(self._make(request, caller, None, b""), awaited=True)
        try:
            return await result_of(task)
        except asyncio.CancelledError:
            # Nobody could ever learn its id. The task removes what there is of it; if it was done already, we do.
            if not task.cancel() and task.exception() is None:
                await self._destroy_unknown(task.result().id)
            raise

    async def _destroy_unknown(self, id: str) -> None:
        sandbox = self._registry.find(id)
        if sandbox is not None:
            with suppress(DsecError):
                await sandbox.destroy(EndCause.DESTROYED, "its caller went away before it learned its id")

    def _known(self, scope: tuple[str, str], hash: bytes) -> Sandbox | None:
        row = self._services.journal.key(*scope)
        if row is None or row.at < self._services.clock.wall_s() - limits.IDEMPOTENCY_TTL_S:
            return None
        if row.request_hash != hash:
            raise self._once.mismatch(scope[1])
        live = self._registry.find(row.sandbox)
        if live is not None:
            return live.view()
        buried = self._services.journal.tombstone(row.sandbox)
        return None if buried is None else buried.sandbox

    def give_up(self, id: str) -> None:
        """Whoever destroys a sandbox that is being made, which may take minutes, need not wait for that: its create
        fails, as soon as nothing is left of it."""
        limit = self._limits.pop(id, None)
        if limit is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    # -- without one -------------------------------------------------------------------------------

    async def plan(self, request: CreateRequest, caller: Caller, key: str | None) -> CreatePlan:
        """What `create` would do. Raises what it would raise for a wrong request, IdempotencyError."""
        known = key is not None and self._known((caller.project, key), _hash(request)) is not None
        origin = self._origin(request, caller)
        spec = request.spec if origin is None else origin.spec_for(request.spec, request.said())
        return await self.plan_of(spec, caller.project, origin, known=known)

    async def plan_of(self, spec: SandboxSpec, project: str, origin: Origin | None, *, known: bool) -> CreatePlan:
        refused, found = None, origin is not None
        try:
            backend = self._backend(spec)
            if origin is None:
                (await self._resolve(spec, backend, None)).hold.release()
                found = True
            self._admit(spec, project)
        except DsecError as error:
            refused = body_of(error)
        labels = self._services.config.labels
        devices = await asyncio.to_thread(self._devices.kinds) if spec.place is not None and spec.place.devices else ()
        return CreatePlan(
            node=self._services.journal.node_id,
            project=project,
            spec=spec,
            known=known,
            refused=refused,
            facts=facts_of(
                spec,
                self._backends,
                self._room(),
                labels,
                has_environment=found,
                devices=devices,
                relays=self._services.links.far is not None,
            ),
        )

    def _origin(self, request: CreateRequest, caller: Caller) -> Origin | None:
        if request.snapshot is None:
            return None
        return self._snapshots.origin(request.snapshot, project=project_seen(caller), own=caller.project)

    # -- one create --------------------------------------------------------------------------------

    async def make(self, request: CreateRequest, caller: Caller, origin: Origin, fork: str) -> Sandbox:
        """One of a fork's, on `origin`. Raises as `create` does."""
        return await self._make(request, caller, None, b"", origin, fork)

    async def _make(
        self,
        request: CreateRequest,
        caller: Caller,
        key: str | None,
        hash: bytes,
        origin: Origin | None = None,
        fork: str | None = None,
    ) -> Sandbox:
        """`fork`: its id, while the sandbox is one of several that are made together or not at all."""
        clock = self._services.clock
        started = clock.monotonic_s()
        spec = request.spec
        try:
            origin = self._origin(request, caller) or origin
            if origin is not None:
                spec = origin.spec_for(spec, request.said())
            backend = self._backend(spec)
            sandbox = await self._reserve(spec, backend, caller, key, origin, fork)
            key_row = None
            if key is not None:
                key_row = KeyRow(
                    project=caller.project, key=key, request_hash=hash, sandbox=sandbox.id, at=clock.wall_s()
                )
            async with sandbox.creating():
                await self._launch(sandbox, backend, key_row, origin, started=started, timeout_s=request.timeout_s)
        except DsecError as error:
            step = error.step if isinstance(error, LaunchError) and error.step else ""
            metrics.CREATE_FAILURES.labels(spec.substrate, step, error.code).inc()
            raise
        took_s = clock.monotonic_s() - started
        metrics.CREATES.labels(spec.substrate).inc()
        metrics.CREATE_SECONDS.labels(spec.substrate).observe(took_s)
        # Once the caller has its answer, and not before it.
        line = partial(
            log.info, "sandbox created", sandbox=sandbox.id, substrate=str(spec.substrate), took_s=round(took_s, 6)
        )
        asyncio.get_running_loop().call_later(_ANSWERED_S, line)
        return sandbox.view()

    async def _resolve(self, spec: SandboxSpec, backend: Backend, origin: Origin | None) -> Resolved:
        if origin is not None:
            return await origin.acquire(self._environments)
        if not backend.capabilities.layers:
            # The backend knows what it begins as by its name.
            if not isinstance(backend, HasDisks):
                return Resolved(hold=await self._environments.hold(()))
            manifest = (await asyncio.to_thread(backend.image_of, spec.environment)).manifest
            hold, layers = await self._environments.layers(manifest.layers)
            return Resolved(hold=hold, layers=layers, env=manifest.env)
        try:
            return await self._environments.acquire(spec.environment)
        except EnvironmentNotFoundError as error:
            # Where no sandbox can be made at all, to build an environment first would be in vain.
            probe = await backend.probe()
            if probe.usable:
                raise
            raise UnsupportedError(
                f"this node can make no {spec.substrate} sandboxes: {probe.reason or 'not usable'}", hint=probe.hint
            ) from error

    def _backend(self, spec: SandboxSpec) -> Backend:
        backend = self._backends.get(spec.substrate)
        if backend is None:
            offered = ", ".join(sorted(self._backends)) or "none"
            raise UnsupportedError(
                f"this node does not offer the substrate {spec.substrate}", hint=f"it offers {offered}"
            )
        able = backend.capabilities
        if spec.network not in able.networks:
            why = f": {able.network_reason}" if able.network_reason else ""
            raise UnsupportedError(
                f"{spec.substrate} sandboxes on this node do not have network mode {spec.network}{why}",
                hint=f"they have {', '.join(sorted(able.networks))}",
            )
        if spec.disk_bytes is not None and backend.capabilities.disk_limit is None:
            raise UnsupportedError(
                f"{spec.substrate} sandboxes on this node cannot be held to a disk limit",
                hint="leave disk out, or see what `dsec doctor` says of the disk limit",
            )
        check_place(spec, backend, self._services.config.labels, self._services.journal.node_id, self._devices.kinds)
        if spec.links and not (backend.capabilities.links or backend.capabilities.links_by_agent):
            raise UnsupportedError(f"{spec.substrate} sandboxes on this node cannot have links to others")
        if spec.volumes and not backend.capabilities.volumes:
            raise UnsupportedError(f"{spec.substrate} sandboxes on this node cannot have volumes")
        return backend

    async def _reserve(
        self,
        spec: SandboxSpec,
        backend: Backend,
        caller: Caller,
        key: str | None,
        origin: Origin | None,
        fork: str | None,
    ) -> Supervisor:
        """Admitted and in the registry, so that the next one counts it; nothing is on the host yet."""
        services = self._services
        now = services.clock.wall_s()
        self._admit(spec, caller.project)
        row = SandboxRow(
            id=new_sandbox_id(services.journal.node_id),
            project=caller.project,
            principal=caller.principal,
            spec=spec,
            state=str(SandboxState.CREATING),
            boot_id=self._boot_id,
            created_at=now,
            key=key,
            snapshot=None if origin is None else origin.snapshot,
            fork=fork,
            forked=fork is not None,
            base=() if origin is None else origin.base,
            ttl_running_s=spec.ttl_running_s,
            ttl_idle_s=spec.ttl_idle_s,
            running_until=None if spec.ttl_running_s is None else services.clock.monotonic_s() + spec.ttl_running_s,
        )
        sandbox = Supervisor(row, backend=backend, services=services)
        try:
            self._registry.add(sandbox)
        except ConflictError:
            sandbox.uncount()
            raise
        return sandbox

    def _admit(self, spec: SandboxSpec, project: str) -> None:
        """Raises CapacityError, ConflictError, VolumeNotFoundError."""
        refused = refusal(spec, self._room())
        if refused is not None:
            raise refused
        self._services.volumes.check(spec, project)
        self._registry.check_name(project, spec.name)
        self._registry.check_member(project, spec)
        self._services.jobs.check_new(spec)
        self._registry.check_apart(project, spec)

    async def _launch(
        self,
        sandbox: Supervisor,
        backend: Backend,
        key: KeyRow | None,
        origin: Origin | None,
        *,
        started: float,
        timeout_s: float,
    ) -> None:
        step = "turn"
        approach: Approach | None = None

        def left_s() -> float:
            return max(0.0, started + timeout_s - self._services.clock.monotonic_s())

        async def intend(record: bytes) -> None:
            nonlocal approach
            await sandbox.intend(record, key)
            entrance = backend.approach(record)
            if entrance is not None:
                approach = Approach(entrance, sandbox=sandbox.id, tasks=self._services.tasks)

        def create_ms() -> float:
            return (self._services.clock.monotonic_s() - started) * 1000

        try:
            async with asyncio.timeout(left_s()) as limit:
                self._limits[sandbox.id] = limit
                async with self._turn:
                    with self._alone():
                        step = "environment"
                        resolved = await self._resolve(sandbox.row.spec, backend, origin)
                        sandbox.settle(resolved)
                        program = main_request(sandbox.id, sandbox.row.spec, resolved)
                        wanted = _instance_spec(sandbox, resolved, self._services.journal.node_id)
                        if origin is not None and origin.machine:
                            program, wanted = None, replace(wanted, machine=origin.machine)  # it runs already
                        if sandbox.row.spec.volumes:
                            step = "volumes"
                            sources = await self._services.volumes.sources(sandbox.row.spec, sandbox.row.project)
                            wanted = replace(wanted, volumes=sources)
                        step = "claim"
                        user = sandbox.row.spec.user
                        alone = program is None and user is None and sandbox.row.spec.network is NetworkMode.NONE
                        done_ms = create_ms if alone else None
                        # Spares are made of environments.
                        ready = origin is None and await self._claim(sandbox, backend, wanted, key, done_ms)
                        if not ready:
                            step = "backend"
                            if (attach := self._services.egress.opener(sandbox)) is not None:
                                wanted = replace(wanted, attach=attach)
                            instance = await backend.create(wanted, intend=intend, deadline_s=max(left_s(), 0.001))
                            step = "hello"
                            client = None if approach is None else await approach.client()
                            await sandbox.begin(instance, client, deadline_s=left_s())
                        step = NETWORK
                        await self._services.egress.open(sandbox)
                        step = "links"
                        await self._services.links.open(sandbox)
                        if user is not None:
                            step = "user"
                            await _check_user(sandbox, user)
                if program is not None:  # others have their turn while this one waits
                    step = "start"
                    main = await _start(sandbox, program)
                    step = "ready"
                    if sandbox.row.spec.ready is not None:
                        await Readiness(sandbox.row.spec.ready, main, sandbox.client).wait(sandbox.id, left_s())
                step = "journal"
                await sandbox.created(create_ms())
        except BaseException as error:
            given_up = self._limits.pop(sandbox.id, None) is None
            if approach is not None:
                approach.close()
            # Release survives cancellation: it is a task of the node, and waited for.
            removal = self._services.tasks.spawn(sandbox.abandon(f"{step}: {error}"), awaited=True, finishes=True)
            clean = await _finished(removal)
            if isinstance(error, asyncio.CancelledError):
                raise
            if given_up and clean:
                raise LaunchError(
                    "the sandbox was destroyed while it was made", step=step, sandbox=sandbox.id, outcome=Outcome.GONE
                ) from error
            raise _launch_error(sandbox.id, step, error, clean=clean) from error
        self._limits.pop(sandbox.id, None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Spares are made when no create is under way."""
        self._warm.begin()
        try:
            yield
        finally:
            self._warm.finish()

    async def _claim(
        self,
        sandbox: Supervisor,
        backend: Backend,
        wanted: InstanceSpec,
        key: KeyRow | None,
        done_ms: Callable[[], float] | None,
    ) -> bool:
        """A spare becomes the sandbox. False when there is none, or it is of no use: nothing has been written then."""
        spare = await self._warm.take(backend, wanted)
        if spare is None:
            return False
        try:
            instance = await claimed(spare.instance, spare.client, backend, wanted)
        except DsecError as error:
            log.warning("a spare could not be claimed", sandbox=sandbox.id, spare=spare.id, error=str(error))
            self._warm.give_up(spare)
            return False
        except BaseException:
            self._warm.give_up(spare)
            raise
        try:
            await sandbox.begin_claimed(
                instance, spare.client, spare=spare.id, key=key, create_ms=None if done_ms is None else done_ms()
            )
        except BaseException:
            # It goes with the sandbox now.
            self._services.tasks.spawn(self._services.journal.forget_spare(spare.id), awaited=True, finishes=True)
            raise
        finally:
            self._warm.let_go(spare)
        return True


async def claimed(spare: Instance, client: AgentClient, backend: Backend, wanted: InstanceSpec) -> Instance:
    """Launcher and agent are told at the same time. Both have answered, or failed, when it returns or raises."""
    told = agent.ClaimArgs(
        sandbox=wanted.id,
        env={_bytes(key): _bytes(value) for key, value in wanted.env.items()},
        user=wanted.user,
        workdir=None if wanted.workdir is None else _bytes(wanted.workdir),
        hostname=wanted.hostname if backend.capabilities.own_machine else None,
    )
    instance, answered = await asyncio.gather(backend.claim(spare, wanted), client.claim(told), return_exceptions=True)
    for result in (instance, answered):
        if isinstance(result, BaseException):
            raise result
    assert not isinstance(instance, BaseException)
    return instance


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


async def _finished(task: asyncio.Task[bool]) -> bool:
    """The result of a task that is waited for whatever happens to the one that waits."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def _check_user(sandbox: Supervisor, user: str) -> None:
    """Only the agent knows whom the environment has. Who asks for somebody else learns it by no command, but now."""
    try:
        await (await sandbox.client()).stat(agent.PathArgs(path=b"/", user=user))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            error.message.removeprefix("stat: "),
            hint="a number needs no entry there",
            sandbox=sandbox.id,
            detail=error.detail,
        ) from error


async def _start(sandbox: Supervisor, program: ExecRequest) -> NodeExec:
    try:
        return await sandbox.start_main(program)
    except DsecError as error:
        raise LaunchError(
            f"the environment's program could not be started: {error.message}",
            hint=error.hint,
            step="start",
            sandbox=sandbox.id,
        ) from error


def _instance_spec(sandbox: Supervisor, resolved: Resolved, node: NodeId) -> InstanceSpec:
    row = sandbox.row
    return InstanceSpec(
        id=SandboxId(row.id),
        node=node,
        spec=row.spec,
        layers=resolved.layers,
        env={**resolved.env, **row.spec.env},
        user=row.user,
        workdir=row.workdir,
    )


def _launch_error(id: str, step: str, error: BaseException, *, clean: bool) -> DsecError:
    """What the caller could change passes as it is; everything else is a failed launch, with the step that failed."""
    outcome = Outcome.GONE if clean else Outcome.UNKNOWN
    hint = None if clean else "something of it could not be removed; the node goes on trying"
    if isinstance(error, LaunchError) and clean:
        error.sandbox = error.sandbox or id
        return error
    if isinstance(error, _PASSED) and clean:
        return error
    if isinstance(error, TimeoutError | DeadlineError):
        message = f"the sandbox was not ready in time; it was at step {step}"
    elif isinstance(error, DsecError):
        message, hint = f"the sandbox could not be launched: {error.message}", hint or error.hint
    else:
        message = f"the sandbox could not be launched: {type(error).__name__} at step {step}"
    told = error.step if isinstance(error, DsecError) and error.step else step
    return LaunchError(message, hint=hint, step=told, sandbox=id, outcome=outcome)


def _hash(request: CreateRequest) -> bytes:
    asked = request.spec if request.snapshot is None else (request.spec, request.snapshot, *sorted(request.said()))
    return hashlib.sha256(pack(asked)).digest()
