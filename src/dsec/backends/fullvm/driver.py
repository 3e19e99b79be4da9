"""Full machines under QEMU: booted once from their image as a template, cloned from then on."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.fullvm import machine
from dsec.backends.fullvm.images import MachineImage
from dsec.backends.fullvm.machine import DISK_NAME, VARIABLES_NAME, Shape
from dsec.backends.vm.disks import bind_of, is_device
from dsec.backends.vm.machine import TEMPLATE, clone_memory, incoming, template_memory
from dsec.backends.vm.monitor import Confines
from dsec.backends.vm.qcow2 import write_overlay
from dsec.backends.vm.qemu import tsc_khz
from dsec.backends.vm.qmp import Monitor
from dsec.backends.vm.running import Runner, confined
from dsec.backends.vm.templates import RAM, STATE, Template
from dsec.core.errors import DsecError, HostError, LaunchError
from dsec.core.machines import Firmware
from dsec.wire.jail import JailBind

# As they are called by Debian (ovmf) and Fedora (edk2-ovmf). One of each pair.
_CODE: Final = ("OVMF_CODE_4M.fd", "OVMF_CODE.fd")
_VARIABLES: Final = ("OVMF_VARS_4M.fd", "OVMF_VARS.fd")
_DATA: Final = ("/usr/share/qemu", "/usr/share/seabios")  # of option ROMs, where they are not beside the monitor's own
_CONSOLE_SHOWN: Final = 2_000


@dataclass(frozen=True, slots=True)
class Uefi:
    code: Path
    variables: Path


@dataclass(frozen=True, slots=True)
class FullDriver(Runner):
    uefi_dir: Path

    # ---- templates -------------------------------------------------------------------------------

    @asynccontextmanager
    async def booting(
        self, directory: Path, image: MachineImage, shape: Shape, confines: Confines
    ) -> AsyncIterator[Monitor]:
        """A machine that boots in `directory`, of whose memory a template can be made. Its end is the block's."""
        await asyncio.to_thread(self._lay_out, directory, image, shape, confines.uid)
        binds = [*self._base(image, shape), JailBind(str(directory), TEMPLATE, writable=True)]
        if shape.firmware is Firmware.KERNEL:
            binds += [JailBind(str(image.kernel), machine.KERNEL), JailBind(str(image.initrd), machine.INITRD)]
        disk = machine.template_disk(shape, _devices(image))
        memory = template_memory(shape.memory_bytes)
        argv = self._argv(image, shape, disk, memory, f"{TEMPLATE}/{VARIABLES_NAME}")
        argv += machine.boot_arguments(shape, tsc_khz=tsc_khz() if self.accelerator == "tcg" else None)
        confines = confined(confines, binds, network=shape.network)
        async with self.running(confines, argv) as monitor:
            try:
                yield monitor
            except (DsecError, TimeoutError) as error:
                what = error.message if isinstance(error, DsecError) else "it did not come up in time"
                raise LaunchError(f"{what}{await _console(monitor)}", step="template") from error

    async def save(self, monitor: Monitor, directory: Path) -> None:
        """Stops the machine and writes its devices' state; it is of no other use afterwards."""
        await self.save_state(monitor, directory)
        for name in (DISK_NAME, VARIABLES_NAME):
            if (directory / name).exists():
                (directory / name).chmod(0o444)

    def _lay_out(self, directory: Path, image: MachineImage, shape: Shape, uid: int) -> None:
        write_overlay(
            directory / DISK_NAME, backing=machine.BASE, backing_format=shape.format, size_bytes=shape.disk_bytes
        )
        if shape.firmware is Firmware.UEFI:
            shutil.copyfile(self.uefi().variables, directory / VARIABLES_NAME)
        for name in (RAM, STATE):
            (directory / name).touch(mode=0o600)
        os.truncate(directory / RAM, shape.memory_bytes)
        for path in directory.iterdir():
            os.chown(path, uid, uid)
        directory.chmod(0o711)

    def uefi(self) -> Uefi:
        """Raises HostError."""
        for code, variables in zip(_CODE, _VARIABLES, strict=True):
            if (self.uefi_dir / code).exists() and (self.uefi_dir / variables).exists():
                return Uefi(self.uefi_dir / code, self.uefi_dir / variables)
        raise HostError(f"there is no firmware for UEFI in {self.uefi_dir}", hint="apt-get install ovmf")

    # ---- clones ----------------------------------------------------------------------------------

    def prepare_clone(self, directory: Path, template: Template, shape: Shape, uid: int) -> None:
        """What the clone has of its own. Blocking."""
        write_overlay(
            directory / DISK_NAME,
            backing=f"{TEMPLATE}/{(DISK_NAME, *template.overlays)[-1]}",
            backing_format="qcow2",
            size_bytes=shape.disk_bytes,
        )
        if shape.firmware is Firmware.UEFI:
            shutil.copyfile(template.directory / VARIABLES_NAME, directory / VARIABLES_NAME)
        for path in directory.iterdir():
            os.chown(path, uid, uid)

    def clone_plan(
        self, template: Template, directory: Path, image: MachineImage, shape: Shape, confines: Confines
    ) -> tuple[Confines, list[str]]:
        keeps = self.qemu.keeps_templates
        binds = [*self._base(image, shape), JailBind(str(directory), machine.OWN, writable=True)]
        binds += [
            JailBind(str(template.directory / RAM), f"{TEMPLATE}/{RAM}", writable=not keeps),
            JailBind(str(template.directory / STATE), f"{TEMPLATE}/{STATE}"),
            *(
                JailBind(str(template.directory / name), f"{TEMPLATE}/{name}")
                for name in (DISK_NAME, *template.overlays)
            ),
        ]
        memory = clone_memory(shape.memory_bytes, read_only=keeps)
        disk = machine.clone_disk(shape, template.overlays, _devices(image))
        argv = self._argv(image, shape, disk, memory, f"{machine.OWN}/{VARIABLES_NAME}")
        return confined(confines, binds, network=shape.network), [*argv, *incoming(bare=template.bare)]

    # ---- inside ----------------------------------------------------------------------------------

    def _base(self, image: MachineImage, shape: Shape) -> list[JailBind]:
        devices = _devices(image)
        binds = [
            bind_of(path, machine.layer_path(number, device=number in devices))
            for number, path in enumerate(image.files)
        ]
        if shape.firmware is Firmware.UEFI:
            binds.append(JailBind(str(self.uefi().code), machine.FIRMWARE_CODE))
        return binds

    def _argv(
        self, image: MachineImage, shape: Shape, disk: list[machine.Overlay], memory: str, variables: str
    ) -> list[str]:
        data = [str(self.qemu.firmware), *(place for place in _DATA if os.path.isdir(place))]  # noqa: PTH112
        return [
            str(self.qemu.path),
            *machine.machine_arguments(
                shape,
                accelerator=self.accelerator,
                disk=disk,
                memory=memory,
                data=data,
                variables=variables if shape.firmware is Firmware.UEFI else None,
                base=machine.layer_path(0, device=0 in _devices(image)),
            ),
        ]


def _devices(image: MachineImage) -> frozenset[int]:
    """Which of its files are block devices."""
    return frozenset(number for number, path in enumerate(image.files) if is_device(path))


async def _console(monitor: Monitor) -> str:
    """The last words of a system that did not come up, if it says them by its serial port."""
    try:
        said = await monitor.execute("ringbuf-read", {"device": "console", "size": _CONSOLE_SHOWN}, timeout_s=5.0)
    except DsecError:
        return ""
    text = str(said).strip()[-_CONSOLE_SHOWN:]
    return f"; console: {text}" if text else ""
