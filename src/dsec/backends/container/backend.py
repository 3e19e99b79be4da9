"""Containers: create, adopt, discard."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from dsec.backends.base import (
    Capabilities,
    Entrance,
    Instance,
    InstanceSpec,
    Intend,
    Keeps,
    Layer,
    Probe,
    require_root,
)
from dsec.backends.container.capture import ContainerCapture
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.disk import Disk
from dsec.backends.container.failures import has_forgotten, is_taken_back, launch_error, was_bad
from dsec.backends.container.instance import ContainerInstance, connect_at
from dsec.backends.container.keptcgroups import KeptCgroups
from dsec.backends.container.launcher import Launcher, LauncherRefusal
from dsec.backends.container.plan import (
    FILTERS,
    HostFacts,
    holder_directory,
    lighten,
    limit_files,
    plan_claim,
    plan_launch,
    shape_of,
    under_names,
)
from dsec.backends.container.prepared import PreparedContainers
from dsec.backends.container.record import ContainerRecord, names_of, parse_record, record_of
from dsec.backends.container.trash import TRASH, put_away_unknown, remove_unknown_sockets
from dsec.backends.container.view import LIVE, STATIC, choose_view, find_lxcfs, require_view, view_of
from dsec.backends.steering import why_not_steered
from dsec.binaries import find_binary
from dsec.core.errors import (
    CapacityError,
    DsecError,
    GoneError,
    HostError,
    LaunchError,
    Outcome,
    StorageError,
)
from dsec.core.ids import NodeId, SandboxId, new_node_id, new_sandbox_id
from dsec.core.spec import Environment, NetworkMode, SandboxSpec, Substrate
from dsec.core.states import EndCause
from dsec.density.cgroups import (
    CgroupHost,
    detect,
    memory_for_all,
    prepare_cpuset,
    prepare_parent,
    remove_parent,
    remove_unknown,
)
from dsec.security import masks
from dsec.security.idranges import IdRanges
from dsec.storage.spread import spread_children
from dsec.wire.launch import (
    LAUNCH_VERSION,
    FilterArgs,
    HelloAnswer,
    HelloArgs,
    Launched,
    LaunchOp,
    LaunchPlan,
    LayerMount,
    LayerRef,
    TidyArgs,
    ViewArgs,
    Viewed,
)
from dsec.wire.node import Done

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROBE_S = 20.0
_CLAIM_S = 10.0  # a few system calls
_TAKEN_BACK_S = 0.05
_LXCFS_S = 5.0
_LXCFS_POLL_S = 0.01
_STARTING = "lxcfs is starting"


class ContainerBackend:
    """One per node. Instances run on when it is closed."""

    def __init__(self, config: ContainerConfig, *, node: NodeId):
        self._config = config
        self._node = node
        self._host = detect()
        self._ids = IdRanges(config.id_dir)
        self._disk = Disk(config)
        self._view = choose_view(config.resource_view, self._host, find_lxcfs())
        self._no_network = why_not_steered() if config.proxied else "the configuration offers none"
        self._no_live_view: str | None = None  # what the launcher says of lxcfs
        self._capabilities: tuple[str | None, Capabilities] | None = None  # with the answer that they were made with
        self._knows_views = True
        self._knows_light = False
        self._keeps_cgroups = False
        self._kept: KeptCgroups | None = None
        self._launcher: Launcher | None = None
        self._prepared: PreparedContainers
        self._facts: HostFacts | None = None
        self._boot_id = _BOOT_ID.read_text().strip()
        self._opening = asyncio.Lock()
        self._registered: set[str] = set()  # filters and layers that the launcher of this connection knows
        self._blobs: dict[str, str | None] = {}  # by layer that was mounted, what its data was read from
        self._registering = asyncio.Lock()
        self._connection = -1
        self._instances: dict[str, ContainerInstance] = {}  # by what the launcher calls them
        self._cleaning: set[asyncio.Task[None]] = set()
        self._planned: tuple[InstanceSpec, LaunchPlan] | None = None
        self._probe: Probe | None = None
        self._looking: asyncio.Task[object] | None = None

    @property
    def capabilities(self) -> Capabilities:
        known = self._capabilities
        if known is None or known[0] != self._no_live_view:
            known = self._capabilities = (self._no_live_view, self._able())
        return known[1]

    def _able(self) -> Capabilities:
        return Capabilities(
            substrate=Substrate.CONTAINER,
            networks=frozenset({NetworkMode.NONE} if self._no_network else {NetworkMode.NONE, NetworkMode.PROXIED}),
            network_reason=self._no_network,
            pause=self._host.v2 is not None,
            snapshot=Keeps.NOTHING if self._host.v2 is None else Keeps.DISK,
            fork=Keeps.NOTHING if self._host.v2 is None else Keeps.DISK,
            survives_node=True,
            warm=True,
            memory_limit=self._host.limits("memory") is not None,
            cpu_limit=self._host.limits("cpu") is not None,
            pids_limit=self._host.limits("pids") is not None,
            disk_limit=self._disk.limit,
            disk_limit_reason=self._disk.reason,
            volumes=True,
            links=True,
            devices=True,
            resource_view=self._view.kind if self._no_live_view is None else STATIC,
            resource_view_reason=self._no_live_view or self._view.reason,
        )

    @property
    def launcher(self) -> Launcher:
        if self._launcher is None:
            raise HostError("the container backend is not open")
        return self._launcher

    # ---- probe -----------------------------------------------------------------------------------

    async def probe(self) -> Probe:
        if self._probe is None:
            self._probe = await self._try()
        if self._probe.usable:
            with contextlib.suppress(DsecError):
                await self._look_at_view()  # lxcfs comes and goes
        return self._probe

    async def _try(self) -> Probe:
        """By launching a container of nothing but the agent, and destroying it."""
        facts = _describe(self._host)
        await asyncio.to_thread(self._disk.look)
        spec = SandboxSpec(environment=Environment("probe"), memory_bytes=64 << 20, pids_max=64)
        trial = InstanceSpec(new_sandbox_id(new_node_id()), self._node, spec, (), {}, None, None)
        try:
            instance = await self.create(trial, intend=_no_intent, deadline_s=_PROBE_S)
            await instance.destroy()
        except DsecError as error:
            return Probe(False, error.message, error.hint, facts)
        return Probe(True, facts=facts)

    # ---- create ----------------------------------------------------------------------------------

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> ContainerInstance:
        facts = await self._open()
        if instance.cpus is not None:
            await asyncio.to_thread(prepare_cpuset, self._host, facts.cgroup_parent)
        self._prepared.begin()
        plan: LaunchPlan | None = None
        try:
            plan = self._light(instance, self._plan(instance, facts, 0))
            return await self._create(instance, plan, facts, intend, deadline_s)
        finally:
            self._prepared.finish(plan)

    async def _create(
        self, instance: InstanceSpec, plan: LaunchPlan, facts: HostFacts, intend: Intend, deadline_s: float
    ) -> ContainerInstance:
        made = self._take_prepared(instance, plan)
        if made is None:
            id_base = await self._take_ids(holder_directory(facts, instance.id))
            plan = msgspec.structs.replace(plan, id_base=id_base)
        else:
            plan = made
        try:
            record = msgspec.structs.replace(
                record_of(plan, self._boot_id), disk_limited=self._disk.is_limited(instance)
            )
            await intend(record.to_bytes())
        except BaseException:
            if made is None:
                self._ids.give_back(plan.id_base)
            else:
                self._prepared.give_up(made)
            raise
        try:
            async with self._disk.prepared(plan, instance) as ready:
                launched = await self._launch(ready, instance.layers, deadline_s)
            return self._watch(record, plan, launched)
        except asyncio.CancelledError:
            self._clean_later(self.remove(record))
            raise
        except Exception as error:
            # Its caller may be cancelled now, too.
            await asyncio.shield(self._clean_later(self.remove(record)))
            raise launch_error(instance.id, error) from error

    def _light(self, instance: InstanceSpec, plan: LaunchPlan) -> LaunchPlan:
        # Links and forwarded connections are sockets in the sandbox's own network, which must be there before
        # anybody uses the sandbox.
        alone = not instance.spec.links and instance.spec.network is NetworkMode.NONE
        many = self._knows_light and len(self._instances) >= self._config.light_from
        return lighten(plan) if many and alone else plan

    async def _take_ids(self, holder: str) -> int:
        try:
            return self._ids.take(holder)
        except CapacityError:
            if not await self._prepared.give_way():
                raise
        return self._ids.take(holder)

    def _take_prepared(self, instance: InstanceSpec, plan: LaunchPlan) -> LaunchPlan | None:
        """One whose disk is to be limited, or that is made for later, begins from nothing."""
        if plan.spare or self._disk.is_limited(instance):
            return None
        return self._prepared.take(plan)

    def approach(self, record: bytes) -> Entrance:
        parsed = parse_record(record)
        return Entrance(functools.partial(connect_at, parsed), functools.partial(os.path.exists, parsed.socket))

    def _plan(self, instance: InstanceSpec, facts: HostFacts, id_base: int) -> LaunchPlan:
        """Whoever wants one asks for its shape first, and for that it has been planned."""
        if self._planned is not None and self._planned[0] is instance:
            return msgspec.structs.replace(self._planned[1], id_base=id_base)
        return plan_launch(instance, self._config, facts, id_base=id_base)

    # ---- spares ----------------------------------------------------------------------------------

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        if instance.volumes:
            return None  # of one that writes there must be none before it is asked for
        plan = plan_launch(instance, self._config, await self._open(), id_base=0)
        self._planned = (instance, plan)
        return shape_of(plan) + self._disk.shape(instance)

    async def claim(self, spare: Instance, instance: InstanceSpec) -> ContainerInstance:
        assert isinstance(spare, ContainerInstance)
        facts, known = await self._open(), spare.facts
        plan = self._plan(instance, facts, known.id_base)
        args = plan_claim(plan, known, spare.limits)
        try:
            await self.launcher.request(LaunchOp.CLAIM, args, Done, timeout_s=_CLAIM_S)
            if args.cgroup_files and plan.view is not None and self._knows_views:
                view = ViewArgs(known.launched_as, plan.view)
                await self.launcher.request(LaunchOp.VIEW, view, Viewed, timeout_s=_CLAIM_S)
        except LauncherRefusal as refusal:
            raise LaunchError(f"a spare cannot become {instance.id}: {refusal}", step="claim") from refusal
        spare.become(msgspec.structs.replace(known, sandbox=instance.id, instance=known.launched_as))
        return spare

    async def _launch(self, plan: LaunchPlan, layers: tuple[Layer, ...], deadline_s: float) -> Launched:
        await self._register(layers)
        if not self._knows_views:
            plan = msgspec.structs.replace(plan, view=None)
        if self._kept is not None and self._keeps_cgroups and not plan.named:
            plan = self._kept.use(plan)
        loop = asyncio.get_running_loop()
        until_s, again = loop.time() + deadline_s, False
        try:
            while True:
                try:
                    timeout_s = max(0.0, until_s - loop.time())
                    return await self.launcher.request(LaunchOp.LAUNCH, plan, Launched, timeout_s=timeout_s)
                except LauncherRefusal as refusal:
                    if is_taken_back(plan, refusal.failure) and loop.time() + _TAKEN_BACK_S < until_s:
                        await asyncio.sleep(_TAKEN_BACK_S)
                        continue
                    forgot = has_forgotten(refusal.failure)
                    if again or not (forgot or was_bad(plan, refusal.failure)):
                        raise
                again = True
                if forgot:
                    # The launcher was restarted between registering and launching; it knows nothing of before.
                    self._registered.clear()
                    await self._register(layers)
        except BaseException:
            if self._kept is not None:
                self._kept.lose(plan.cgroup1_from)
            raise

    async def _register(self, layers: tuple[Layer, ...]) -> None:
        """Make filters and layers known to the launcher of the present connection, each once."""
        wanted = {*FILTERS, *(layer.digest for layer in layers)}
        as_mounted = all(self._blobs.get(layer.digest) == layer.blob for layer in layers)
        if self._connection == self.launcher.connection and wanted <= self._registered and as_mounted:
            return
        async with self._registering:
            if self._connection != self.launcher.connection:
                self._registered.clear()
            for name, spec in FILTERS.items():
                if name not in self._registered:
                    await self.launcher.request(LaunchOp.FILTER, FilterArgs(name, spec), Done)
                    self._registered.add(name)
            if self._connection != self.launcher.connection:
                with contextlib.suppress(LauncherRefusal):  # one of before that still runs has no trash
                    await self.launcher.request(LaunchOp.TIDY, TidyArgs(str(self._config.sandboxes_dir)), Done)
                await self._await_view()
            self._connection = self.launcher.connection
            for layer in layers:
                await self._register_layer(layer)

    async def _register_layer(self, layer: Layer) -> None:
        if self._blobs.get(layer.digest, layer.blob) != layer.blob:
            # Another loader serves it, since the one of before is dead: what is mounted can be read no more.
            await self.launcher.request(LaunchOp.LAYER_UNMOUNT, LayerRef(layer.digest), Done)
            self._registered.discard(layer.digest)
        if layer.digest not in self._registered:
            mount = LayerMount(layer.digest, layer.kind, layer.meta, layer.blob)
            await self.launcher.request(LaunchOp.LAYER_MOUNT, mount, Done)
            self._registered.add(layer.digest)
            self._blobs[layer.digest] = layer.blob

    def _watch(self, record: ContainerRecord, plan: LaunchPlan, launched: Launched) -> ContainerInstance:
        """Raises ProcessLookupError if the agent has ended meanwhile."""
        complete = msgspec.structs.replace(
            record, pid=launched.pid, start_ticks=launched.start_ticks, view=launched.view
        )
        limits = limit_files(plan, cgroup2=plan.cgroup2, cgroup1=plan.cgroup1) if plan.spare else {}
        instance = ContainerInstance(self, complete, os.pidfd_open(launched.pid), limits)
        self._instances[record.launched_as] = instance
        return instance

    async def _look_at_view(self) -> None:
        """What the launcher says of views just now."""
        answer = await self.launcher.request(LaunchOp.HELLO, HelloArgs(LAUNCH_VERSION), HelloAnswer)
        self._knows_views = answer.views
        self._knows_light = answer.light
        self._keeps_cgroups = answer.keeps_cgroups
        self._prepared.is_known = answer.prepares
        if self._view.kind == LIVE:
            self._no_live_view = answer.no_live_view if answer.views else "the launcher that runs is of before"

    async def _await_view(self) -> None:
        """A launcher that has just been started knows in some milliseconds whether lxcfs answers."""
        await self._look_at_view()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LXCFS_S):
                while self._no_live_view == _STARTING:
                    await asyncio.sleep(_LXCFS_POLL_S)
                    await self._look_at_view()

    async def show(self, record: ContainerRecord, spec: SandboxSpec) -> ContainerRecord:
        """The limits of a running sandbox have become those of `spec`: what it is shown follows.

        Returns what is known of it now. Raises HostError, and then it is shown what it was before, or the machine.
        """
        facts = await self._open()
        view = view_of(facts.view, spec)
        if view is None:
            return record
        try:
            viewed = await self.launcher.request(LaunchOp.VIEW, ViewArgs(record.launched_as, view), Viewed)
        except LauncherRefusal as refusal:
            raise HostError(f"{record.sandbox} cannot be shown its new share: {refusal}") from refusal
        return msgspec.structs.replace(record, view=viewed.view)

    async def capture(self, record: ContainerRecord) -> ContainerCapture:
        """Begins a snapshot of what it has written. Raises GoneError, StorageError, UnavailableError."""
        await self._open()
        await self._look_at_view()  # a launcher that has died is started again
        return await ContainerCapture.begin(record, state=self._config.state_dir, launcher_pid=self.launcher.pid)

    # ---- adopt, discard, remove ------------------------------------------------------------------

    async def adopt(self, id: SandboxId, record: bytes) -> ContainerInstance:
        await self._open()
        known = parse_record(record)
        if known.boot_id != self._boot_id:
            raise GoneError(f"{id} ended when the node was rebooted", detail={"cause": EndCause.NODE_REBOOTED.value})
        if not known.pid:
            known = await self._started(known)
        try:
            pidfd = os.pidfd_open(known.pid)
        except ProcessLookupError as error:
            raise _gone_while_away(id) from error
        # Only now that the descriptor pins the process does its start time prove that it is the one of the record.
        if _start_ticks(known.pid) != known.start_ticks:
            os.close(pidfd)
            raise _gone_while_away(id)
        try:
            self._ids.retake(known.id_base)
        except BaseException:
            os.close(pidfd)
            raise
        instance = ContainerInstance(self, known, pidfd)
        self._instances[known.launched_as] = instance
        return instance

    async def _started(self, intent: ContainerRecord) -> ContainerRecord:
        """A node that was killed between launch and journal left only its intent: the launcher knows the rest."""
        listed = await self.launcher.listed()
        for one in listed.sandboxes:
            if one.sandbox == intent.launched_as:
                return msgspec.structs.replace(intent, pid=one.pid, start_ticks=one.start_ticks)
        raise GoneError(f"{intent.sandbox} was never started", detail={"cause": EndCause.LAUNCH_FAILED.value})

    async def discard(self, id: SandboxId, record: bytes) -> None:
        await self._open()
        known = parse_record(record)
        if known.boot_id != self._boot_id:
            # Its process ended with the machine; by now pid and start time may both be another's.
            known = msgspec.structs.replace(known, pid=0, start_ticks=0)
        await self.remove(known)

    async def remove(self, record: ContainerRecord) -> None:
        """Nothing of it is left on the host afterwards. Idempotent. Raises HostError if something resists."""
        project = self._disk.project_of(record)
        args, kept = record.destroy_args(), self._kept
        if kept is not None and self._keeps_cgroups and len(self._instances) > self._config.keep_cgroups_from:
            args = kept.keep(record)
        try:
            await self.launcher.request(LaunchOp.DESTROY, args, Done)
        except BaseException as error:
            if kept is not None:
                kept.lose(args.cgroup1_to)
            if isinstance(error, LauncherRefusal):
                raise HostError(
                    f"{record.sandbox} could not be removed from the node: {error}", outcome=Outcome.UNKNOWN
                ) from error
            raise
        if kept is not None:
            kept.add(args.cgroup1_to)
        if project is not None:
            self._disk.lift(project)
        self._instances.pop(record.launched_as, None)
        self.launcher.forget(record.launched_as)
        self._ids.give_back(record.id_base)

    async def keep_layers(self, digests: Collection[str]) -> None:
        trash = self._config.sandboxes_dir / TRASH
        if not (self._config.run_dir / "launch.sock").exists() and not (trash.exists() and any(trash.iterdir())):
            return  # no launcher has ever mounted one
        await self._open()
        await self._register(())
        for digest in set((await self.launcher.listed()).layers) - set(digests):
            # A launch that comes in between is told that there is no such layer, and registers it again.
            self._registered.discard(digest)
            self._blobs.pop(digest, None)
            with contextlib.suppress(LauncherRefusal):
                await self.launcher.request(LaunchOp.LAYER_UNMOUNT, LayerRef(digest), Done)

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        known = names_of(records)
        return self._prepared.names | known if self._facts is not None else known

    async def sweep(self, records: Collection[bytes]) -> None:
        self._looking = asyncio.create_task(asyncio.to_thread(self._disk.look))  # before somebody needs to know
        try:
            known = names_of(records)
        except StorageError:
            return  # whose they are cannot be told
        await asyncio.to_thread(put_away_unknown, self._config.sandboxes_dir, known)
        # Of what was prepared when both launcher and node were killed.
        await asyncio.to_thread(remove_unknown_sockets, self._config.run_dir / "sb", known)
        parent = f"{self._config.cgroup_parent}/{self._node}"
        await asyncio.to_thread(remove_unknown, self._host, parent, known)

    async def close(self) -> None:
        if self._looking is not None:
            await asyncio.wait([self._looking])
        if self._cleaning:
            await asyncio.gather(*self._cleaning, return_exceptions=True)
        for instance in self._instances.values():
            instance.abandon()
        self._instances.clear()
        if self._launcher is not None:
            await self._prepared.close()
            await self._launcher.close()
        self._ids.close()
        if self._kept is not None:
            self._kept.clear()
        if self._facts is not None:
            remove_parent(self._host, self._facts.cgroup_parent)  # stays while sandboxes run on

    def _clean_later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Clean-up that a cancelled caller must not cut short; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)
        return task

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; if nobody does, the record says what is left

    # ---- opening ---------------------------------------------------------------------------------

    async def _open(self) -> HostFacts:
        if self._facts is not None:
            return self._facts
        require_root("containers")
        async with self._opening:
            if self._facts is None:
                self._facts = await asyncio.to_thread(self._prepare)
        return self._facts

    def _prepare(self) -> HostFacts:
        config = self._config
        require_view(config.resource_view, self._view)
        parent = f"{config.cgroup_parent}/{self._node}"
        pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
        memory_total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        prepare_parent(
            self._host,
            parent,
            pids_max=max(64, pid_max - config.pids_kept_for_host),
            memory_max=memory_for_all(memory_total, config.memory_kept_for_host),
        )
        self._kept = KeptCgroups(self._host, parent)
        for directory in (config.run_dir / "sb", config.sandboxes_dir, config.sandboxes_dir / TRASH):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        spread_children(config.sandboxes_dir)
        self._ids.open()
        self._launcher = Launcher(
            config.run_dir,
            launch_binary=config.launch_binary or find_binary("dsec-launch"),
            agent_binary=config.agent_binary or find_binary("dsec-agent"),
            start_s=config.launcher_start_s,
            lxcfs=self._view.lxcfs,
        )
        self._prepared = PreparedContainers(
            config.prepared,
            named=lambda plan: under_names(plan, config, new_sandbox_id(self._node)),
            ids=self._ids,
            launcher=self._launcher,
            boot_id=self._boot_id,
        )
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return HostFacts(self._host, parent, open_files, self._view.kind, masks.needed())


async def _no_intent(record: bytes) -> None:
    """A probe is gone again before anything could be adopted."""


def _gone_while_away(id: str) -> GoneError:
    return GoneError(
        f"{id} ended while its node was away; how is not known", detail={"cause": EndCause.SANDBOX_FAULT.value}
    )


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name may hold blanks and parentheses; what follows the last one is plain. Start time is field 22.
    return int(text.rpartition(")")[2].split()[19])


def _describe(host: CgroupHost) -> dict[str, str]:
    limits = {c: host.limits(c) or "not limited" for c in ("memory", "cpu", "pids")}
    return {
        "cgroups": host.mode,
        **{f"{controller} limit": where for controller, where in limits.items()},
        "freeze": "cgroup.freeze" if host.v2 else "not available",
    }
