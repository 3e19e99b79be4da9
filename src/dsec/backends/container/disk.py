"""What a container needs of the host's disks before it is launched: its limit, and devices for images."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.base import InstanceSpec
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.record import ContainerRecord
from dsec.core.errors import StorageError, UnsupportedError
from dsec.storage.quota.choose import COSTS, Found, Mechanism, find_mechanism
from dsec.storage.quota.image import IMAGE_NAME, LoopDevice, attach, make_image
from dsec.storage.quota.project import lift_limit, limit_directory, used_below
from dsec.wire.launch import LaunchPlan

_MECHANISMS: Final = {"project": Mechanism.PROJECT, "image": Mechanism.IMAGE}


class Disk:
    def __init__(self, config: ContainerConfig) -> None:
        self._config = config
        self._found: Found | None = None
        self._looking = threading.Lock()

    # ---- which ---------------------------------------------------------------------------------

    def look(self) -> Found:
        """By trial on the file system of the state directory, once: some 100 ms, blocking."""
        with self._looking:
            if self._found is None:
                self._found = self._try()
            return self._found

    def _try(self) -> Found:
        if self._config.disk not in ("auto", *_MECHANISMS):
            return Found(None)
        try:
            self._config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return Found(None, dict.fromkeys(Mechanism, error.strerror or str(error)))
        return find_mechanism(self._config.state_dir, only=_MECHANISMS.get(self._config.disk))

    @property
    def limit(self) -> str | None:
        """As capabilities tell it."""
        return "tmpfs" if self._config.disk == "tmpfs" else self.look().mechanism

    @property
    def reason(self) -> str:
        if self._config.disk == "directory":
            return "container.disk is 'directory'"
        if self._config.disk == "tmpfs":
            return "all that they write is in memory, and counts as such"
        found = self.look()
        cost = "" if found.mechanism is None else COSTS[found.mechanism]
        return "; ".join(text for text in (cost, found.reason) if text)

    # ---- one container -------------------------------------------------------------------------

    def shape(self, instance: InstanceSpec) -> bytes:
        """What a spare must have in common with a sandbox besides its plan."""
        return b"" if instance.spec.disk_bytes is None else f"disk {instance.spec.disk_bytes}".encode()

    def is_limited(self, instance: InstanceSpec) -> bool:
        return self._config.disk == "tmpfs" or instance.spec.disk_bytes is not None

    def _is_limited_here(self, instance: InstanceSpec) -> bool:
        return self._config.disk != "tmpfs" and instance.spec.disk_bytes is not None

    @contextlib.asynccontextmanager
    async def prepared(self, plan: LaunchPlan, instance: InstanceSpec) -> AsyncIterator[LaunchPlan]:
        """The plan with what is made here for it. Devices are held until the launcher has mounted them; what lies in
        the sandbox's directory goes with that. Raises UnsupportedError, HostError, CapacityError or StorageError."""
        if not (self._is_limited_here(instance) or instance.volumes):
            yield plan  # no thread for nothing: most sandboxes have neither
            return
        devices: list[LoopDevice] = []
        try:
            # Work that is under way in a thread ends there, whatever becomes of who waits for it.
            task = asyncio.ensure_future(asyncio.to_thread(self._prepare, plan, instance, devices))
            try:
                ready = await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task])
                raise
            yield ready
        finally:
            for device in devices:
                device.close()

    def _prepare(self, plan: LaunchPlan, instance: InstanceSpec, devices: list[LoopDevice]) -> LaunchPlan:
        size = instance.spec.disk_bytes
        if size is not None and self._is_limited_here(instance):
            plan = self._limited(plan, size, devices)
        volumes = []
        for bind, volume in zip(plan.volumes, instance.volumes, strict=True):
            if volume.image is not None:
                devices.append(attach(Path(volume.image)))
                bind = msgspec.structs.replace(bind, device=devices[-1].path)
            volumes.append(bind)
        return msgspec.structs.replace(plan, volumes=volumes)

    def _limited(self, plan: LaunchPlan, size: int, devices: list[LoopDevice]) -> LaunchPlan:
        found = self.look()
        if found.mechanism is None:
            raise UnsupportedError(
                f"this node cannot hold a container to a disk limit: {self.reason}", hint="leave disk out"
            )
        directory = Path(plan.directory)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(f"{directory} cannot be made: {error.strerror}") from error
        if found.mechanism is Mechanism.PROJECT:
            limit_directory(directory, size)
            return plan
        image = directory / IMAGE_NAME
        make_image(image, size, journal=False)  # nothing of it outlives the machine's next start
        devices.append(attach(image))
        return msgspec.structs.replace(plan, upper_device=devices[-1].path)

    def project_of(self, record: ContainerRecord) -> int | None:
        """The number by which its files are counted, to be lifted once they are gone."""
        if not record.disk_limited or self._found is None or self._found.mechanism is not Mechanism.PROJECT:
            return None
        with contextlib.suppress(StorageError):
            used = used_below(Path(record.directory))
            return None if used is None else used.project
        return None

    def lift(self, project: int) -> None:
        with contextlib.suppress(OSError):
            lift_limit(self._config.sandboxes_dir, project)
