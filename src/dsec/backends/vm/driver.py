"""Machines under QEMU: booted once as a template, cloned from then on.

The state of a stopped machine is two things: its memory, which is a file that the template's monitor has mapped shared,
and its devices, some 100 KiB that QEMU writes as for a migration that leaves memory out (`x-ignore-shared`). A clone
maps the file privately and loads the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from dsec.backends.vm import machine
from dsec.backends.vm.console import BootConsole
from dsec.backends.vm.disks import make_disk
from dsec.backends.vm.initramfs import plan_text, with_plan
from dsec.backends.vm.machine import Drive, Persistent, Shape
from dsec.backends.vm.monitor import Confines, MonitorProcess
from dsec.backends.vm.qcow2 import write_overlay
from dsec.backends.vm.qemu import tsc_khz
from dsec.backends.vm.qemu_machine import QemuMachine
from dsec.backends.vm.running import Runner, confined
from dsec.backends.vm.templates import CONSOLE, DISK, RAM, STATE, Template
from dsec.wire.jail import JailBind

DISK_NAME: Final = "disk.qcow2"


@dataclass(frozen=True, slots=True)
class Driver(Runner):
    vmlinux: Path
    initramfs: Path
    persistent: bool = False  # layers are memory to the guest, not disks
    name: ClassVar[str] = "qemu"

    @property
    def identity(self) -> dict[str, str]:
        layers = {"layer_device": "pmem"} if self.persistent else {}
        return {"monitor": self.qemu.text, "accelerator": self.accelerator, **layers}

    @property
    def shown(self) -> dict[str, str]:
        kept = "read only" if self.qemu.keeps_templates else "writable by monitors (QEMU before 8.2)"
        return {"monitor": self.qemu.text, "templates": kept}

    def control(self, sockets: Path, *, owner: int) -> QemuMachine:
        return QemuMachine(sockets, owner=owner)

    # ---- templates -------------------------------------------------------------------------------

    @asynccontextmanager
    async def booting(
        self, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> AsyncIterator[QemuMachine]:
        """A machine that boots in `directory`, of whose memory a template can be made. Its end is the block's."""
        plan = plan_text(
            layers=self._names(shape),
            disk="disk",
            pids=shape.pids,
            network=shape.network,
        )
        await asyncio.to_thread(self._lay_out, directory, shape, plan, confines.uid)
        binds = [*layers, JailBind(str(directory), machine.TEMPLATE, writable=True)]
        binds.append(JailBind(str(self.vmlinux), "/boot/vmlinux"))
        drive = Drive("disk", f"{machine.TEMPLATE}/{DISK}", writable=True)
        argv = self._argv(shape, drive, layers, memory=machine.template_memory(shape.memory_bytes))
        argv += machine.console_at(f"{machine.TEMPLATE}/{CONSOLE}")
        argv += machine.boot_arguments(
            kernel="/boot/vmlinux",
            initramfs=f"{machine.TEMPLATE}/initramfs",
            emulated=self.accelerator == "tcg",
            tsc_khz=tsc_khz() if self.accelerator == "tcg" else None,
        )
        confines = confined(confines, binds, network=shape.network)
        with BootConsole(directory / CONSOLE, owner=confines.uid) as console:
            async with self.running(confines, argv, console) as monitor:
                found = self.control(confines.sockets, owner=confines.uid)
                found.take(monitor)
                try:
                    yield found
                finally:
                    found.close()

    async def save(self, found: QemuMachine, directory: Path) -> None:
        """Stops the machine and writes its devices' state; it is of no other use afterwards."""
        await self.save_state(await found.monitor(), directory)
        (directory / "initramfs").unlink(missing_ok=True)
        (directory / DISK).chmod(0o444)

    def _lay_out(self, directory: Path, shape: Shape, plan: str, uid: int) -> None:
        with_plan(self.initramfs, plan, directory / "initramfs")
        make_disk(directory / DISK, shape.disk_bytes)
        for name in (RAM, STATE):
            (directory / name).touch(mode=0o600)
        os.truncate(directory / RAM, shape.memory_bytes)
        for name in ("initramfs", DISK, RAM, STATE):
            os.chown(directory / name, uid, uid)
        directory.chmod(0o711)

    # ---- clones ----------------------------------------------------------------------------------

    def prepare_clone(self, template: Template, directory: Path, shape: Shape, uid: int) -> None:
        """The clone's own disk: all that it has not written is the template's. Blocking."""
        disk = directory / DISK_NAME
        backing, format = (template.overlays[-1], "qcow2") if template.overlays else (DISK, "raw")
        write_overlay(disk, backing=f"{machine.TEMPLATE}/{backing}", backing_format=format, size_bytes=shape.disk_bytes)
        os.chown(disk, uid, uid)

    def spawn(
        self, template: Template, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> MonitorProcess:
        """The monitor of a clone, which waits for its state. Raises LaunchError."""
        binds = [*layers, JailBind(str(directory), "/disk", writable=True)]
        keeps = self.qemu.keeps_templates
        binds += [
            JailBind(str(template.directory / RAM), f"{machine.TEMPLATE}/{RAM}", writable=not keeps),
            JailBind(str(template.directory / STATE), f"{machine.TEMPLATE}/{STATE}"),
            *(
                JailBind(str(template.directory / name), f"{machine.TEMPLATE}/{name}")
                for name in (DISK, *template.overlays)
            ),
        ]
        below = tuple(f"{machine.TEMPLATE}/{name}" for name in (*reversed(template.overlays), DISK))
        drive = Drive("disk", machine.DISK, format="qcow2", writable=True, below=below)
        memory = machine.clone_memory(shape.memory_bytes, read_only=keeps)
        argv = self._argv(shape, drive, layers, memory=memory)
        argv += machine.console_ring()
        return self.start(
            confined(confines, binds, network=shape.network), [*argv, *machine.incoming(bare=template.bare)]
        )

    async def go_on(
        self,
        found: QemuMachine,
        process: MonitorProcess,
        template: Template,
        confines: Confines,
        *,
        stand: bool = False,
    ) -> None:
        """The machine goes on where the template was stopped. Raises LaunchError; the process is the caller's."""
        found.take(await self.start_clone(process, template, confines.sockets, confines.uid, stand=stand))

    # ---- inside ----------------------------------------------------------------------------------

    def _names(self, shape: Shape) -> list[tuple[str, str | None]]:
        """How the guest finds its layers: by serial number, or in the order of the devices."""
        if not self.persistent:
            return [(f"l{n}", f"l{n}b" if apart else None) for n, (_, apart) in enumerate(shape.layers)]
        devices = (f"/dev/pmem{number}" for number in itertools.count())
        return [(next(devices), next(devices) if apart else None) for _, apart in shape.layers]

    def _argv(self, shape: Shape, disk: Drive, layers: list[JailBind], *, memory: str) -> list[str]:
        drives, persistent = machine.drives_of(shape, disk=disk), []
        if self.persistent:
            drives = [disk]
            persistent = [Persistent(layer.target, Path(layer.source).stat().st_size) for layer in layers]
        return [
            str(self.qemu.path),
            *machine.machine_arguments(
                shape,
                accelerator=self.accelerator,
                drives=drives,
                persistent=persistent,
                memory=memory,
                firmware=str(self.qemu.firmware),
            ),
        ]
