"""What callers ask of disks of full machines: to stores and from them, and of a machine to an image."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.backends.machines import HasDisks, HasImages, MachineDisk, SavesDisks
from dsec.core.errors import ConflictError, DsecError, StorageError, UnsupportedError
from dsec.core.spec import Substrate
from dsec.node.loading import traces_of
from dsec.node.machinedesk import info_of
from dsec.node.node import Node
from dsec.node.rights import check_machine_target, check_store_of, project_seen
from dsec.storage.disks import copy_file
from dsec.storage.space import require_free
from dsec.wire.disks import MachinePull, MachinePush, SandboxCommit
from dsec.wire.environments import EnvironmentTrace
from dsec.wire.machines import DiskExport, DiskFile, MachineInfo, MachineRef
from dsec.wire.node import Caller, Method

T = TypeVar("T")


class DiskDesk:
    def __init__(self, node: Node) -> None:
        self._node = node

    def unary(self) -> dict[Method, tuple[Any, Callable[..., Awaitable[Any]]]]:
        return {
            Method.MACHINE_PUSH: (MachinePush, self._push),
            Method.MACHINE_PULL: (MachinePull, self._pull),
            Method.MACHINE_COMMIT: (SandboxCommit, self._commit),
            Method.MACHINE_COLLAPSE: (MachineRef, self._collapse),
            Method.MACHINE_EXPORT: (DiskExport, self._export),
            Method.MACHINE_TRACE: (MachineRef, self._trace),
        }

    def _backend(self) -> HasImages:
        backend = self._node.backends.get(Substrate.FULLVM)
        if not isinstance(backend, HasImages):
            raise UnsupportedError("this node offers no full machines", hint="offer the substrate fullvm: `dsec up`")
        return backend

    # -- stores ------------------------------------------------------------------------------------

    async def _push(self, request: MachinePush, caller: Caller, _: str | None) -> MachineInfo:
        from dsec.backends.fullvm.published import push_image

        check_store_of(request.store, caller)
        images, disks = self._backend().images, self._node.environments.disks()

        def work() -> MachineInfo:
            image = images.get(request.name)
            digest = push_image(image, disks, request.store)
            return msgspec.structs.replace(info_of(image), digest=digest)

        return await _told(work)

    async def _pull(self, request: MachinePull, caller: Caller, _: str | None) -> MachineInfo:
        from dsec.backends.fullvm.published import pull_image

        check_store_of(request.store, caller)
        images, disks = self._backend().images, self._node.environments.disks()

        def work() -> MachineInfo:
            self._check_room()
            made = pull_image(images, request.name, disks, request.store, stored=request.image, digest=request.digest)
            return info_of(made)

        return await _told(work)

    async def _trace(self, request: MachineRef, caller: Caller, _: str | None) -> EnvironmentTrace:
        images, disks = self._backend().images, self._node.environments.disks()

        def work() -> EnvironmentTrace:
            traces = traces_of(disks.layers, disks.remote, images.get(request.name).manifest.layers)
            if not traces:
                raise ConflictError(
                    f"nothing of the disk of {request.name!r} has been read from a store",
                    hint="make a machine of it, do what is usually done there, and ask again",
                )
            return EnvironmentTrace(name=request.name, layers=traces)

        return await asyncio.to_thread(work)

    # -- layers ------------------------------------------------------------------------------------

    async def _commit(self, request: SandboxCommit, caller: Caller, _: str | None) -> MachineInfo:
        from dsec.backends.fullvm.chain import commit

        sandbox = self._node.find(request.sandbox, project=project_seen(caller))
        backend, name = sandbox.backend, request.request.name
        if not isinstance(backend, HasDisks):
            raise UnsupportedError(
                f"disks of {sandbox.row.spec.substrate} sandboxes become no images of machines",
                hint="`dsec snapshot create` keeps what they have written",
                sandbox=sandbox.id,
            )
        disks = self._node.environments.disks()
        async with AsyncExitStack() as held:
            held.enter_context(sandbox.changing_disk("its disk is becoming an image"))
            await sandbox.present_instance()
            image, written = await held.enter_async_context(backend.written(sandbox.id))
            work = held.enter_context(disks.layers.staging())
            copies = [work / str(number) for number in range(len(written))]

            async def copy() -> None:
                async with sandbox.pausing.still():
                    await asyncio.to_thread(_copy_all, written, copies)

            await sandbox.serially(copy)

            def make() -> MachineInfo:
                self._check_room()
                return info_of(commit(backend.images, disks, name, image, copies, root=backend.jail_root))

            return await _told(make)

    async def _collapse(self, request: MachineRef, caller: Caller, _: str | None) -> MachineInfo:
        from dsec.backends.fullvm.chain import collapse

        backend, disks = self._backend(), self._node.environments.disks()
        if not isinstance(backend, HasDisks):
            raise UnsupportedError("disks of this node's machines have no layers")
        made = await _told(lambda: info_of(collapse(backend.images, disks, request.name, root=backend.jail_root)))
        await self._node.let_layers_go()
        return made

    # -- files -------------------------------------------------------------------------------------

    async def _export(self, request: DiskExport, caller: Caller, _: str | None) -> DiskFile:
        check_machine_target(caller)
        if request.snapshot is None:
            return await _told(lambda: self._export_image(request))
        snapshots = self._node.snapshots
        row = snapshots.find(request.snapshot, project=project_seen(caller), own=caller.project)
        backend = self._node.backends.get(row.spec.substrate)
        if not row.machine or not isinstance(backend, SavesDisks):
            raise UnsupportedError(
                "that is no snapshot of a machine, and has no disk",
                hint="create a sandbox from it, and take its files: `dsec cp`",
            )
        with snapshots.keeping(row.info.id):

            def work() -> DiskFile:
                with backend.machine_disk(row.machine) as disk:
                    return self._export_disk(disk, request, backend.jail_root)

            return await _told(work)

    def _export_image(self, request: DiskExport) -> DiskFile:
        backend = self._backend()
        image = backend.images.get(request.image or "")
        if not isinstance(backend, HasDisks):
            raise UnsupportedError("disks of this node's machines cannot be read")
        manifest = image.manifest
        below = (image.disk,) if image.disk.exists() else ()
        disk = MachineDisk(below, manifest.layers, (), manifest.format, manifest.disk_bytes)
        return self._export_disk(disk, request, backend.jail_root)

    def _export_disk(self, disk: MachineDisk, request: DiskExport, root: Path) -> DiskFile:
        from dsec.backends.fullvm.exporting import DiskFiles, export

        disks = self._node.environments.disks()
        with ExitStack() as held:
            held.enter_context(disks.layers.lease(list(disk.layers)))
            files = [*disk.below, *(disks.file(digest) for digest in disk.layers), *disk.above]
            work = held.enter_context(disks.layers.staging()) / "export"
            work.mkdir(mode=0o700)
            found = DiskFiles([str(file) for file in files], disk.format, disk.size_bytes)
            used = export(found, Path(request.path), format=request.format, work=work, root=root)
        return DiskFile(path=request.path, format=request.format, disk_bytes=disk.size_bytes, used_bytes=used)

    def _check_room(self) -> None:
        config = self._node.config
        require_free(config.state_dir, reserve_bytes=config.disk_free_bytes_min)


async def _told(work: Callable[[], T]) -> T:
    """In a thread; a disk or a store that fails is told by a typed error."""

    def run() -> T:
        try:
            return work()
        except DsecError:
            raise
        except OSError as error:
            raise StorageError(f"the disk could not be read or written: {error.strerror or error}") from error

    return await asyncio.to_thread(run)


def _copy_all(files: list[Path], copies: list[Path]) -> None:
    for file, copy in zip(files, copies, strict=True):
        copy_file(file, copy)
