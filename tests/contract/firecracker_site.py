"""A place for machines under the real Firecracker, as a backend makes it, and what is seen of them from outside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.vm.firecracker import find_firecracker
from dsec.backends.vm.firecracker_driver import FirecrackerDriver
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
from dsec.backends.vm.kernel import MODULES, PACKAGE
from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import Confines, MonitorProcess
from dsec.backends.vm.templates import Template
from dsec.core.ids import new_node_id
from dsec.core.limits import MIB
from dsec.testing.launchers import remove_cgroups
from dsec.testing.leaks import Watched
from dsec.testing.waiting import eventually
from tests.firecracker import GuestMemory, Programs, tiny_kernel

UID = 1_987_600
SHAPE = Shape(processors=1, memory_bytes=64 * MIB, disk_bytes=16 * MIB, pids=64, layers=())


def driver_in(directory: Path, found: Programs) -> FirecrackerDriver:
    """With a guest that needs no more than a processor, in an empty directory."""
    (directory / "kernel").write_bytes(tiny_kernel())
    (directory / "initramfs").write_bytes(b"")
    return FirecrackerDriver(find_firecracker(str(found.firecracker)), directory / "kernel", directory / "initramfs")


class Site:
    """A place for machines, as a backend makes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "root").mkdir()
        self.template = Template("t", directory / "template")
        self.template.directory.mkdir()
        self._clones = 0

    def own(self, number: int) -> Path:
        """Of the clone of this number: where its disk is."""
        return self.directory / f"c{number}"

    def confines(self, name: str) -> Confines:
        sockets = self.directory / f"{name}-sockets"
        sockets.mkdir()
        os.chown(sockets, UID, UID)
        return Confines(uid=UID, cgroups=(), root=self.directory / "root", sockets=sockets)

    @asynccontextmanager
    async def booting(
        self, driver: FirecrackerDriver, shape: Shape = SHAPE
    ) -> AsyncIterator[tuple[FirecrackerMachine, Path]]:
        confines = self.confines("template")
        async with driver.booting(self.template.directory, shape, confines, []) as machine:
            yield machine, confines.sockets

    async def make_template(self, driver: FirecrackerDriver, shape: Shape = SHAPE) -> None:
        """Of a guest that has counted."""
        async with self.booting(driver, shape) as (machine, sockets):
            memory = GuestMemory(monitor_of(sockets), SHAPE.memory_bytes)
            await eventually(lambda: memory.rounds > 0)
            await driver.save(machine, self.template.directory)

    @asynccontextmanager
    async def clone(
        self,
        driver: FirecrackerDriver,
        template: Template | None = None,
        *,
        stand: bool = False,
        directory: Path | None = None,
        shape: Shape = SHAPE,
    ) -> AsyncIterator[tuple[MonitorProcess, FirecrackerMachine, Confines]]:
        """`directory`: with a disk that is there already."""
        template = template or self.template
        self._clones += 1
        confines = self.confines(f"c{self._clones}")
        if directory is None:
            directory = self.own(self._clones)
            directory.mkdir()
            os.chown(directory, UID, UID)
            driver.prepare_clone(template, directory, SHAPE, UID)
        process = driver.spawn(template, directory, shape, confines, [])
        machine = driver.control(confines.sockets, owner=UID)
        try:
            await driver.go_on(machine, process, template, confines, stand=stand)
            yield process, machine, confines
            machine.close()
        finally:
            await process.end()
            process.forget()


@asynccontextmanager
async def backend_in(
    directory: Path, found: Programs, *, boot_s: float = 120.0
) -> AsyncIterator[tuple[MicrovmBackend, Watched]]:
    """With a guest that nobody can talk to, on a host which a test has made say that it runs guests."""
    kernel = directory / "cache" / f"{PACKAGE}=1"
    (kernel / "modules").mkdir(parents=True)
    (kernel / "vmlinux").write_bytes(tiny_kernel())
    (kernel / "modules.order").write_text("")
    (kernel / "wanted").write_text(" ".join(MODULES))
    node = new_node_id()
    config = MicrovmConfig(
        run_dir=directory / "run",
        state_dir=directory / "state",
        id_dir=directory / "ids",
        cache_dir=directory / "cache",
        cgroup_parent=f"dsec-contract-{node}",
        monitor="firecracker",
        firecracker=str(found.firecracker),
        boot_s=boot_s,
    )
    watched = Watched(
        markers=(str(directory).encode(),),
        cgroups=(config.cgroup_parent,),
        directories=(directory / "run", directory / "state"),
        lock_directories=(config.id_dir,),
    )
    config.templates_dir.mkdir(parents=True)
    made = MicrovmBackend(config, node=node)
    try:
        yield made, watched
    finally:
        await made.close()
        remove_cgroups(config.cgroup_parent)


def monitor_of(sockets: Path) -> int:
    """Whose control socket is there: its directory is its own."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"--api-sock" in (path / "cmdline").read_bytes() and (path / "root/vm").samefile(sockets):
                return int(path.name)
    raise AssertionError("no monitor runs there")


async def readable(memory: GuestMemory) -> int:
    """Pages that are served are there once the guest has touched them."""

    def rounds() -> int:
        with contextlib.suppress(OSError):
            return memory.rounds
        return 0

    await eventually(lambda: rounds() > 0)
    return rounds()


def served_as(driver: FirecrackerDriver, served: bool) -> FirecrackerDriver:
    return FirecrackerDriver(driver.firecracker, driver.vmlinux, driver.initramfs, served)


def pids_of(uid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == uid:
                found.append(int(path.name))
    return found


def programs_of(uid: int) -> list[str]:
    found = []
    for pid in pids_of(uid):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text())
    return found
