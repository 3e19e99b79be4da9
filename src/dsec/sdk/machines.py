"""The images that full machines begin as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dsec.core.errors import InvalidArgumentError, NotFoundError, ProtocolError
from dsec.core.ids import parse_name, parse_sandbox_id
from dsec.core.machines import Agent, Bus, Firmware
from dsec.core.units import parse_size
from dsec.sdk.environments import told
from dsec.sdk.requests import as_list
from dsec.sdk.transport import Transport
from dsec.wire.disks import MachineCommit, MachinePull
from dsec.wire.environments import BuildEvent, EnvironmentTrace, MachineBuild, PushTarget
from dsec.wire.machines import DiskExport, DiskFile, MachineImport, MachineInfo, MachinePage

E = TypeVar("E", bound=StrEnum)

_COPY_TIMEOUT_S: Final = 3_600.0


class _Nothing(msgspec.Struct):
    pass


class AsyncMachines:
    """`client.machines`: images by whose names sandboxes of backend "fullvm" are created."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[MachineInfo]:
        """All of them, by name."""
        return (await self._transport.call("GET", "/machines", MachinePage)).machines

    async def import_disk(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        format: str,
        firmware: str = "bios",
        agent: str = "none",
        bus: str = "virtio",
        boot_wait_s: float = 0.0,
    ) -> MachineInfo:
        """Copies a disk, a file of the node, as the image `name`. What it is must be said: nothing is guessed.

        `format`: raw or qcow2. `firmware`: bios or uefi. `agent`: which one runs inside: dsec, qga (the
        qemu-guest-agent: it says when the system is up) or none. `bus`: virtio, or sata for systems without drivers for
        virtual machines. The first machine of a shape is booted, and saved `boot_wait_s` after power on (or after its
        agent's first answer); all others go on from there.
        Raises ConflictError when there is an image of that name.
        """
        request = MachineImport(
            name=name,
            path=str(Path(path).absolute()),
            format=format,
            firmware=_chosen(Firmware, firmware, "firmware"),
            agent=_chosen(Agent, agent, "agent"),
            bus=_chosen(Bus, bus, "bus"),
            boot_wait_s=boot_wait_s,
        )
        return await self._transport.call(
            "POST", "/machines", MachineInfo, body=request, long=True, timeout_s=_COPY_TIMEOUT_S
        )

    async def build(
        self,
        name: str,
        packages: Sequence[str] = (),
        *,
        desktop: bool = False,
        suite: str | None = None,
        disk: int | str = "10GiB",
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> MachineInfo:
        """Installs a Debian system with our agent as the image `name`, and `packages` with it.

        `desktop`: with X, a window manager and a terminal on the screen. `disk`: of a machine that asks for no other.
        `on_event` hears each BuildEvent. Raises ConflictError when there is an image of that name.
        """
        request = MachineBuild(
            name=name,
            packages=tuple(as_list(packages, "packages")),
            desktop=desktop,
            suite=suite,
            disk_bytes=parse_size(disk, "disk"),
        )
        done = await told(self._transport, "/machines/builds", request, on_event)
        if done.machine is None:
            raise ProtocolError("the service does not say what it has done")
        return done.machine

    async def push(self, name: str, store: str) -> MachineInfo:
        """Puts an image into a store: a directory (`file:///…`) or a bucket (`s3://…`). Layers of its disk that are
        there already are left as they are. `digest` of the answer names all that will be read of it.
        """
        return await self._transport.call(
            "POST",
            f"/machines/{parse_name(name, 'image name')}:push",
            MachineInfo,
            body=PushTarget(store),
            long=True,
            repeatable=True,
            timeout_s=_COPY_TIMEOUT_S,
        )

    async def pull(self, name: str, store: str, *, image: str | None = None, digest: str | None = None) -> MachineInfo:
        """Makes the image `image` of a store (without it: the one of this name) the image `name`; its disk is loaded as
        machines read it. `digest`: as a push told it; no other is taken. Raises ConflictError when there is an image of
        that name.
        """
        request = MachinePull(name=name, store=store, image=image or name, digest=digest)
        return await self._transport.call(
            "POST", "/machines/pulls", MachineInfo, body=request, long=True, timeout_s=_COPY_TIMEOUT_S
        )

    async def commit(self, name: str, sandbox: str) -> MachineInfo:
        """Makes the disk of a full machine, `sandbox` by its id, the image `name`, as after a power cut at this moment.
        What it has written lies above the image that it began as, and only that is kept anew.
        """
        return await self._transport.call(
            "POST",
            f"/sandboxes/{parse_sandbox_id(sandbox)}:commit",
            MachineInfo,
            body=MachineCommit(name=name),
            long=True,
            timeout_s=_COPY_TIMEOUT_S,
        )

    async def collapse(self, name: str) -> MachineInfo:
        """Makes the layers of an image's disk above the lowest one; machines see the same. It needs qemu-img."""
        return await self._transport.call(
            "POST",
            f"/machines/{parse_name(name, 'image name')}:collapse",
            MachineInfo,
            long=True,
            repeatable=True,
            timeout_s=_COPY_TIMEOUT_S,
        )

    async def export(self, name: str, path: str | PathLike[str], *, format: str) -> DiskFile:
        """Writes the disk of the image `name`, whole, into a new file of the node; what is empty takes no room.
        `format`: raw or qcow2. It needs qemu-img. Raises ConflictError when there is a file of that name.
        """
        return await self._export(DiskExport(image=name, path=str(Path(path).absolute()), format=format))

    async def export_snapshot(self, snapshot: str, path: str | PathLike[str], *, format: str) -> DiskFile:
        """As `export`, of a machine's snapshot, by name or id: the disk as after a power cut at that moment. Of a
        microvm the one that it writes to: ext4, with what differs from its environment in `upper`."""
        return await self._export(DiskExport(snapshot=snapshot, path=str(Path(path).absolute()), format=format))

    async def _export(self, request: DiskExport) -> DiskFile:
        return await self._transport.call(
            "POST", "/machines/exports", DiskFile, body=request, long=True, timeout_s=_COPY_TIMEOUT_S
        )

    async def trace(self, name: str) -> EnvironmentTrace:
        """Records in the store what has been read of an image's disk so far, so that other nodes load that first.

        ConflictError when nothing was read; UnsupportedError for a store that is read only.
        """
        path = f"/machines/{parse_name(name, 'image name')}:trace"
        return await self._transport.call("POST", path, EnvironmentTrace, repeatable=True)

    async def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes an image. Machines of it run on. Raises EnvironmentNotFoundError."""
        try:
            path = f"/machines/{parse_name(name, 'image name')}"
            await self._transport.call("DELETE", path, _Nothing, repeatable=True)
        except NotFoundError:
            if not missing_ok:
                raise


def _chosen(kind: type[E], value: str, what: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"there is no {what} {str(value)[:40]!r}", hint=f"one of {', '.join(kind)}"
        ) from error
