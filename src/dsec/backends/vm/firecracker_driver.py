"""Machines under Firecracker: as those under QEMU, booted once as a template, and cloned from then on.

A stopped machine is two files that Firecracker writes, its memory and the state of its devices. A clone maps the
memory privately, or has it served page by page by `dsec-pages`. The state holds the paths of all files, so each clone
finds its own under the same names: the jail gives them.

The jail is `dsec-jail` and not Firecracker's `jailer`, which has no namespaces for IPC and names, a network namespace
only if somebody else has made one, leaves capabilities in the bounding set and new privileges to be had, and binds
nothing: each file of a template would be linked or copied into a directory of each clone, on one file system. What it
has that ours did not, a node of its own for each device, ours has now (tests/contract/test_firecracker.py compares).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import string
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from dsec.backends.vm import machine
from dsec.backends.vm.console import BootConsole
from dsec.backends.vm.disks import copy_disk, drop_holes, make_disk
from dsec.backends.vm.drivers import said_by
from dsec.backends.vm.firecracker import Firecracker
from dsec.backends.vm.firecracker_api import FirecrackerApi
from dsec.backends.vm.firecracker_machine import AGENT_PORT, API, VSOCK, FirecrackerMachine, WrittenMemory
from dsec.backends.vm.initramfs import plan_text, with_plan
from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import Confines, MonitorProcess, jail_plan, start_ticks
from dsec.backends.vm.network import CARD, TAP, tap
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.templates import CONSOLE, DISK, RAM, STATE, Template
from dsec.binaries import find_binary
from dsec.core.errors import DeadlineError, DsecError, LaunchError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.wire.jail import JailBind

GENERATION: Final = "firecracker-1"  # of what is below: a snapshot of another one does not fit
# Interrupts of a machine without PCI: 19, less vsock, entropy, balloon, disk, and the one that tells of a clone. A
# network card takes another.
DRIVES_MAX: Final = 14

_GUEST_CID: Final = 3
_CARD_NAME: Final = "eth0"
_POLL_S: Final = 0.002
_MONITOR_S: Final = 30.0
_SAVE_S: Final = 120.0
_KERNEL: Final = (
    "console=ttyS0 quiet panic=-1 oops=panic reboot=k pci=off mitigations=off random.trust_cpu=on 8250.nr_uarts=1 "
    "init_on_alloc=0 cryptomgr.notests audit=0 apparmor=0 rcupdate.rcu_expedited=1 swiotlb=noforce rdinit=/init"
)

# In the jail.
_PROGRAM: Final = "/firecracker"
_PAGES: Final = "/dsec-pages"
_SERVED: Final = "pages"
_DISK: Final = f"/disk/{DISK}"
_USERFAULTS: Final = "/dev/userfaultfd"
_TUN: Final = "/dev/net/tun"


@dataclass(frozen=True, slots=True)
class FirecrackerDriver:
    firecracker: Firecracker
    vmlinux: Path
    initramfs: Path
    served: bool = False  # memory of clones by `dsec-pages`, not by mapping the file
    persistent: bool = False  # layers are memory to the guest, not disks; from 1.14
    differences: bool = False  # the monitor notes what clones write, for their snapshots
    name: ClassVar[str] = "firecracker"
    memory_mode: ClassVar[int] = 0o444

    @property
    def accelerator(self) -> str:
        return "kvm"

    @property
    def is_current(self) -> bool:
        return self.firecracker.is_current

    @property
    def identity(self) -> dict[str, str]:
        layers = {"layer_device": "pmem"} if self.persistent else {}
        return {"monitor": self.firecracker.text, "accelerator": "kvm", "generation": GENERATION, **layers}

    @property
    def shown(self) -> dict[str, str]:
        memory = "served page by page" if self.served else "mapped"
        return {"monitor": self.firecracker.text, "templates": "read only", "memory": memory}

    def control(self, sockets: Path, *, owner: int) -> FirecrackerMachine:
        return FirecrackerMachine(sockets, owner=owner)

    # ---- templates -------------------------------------------------------------------------------

    @asynccontextmanager
    async def booting(
        self, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> AsyncIterator[FirecrackerMachine]:
        """A machine that boots in `directory`, of whose memory a template can be made. Its end is the block's."""
        drives = drives_of(shape)
        await asyncio.to_thread(self._lay_out, directory, shape, confines.uid)
        binds = [
            *layers,
            JailBind(str(directory), machine.TEMPLATE, writable=True),
            JailBind(str(directory / DISK), _DISK, writable=True),
            JailBind(str(self.vmlinux), "/boot/vmlinux"),
        ]
        confines = replace(confines, binds=(*confines.binds, *binds))
        with BootConsole(directory / CONSOLE, owner=confines.uid) as console:
            async with self._booted(confines, shape, drives, console) as found:
                yield found

    @asynccontextmanager
    async def _booted(
        self, confines: Confines, shape: Shape, drives: list[tuple[str, str, bool]], console: BootConsole
    ) -> AsyncIterator[FirecrackerMachine]:
        process = self._start(confines, network=shape.network, output=console.path)
        try:
            found = self.control(confines.sockets, owner=confines.uid)
            await self._ready(found.api, process)
            await self._boot(found.api, shape, drives)
            try:
                yield found
            finally:
                found.close()
        except (DsecError, TimeoutError) as error:
            message = error.message if isinstance(error, DsecError) else "it did not come up in time"
            said = said_by(f"a template did not come up: {message}", process)
            raise LaunchError(f"{said}{console.last_words()}", step="template") from error
        finally:
            await asyncio.shield(process.end())
            process.forget()

    async def save(self, found: FirecrackerMachine, directory: Path) -> None:
        """Stops the machine and writes it; it is of no other use afterwards."""
        fault_point("vm.template.save")
        await found.pause(timeout_s=_MONITOR_S)
        paths = {"snapshot_path": f"{machine.TEMPLATE}/{STATE}", "mem_file_path": f"{machine.TEMPLATE}/{RAM}"}
        await found.api.put("/snapshot/create", {"snapshot_type": "Full", **paths}, timeout_s=_SAVE_S)
        (directory / "initramfs").unlink(missing_ok=True)
        await asyncio.to_thread(drop_holes, directory / RAM)
        for name in (DISK, RAM, STATE):
            (directory / name).chmod(0o444)

    def _lay_out(self, directory: Path, shape: Shape, uid: int) -> None:
        # Firecracker gives disks no serial number of ours: the guest has them in the order in which they were attached.
        disks = (f"/dev/vd{letter}" for letter in string.ascii_lowercase)
        names = (f"/dev/pmem{number}" for number in itertools.count()) if self.persistent else disks
        layers = [(next(names), next(names) if apart else None) for _, apart in shape.layers]
        plan = plan_text(layers=layers, disk=next(disks), pids=shape.pids, vsock=AGENT_PORT, network=shape.network)
        with_plan(self.initramfs, plan, directory / "initramfs")
        make_disk(directory / DISK, shape.disk_bytes)
        for name in (RAM, STATE):
            (directory / name).touch(mode=0o600)
        for name in ("initramfs", DISK, RAM, STATE):
            os.chown(directory / name, uid, uid)
        directory.chmod(0o711)

    async def _boot(self, api: FirecrackerApi, shape: Shape, drives: list[tuple[str, str, bool]]) -> None:
        memory = {"mem_size_mib": shape.memory_bytes // MIB, "smt": False, "track_dirty_pages": False}
        await api.put("/machine-config", {"vcpu_count": shape.processors, **memory})
        paths = {"kernel_image_path": "/boot/vmlinux", "initrd_path": f"{machine.TEMPLATE}/initramfs"}
        await api.put("/boot-source", {**paths, "boot_args": _KERNEL})
        for name, path, writable in drives:
            if self.persistent and not writable:
                file = {"id": name, "path_on_host": path, "root_device": False, "read_only": True}
                await api.put(f"/pmem/{name}", file)
                continue
            drive = {"drive_id": name, "path_on_host": path, "is_root_device": False, "is_read_only": not writable}
            await api.put(f"/drives/{name}", drive)
        if shape.network:
            card = {"iface_id": _CARD_NAME, "host_dev_name": TAP, "guest_mac": CARD}
            await api.put(f"/network-interfaces/{_CARD_NAME}", card)
        await api.put("/vsock", {"guest_cid": _GUEST_CID, "uds_path": f"{machine.SOCKETS}/{VSOCK}"})
        await api.put("/entropy", {})
        balloon: dict[str, object] = {"amount_mib": 0, "deflate_on_oom": True}
        if self.firecracker.reports_free_pages:
            balloon["free_page_reporting"] = True
        await api.put("/balloon", balloon)
        await api.put("/actions", {"action_type": "InstanceStart"})

    # ---- clones ----------------------------------------------------------------------------------

    def prepare_clone(self, template: Template, directory: Path, shape: Shape, uid: int) -> None:
        """The clone's own disk: raw, as Firecracker knows no other. Blocking."""
        copy_disk(template.directory / DISK, directory / DISK)
        os.chown(directory / DISK, uid, uid)

    def clone_confines(
        self, template: Template, directory: Path, confines: Confines, layers: list[JailBind]
    ) -> Confines:
        binds = [
            *layers,
            JailBind(str(directory), "/disk", writable=True),
            JailBind(str(template.directory / RAM), f"{machine.TEMPLATE}/{RAM}"),
            JailBind(str(template.directory / STATE), f"{machine.TEMPLATE}/{STATE}"),
        ]
        return replace(confines, binds=(*confines.binds, *binds))

    def spawn(
        self, template: Template, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> MonitorProcess:
        return self._start(self.clone_confines(template, directory, confines, layers), network=shape.network)

    async def go_on(
        self,
        found: FirecrackerMachine,
        process: MonitorProcess,
        template: Template,
        confines: Confines,
        *,
        stand: bool = False,
    ) -> None:
        """The machine goes on where the template was stopped, or stands there. Raises LaunchError; the process is the
        caller's."""
        pages: MonitorProcess | None = None
        try:
            await self._ready(found.api, process)
            backend = {"backend_type": "File", "backend_path": f"{machine.TEMPLATE}/{RAM}"}
            if self.served:
                pages = await _serve_pages(template, confines)
                backend = {"backend_type": "Uffd", "backend_path": f"{machine.SOCKETS}/{_SERVED}"}
            load = {"snapshot_path": f"{machine.TEMPLATE}/{STATE}", "mem_backend": backend, "resume_vm": not stand}
            if self.differences:
                load["enable_diff_snapshots"] = True
            await found.api.put("/snapshot/load", load, timeout_s=_SAVE_S)
            if self.differences:
                found.notes_writes = True
                found.differs_from = WrittenMemory.of(template.directory / RAM)
        except BaseException as error:
            if pages is not None:
                await asyncio.shield(pages.end())
            if isinstance(error, (MonitorError, DeadlineError, TimeoutError, OSError)):
                message = error.message if isinstance(error, DsecError) else "it did not come up in time"
                raise LaunchError(said_by(f"a clone did not start: {message}", process), step="clone") from error
            raise
        process.hush()
        if pages is not None:
            _end_together(process, pages)

    # ---- inside ----------------------------------------------------------------------------------

    def _start(self, confines: Confines, *, network: bool, output: Path | None = None) -> MonitorProcess:
        binds = [JailBind(str(self.firecracker.path), _PROGRAM)]
        if self.served and os.path.exists(_USERFAULTS):  # noqa: PTH110
            binds.append(JailBind(_USERFAULTS, _USERFAULTS, device=True, owned=True))
        if network:
            binds.append(JailBind(_TUN, _TUN, device=True, owned=True))
            confines = replace(confines, tap=tap())
        argv = [_PROGRAM, "--id", "microvm", "--api-sock", f"{machine.SOCKETS}/{API}", "--level", "Warning"]
        confines = replace(confines, binds=(*confines.binds, *binds), kvm=True)
        return MonitorProcess.start(jail_plan(confines, argv, programs=False), output=output)

    async def _ready(self, api: FirecrackerApi, process: MonitorProcess) -> None:
        """Its control socket appears some milliseconds after its start. Raises MonitorError when it ends before."""
        async with asyncio.timeout(_MONITOR_S):
            while True:
                if process.ended.done():
                    raise MonitorError("the monitor ended at its start")
                try:
                    await api.get("/version")
                except MonitorError:
                    await asyncio.sleep(_POLL_S)
                else:
                    return


def watch_memory(process: MonitorProcess, sockets: Path, cgroups: Sequence[str]) -> None:
    """Of a machine that an earlier process of the node has made: as `go_on` does."""
    if not (sockets / _SERVED).exists():
        return
    try:
        inside = [int(pid) for pid in Path(cgroups[0], "cgroup.procs").read_text().split()]
    except (OSError, IndexError):
        return  # it has just ended
    for pid in inside:
        if pid != process.pid and (pages := MonitorProcess.adopt(pid, start_ticks(pid) or 0)) is not None:
            _end_together(process, pages)
            return
    process.kill()


def _end_together(process: MonitorProcess, pages: MonitorProcess) -> None:
    """A guest whose memory nobody serves stands still for ever; ended, it is a failed sandbox."""
    pages.ended.add_done_callback(lambda _: process.kill())


async def _serve_pages(template: Template, confines: Confines) -> MonitorProcess:
    """The program that serves the template's memory to one clone; it ends with the clone's monitor."""
    program = JailBind(str(find_binary("dsec-pages")), _PAGES)
    memory = JailBind(str(template.directory / RAM), f"{machine.TEMPLATE}/{RAM}")
    own = replace(confines, binds=(*confines.binds, program, memory), kvm=False)
    argv = [_PAGES, f"{machine.SOCKETS}/{_SERVED}", f"{machine.TEMPLATE}/{RAM}"]
    process = MonitorProcess.start(jail_plan(own, argv, programs=False))
    try:
        async with asyncio.timeout(_MONITOR_S):
            while not (confines.sockets / _SERVED).exists():
                if process.ended.done():
                    raise MonitorError(said_by("the memory of a clone is not served", process))
                await asyncio.sleep(_POLL_S)
    except BaseException:
        await asyncio.shield(process.end())
        raise
    process.hush()
    return process


def drives_of(shape: Shape) -> list[tuple[str, str, bool]]:
    """Name, path in the jail, and whether it is written, in the order in which the guest finds them. Raises
    UnsupportedError."""
    drives: list[tuple[str, str, bool]] = []
    for number, (_, apart) in enumerate(shape.layers):
        drives.append((f"l{number}", f"/layers/{number}.meta", False))
        if apart:
            drives.append((f"l{number}b", f"/layers/{number}.blob", False))
    most = DRIVES_MAX - 1 if shape.network else DRIVES_MAX
    if len(drives) > most:
        raise UnsupportedError(
            f"Firecracker has at most {most} devices for layers, and the environment has {len(drives)}",
            hint="collapse it: `dsec layer collapse NAME`",
        )
    return [*drives, ("disk", _DISK, True)]
