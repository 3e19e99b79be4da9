"""What machines of one backend have of this host: cgroups, a range of ids each, and two directories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from dsec.backends.vm.machine import EMULATOR_BYTES
from dsec.backends.vm.monitor import Confines, MonitorProcess, empty_cgroups, make_cgroups, remove_cgroups
from dsec.backends.vm.record import MachineRecord
from dsec.core.errors import DeadlineError, DsecError, GoneError, HostError, LaunchError, Outcome, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import NodeId
from dsec.core.limits import MIB
from dsec.core.states import EndCause
from dsec.density.cgroups import CgroupPlan, detect, memory_for_all, plan_cgroups, prepare_parent, remove_parent
from dsec.security.idranges import IdRanges

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TEMPLATE: Final = "tpl_"  # of what runs while a template is made; nobody's sandbox, so in no journal
_OWN: Final = f"{_TEMPLATE}{secrets.token_hex(6)}_"  # of this process
_ROOT: Final = "root"  # where every jail mounts its own
_MONITOR_PIDS: Final = 64  # threads of a monitor beside its processors
_KEPT_FOR_HOST: Final = 1024 * MIB
_PIDS_KEPT_FOR_HOST: Final = 4096


class PlaceConfig(Protocol):
    @property
    def id_dir(self) -> Path: ...

    @property
    def cgroup_parent(self) -> str: ...

    @property
    def proxied(self) -> bool: ...

    @property
    def machines_dir(self) -> Path:
        """Of sockets; gone after a reboot."""
        ...

    @property
    def sandboxes_dir(self) -> Path:
        """Of what sandboxes write."""
        ...


class Place:
    """Of one backend on one node."""

    def __init__(self, config: PlaceConfig, node: NodeId) -> None:
        self._config = config
        self._parent = f"{config.cgroup_parent}/{node}"
        self._opened = False
        self._cleaning: set[asyncio.Task[None]] = set()
        self.host = detect()
        self.ids = IdRanges(config.id_dir)
        self.boot_id = _BOOT_ID.read_text().strip()

    def open(self) -> None:
        """Blocking. Idempotent."""
        config, pid_max = self._config, int(Path("/proc/sys/kernel/pid_max").read_text())
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        prepare_parent(
            self.host,
            self._parent,
            pids_max=max(64, pid_max - _PIDS_KEPT_FOR_HOST),
            memory_max=memory_for_all(total, _KEPT_FOR_HOST),
        )
        for directory in (config.machines_dir / _ROOT, config.sandboxes_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ids.open()
        self._opened = True

    async def close(self) -> None:
        if self._cleaning:
            await asyncio.gather(*self._cleaning, return_exceptions=True)
        self.ids.close()
        if self._opened:
            remove_parent(self.host, self._parent)  # stays while sandboxes run on

    # ---- one machine -----------------------------------------------------------------------------

    def cgroups(self, name: str, *, processors: int, memory_bytes: int, cpu: float) -> CgroupPlan:
        """Of the monitor: the guest's memory and what the monitor needs itself."""
        return plan_cgroups(
            self.host,
            self._parent,
            name,
            cpu=cpu,
            memory_bytes=memory_bytes + EMULATOR_BYTES,
            pids=processors + _MONITOR_PIDS,
        )

    @property
    def root(self) -> Path:
        """Where jails mount their own."""
        return self._config.machines_dir / _ROOT

    def sockets_of(self, name: str) -> Path:
        return self._config.machines_dir / name

    def directory_of(self, name: str) -> Path:
        return self._config.sandboxes_dir / name

    def lay_out(self, record: MachineRecord, cgroups: CgroupPlan) -> None:
        """Blocking. What was made when it raises is removed by `remove`."""
        fault_point("vm.lay_out")
        make_cgroups(_files_of(cgroups))
        for directory in (record.sockets, record.directory):
            Path(directory).mkdir(mode=0o700)
            os.chown(directory, record.uid, record.uid)

    async def lay_out_again(self, record: MachineRecord, cgroups: CgroupPlan) -> None:
        """Of a machine that slept: whatever ran of it has ended (a half wakening has left a monitor); its cgroups are
        there, which after a reboot they are not, and count on; its sockets' directory is empty. Raises OSError,
        HostError."""
        fault_point("vm.lay_out_again")
        await empty_cgroups(record.cgroups)
        await asyncio.to_thread(self._lay_out_again, record, cgroups)

    async def clear(self, record: MachineRecord) -> None:
        """Of one that was not woken: the sockets of its monitor."""
        await asyncio.to_thread(self._empty_sockets, record)

    def _lay_out_again(self, record: MachineRecord, cgroups: CgroupPlan) -> None:
        make_cgroups({path: files for path, files in _files_of(cgroups).items() if not Path(path).is_dir()})
        self._empty_sockets(record)

    def _empty_sockets(self, record: MachineRecord) -> None:
        sockets = Path(record.sockets)
        _remove_tree(sockets)
        sockets.mkdir(mode=0o700)
        os.chown(sockets, record.uid, record.uid)

    def confines(self, record: MachineRecord, *, kvm: bool) -> Confines:
        return Confines(
            uid=record.uid,
            cgroups=tuple(record.cgroups),
            root=self.root,
            sockets=Path(record.sockets),
            kvm=kvm,
        )

    async def remove(self, record: MachineRecord) -> None:
        """Idempotent. Raises HostError if something resists."""
        try:
            await remove_cgroups(record.cgroups)
            for directory in (record.sockets, record.directory):
                await asyncio.to_thread(_remove_tree, Path(directory))
        except OSError as error:
            raise HostError(
                f"{record.sandbox} could not be removed from the node: {error}", outcome=Outcome.UNKNOWN
            ) from error
        self.ids.give_back(record.uid)

    def adopt(self, record: MachineRecord) -> MonitorProcess:
        """Of a machine that an earlier process has made. Raises GoneError with the cause when it does not run."""
        id = record.sandbox
        if record.boot_id != self.boot_id:
            raise GoneError(f"{id} ended when the node was rebooted", detail={"cause": EndCause.NODE_REBOOTED.value})
        if not record.pid:
            raise GoneError(f"{id} was never started", detail={"cause": EndCause.LAUNCH_FAILED.value})
        process = MonitorProcess.adopt(record.pid, record.start_ticks)
        if process is None:
            raise GoneError(
                f"{id} ended while its node was away; how is not known",
                detail={"cause": EndCause.SANDBOX_FAULT.value},
            )
        try:
            self.ids.retake(record.uid)
        except BaseException:
            process.forget()
            raise
        return process

    async def adopt_asleep(self, record: MachineRecord) -> None:
        """Of one that sleeps: what is left of its monitor ends. Raises HostError."""
        await self.end(record)
        self.ids.retake(record.uid)

    async def end(self, record: MachineRecord) -> None:
        """Whatever runs of it has ended when this returns."""
        # After a reboot pid and start time may both be another's.
        if record.boot_id != self.boot_id or not record.pid:
            return
        process = MonitorProcess.adopt(record.pid, record.start_ticks)
        if process is not None:
            await process.end()

    async def sweep(self, known: frozenset[str]) -> None:
        """What is called otherwise goes, and what earlier processes have left of templates that they were making."""
        await remove_cgroups(await asyncio.to_thread(self._left_templates))
        await asyncio.to_thread(self._sweep, known)

    def _left_templates(self) -> list[str]:
        roots = {*([self.host.v2] if self.host.v2 else []), *self.host.v1.values()}
        found = (path for root in roots for path in (root / self._parent).glob(f"{_TEMPLATE}*"))
        return [str(path) for path in found if path.is_dir() and not path.name.startswith(_OWN)]

    def _sweep(self, known: frozenset[str]) -> None:
        for place in (self._config.sandboxes_dir, self._config.machines_dir):
            if place.is_dir():
                for directory in place.iterdir():
                    if directory.name not in known and directory.name != _ROOT and not directory.name.startswith(_OWN):
                        shutil.rmtree(directory, ignore_errors=True)

    def clean_later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Clean-up that a cancelled caller must not cut short; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)
        return task

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; if nobody does, the record says what is left


def holder(cgroups: CgroupPlan) -> str:
    """The cgroup directory whose existence says that the machine is on the host."""
    directory = cgroups.cgroup2 or next(iter(cgroups.cgroup1.values()), None)
    if directory is None:
        raise UnsupportedError("this host has no cgroup hierarchy", hint="mount cgroup2 at /sys/fs/cgroup")
    return directory


def launch_error(id: str, error: Exception) -> DsecError:
    """Of a create that failed, and of which nothing is left."""
    if isinstance(error, (TimeoutError, DeadlineError)):
        return DeadlineError(f"{id} was not ready in time and has been removed", sandbox=id, outcome=Outcome.GONE)
    if isinstance(error, LaunchError):
        return LaunchError(f"{id} could not be started: {error.message}", sandbox=id, step=error.step)
    if isinstance(error, DsecError):
        error.sandbox = id
        return error
    return LaunchError(f"{id} could not be started: {error}", sandbox=id, step="node")


def _files_of(cgroups: CgroupPlan) -> dict[str, dict[str, str]]:
    files = {cgroups.cgroup1[controller]: values for controller, values in cgroups.cgroup1_files.items()}
    return {cgroups.cgroup2: cgroups.cgroup2_files, **files} if cgroups.cgroup2 else files


def _remove_tree(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def template_name() -> str:
    """Of a machine that is to become a template. The next process of the node ends what is left of it."""
    return f"{_OWN}{secrets.token_hex(6)}"
