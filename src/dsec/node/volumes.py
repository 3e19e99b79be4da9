"""Volumes and datasets for sandboxes: who may have which, and who has them now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec.backends.base import VolumeSource
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError, VolumeNotFoundError
from dsec.core.ids import parse_name
from dsec.core.spec import SandboxSpec, VolumeMount
from dsec.node.registry import Registry
from dsec.node.rights import project_seen
from dsec.node.tasks import Tasks
from dsec.observe.logs import get_logger
from dsec.storage.volumes import VolumePlace, VolumeRecord, VolumeStore, find_dataset
from dsec.wire.node import Caller
from dsec.wire.volumes import VolumeInfo, VolumeRequest, VolumeUser

log = get_logger(__name__)

VOLUME: Final = "volume"
DATASET: Final = "dataset"


class Volumes:
    """Belongs to the node's event loop. Who uses what is what the registry says: a sandbox is in it, from before the
    first step of its creation until nothing of it is left on the host."""

    def __init__(
        self, store: VolumeStore, datasets: Mapping[str, Path], registry: Registry, clock: Clock, tasks: Tasks
    ) -> None:
        self._store = store
        self._datasets = dict(datasets)
        self._registry = registry
        self._clock = clock
        self._tasks = tasks

    async def clean(self) -> None:
        """At the node's start. Never raises: what resists is tried again at the next."""
        try:
            await asyncio.to_thread(self._store.clean)
        except (DsecError, OSError) as error:
            log.warning("remains of volumes could not be removed", error=str(error))

    # ---- for creates ---------------------------------------------------------------------------

    def check(self, spec: SandboxSpec, project: str) -> None:
        """Raises ConflictError for a second writer, VolumeNotFoundError for what is not there, and nothing is held:
        who adds its sandbox to the registry before anything else happens has them."""
        for mount in spec.volumes:
            if mount.dataset:
                self._dataset(mount.name)
                continue
            self._store.get(project, mount.name)
            if mount.readonly:
                continue
            for user in self._users(project, mount.name):
                if not user.readonly:
                    raise ConflictError(
                        f"sandbox {user.sandbox} writes in volume {mount.name!r}, and only one can",
                        hint="mount it read-only, or destroy that sandbox first",
                        sandbox=user.sandbox,
                    )

    async def sources(self, spec: SandboxSpec, project: str) -> tuple[VolumeSource, ...]:
        """Raises VolumeNotFoundError or StorageError."""
        if not spec.volumes:
            return ()
        return await asyncio.to_thread(lambda: tuple(self._source(mount, project) for mount in spec.volumes))

    def _source(self, mount: VolumeMount, project: str) -> VolumeSource:
        if mount.dataset:
            place = find_dataset(mount.name, self._dataset(mount.name))
        else:
            place = self._store.place(project, mount.name)
        return _source(mount, place)

    def _dataset(self, name: str) -> Path:
        path = self._datasets.get(name)
        if path is None:
            known = ", ".join(sorted(self._datasets)[:10]) or "none"
            raise VolumeNotFoundError(
                f"no dataset {name!r} on this node",
                hint=f"[node.datasets] of its configuration names them; there are: {known}",
            )
        return path

    def _users(self, project: str, name: str) -> list[VolumeUser]:
        return [
            VolumeUser(sandbox=sandbox.id, readonly=mount.readonly)
            for sandbox in self._registry
            if sandbox.row.project == project
            for mount in sandbox.row.spec.volumes
            if mount.name == name and not mount.dataset
        ]

    # ---- for callers ---------------------------------------------------------------------------

    async def create(self, request: VolumeRequest, project: str) -> VolumeInfo:
        record = VolumeRecord(
            project=project,
            name=request.name,
            mechanism="",
            size_bytes=request.size_bytes,
            created_at=self._clock.wall_s(),
            uid=request.uid,
            gid=request.gid,
        )
        made = await asyncio.to_thread(self._store.create, record)
        return self._info(made, await asyncio.to_thread(self._store.used_bytes, made))

    async def list(self, seen: str | None) -> list[VolumeInfo]:
        """Volumes of the project `seen` and below (None: of all), then datasets."""

        def work() -> list[tuple[VolumeRecord, int | None]]:
            return [
                (record, self._store.used_bytes(record))
                for record in self._store.list()
                if is_below(seen, record.project)
            ]

        volumes = [self._info(record, used) for record, used in await asyncio.to_thread(work)]
        return volumes + [VolumeInfo(name=name, kind=DATASET) for name in sorted(self._datasets)]

    async def owners(self) -> Sequence[str]:
        """The project of each volume."""
        return [record.project for record in await asyncio.to_thread(self._store.list)]

    async def get(self, name: str, project: str) -> VolumeInfo:
        """Raises VolumeNotFoundError."""
        record = await asyncio.to_thread(self._store.get, project, parse_name(name, "volume name"))
        used = await asyncio.to_thread(lambda: self._store.used_bytes(record, walk=True))
        return self._info(record, used)

    async def remove(self, name: str, project: str) -> None:
        """Raises VolumeNotFoundError, or ConflictError while a sandbox has it."""
        parse_name(name, "volume name")
        users = self._users(project, name)
        if users:
            raise ConflictError(
                f"volume {name!r} is used by sandbox {users[0].sandbox}"
                + (f" and {len(users) - 1} more" if len(users) > 1 else ""),
                hint="destroy it first",
                sandbox=users[0].sandbox,
            )
        # No thread, and nothing else comes between the look and the rename: a create finds it, or does not.
        doomed = self._store.remove(project, name)
        # Its room is free later, whoever waits or does not.
        self._tasks.spawn(self._finish(doomed))

    async def _finish(self, doomed: Path) -> None:
        try:
            await asyncio.to_thread(self._store.finish, doomed)
        except DsecError as error:
            log.warning("a removed volume still takes room", error=str(error))

    def _info(self, record: VolumeRecord, used: int | None) -> VolumeInfo:
        return VolumeInfo(
            name=record.name,
            kind=VOLUME,
            project=record.project,
            size_bytes=record.size_bytes,
            used_bytes=used,
            mechanism=record.mechanism,
            created_at=record.created_at,
            uid=record.uid,
            gid=record.gid,
            used_by=tuple(self._users(record.project, record.name)),
        )


def _source(mount: VolumeMount, place: VolumePlace) -> VolumeSource:
    return VolumeSource(
        path=mount.path,
        source=place.source,
        image=place.image,
        inode=place.inode,
        readonly=mount.readonly or mount.dataset,
    )


def is_below(seen: str | None, project: str) -> bool:
    return seen is None or project == seen or project.startswith(seen.rstrip("/") + "/")


def project_named(caller: Caller, project: str | None) -> str:
    """Whose volume a caller means: its own project's, or one of those that it reaches. Raises VolumeNotFoundError."""
    if project is None:
        return caller.project
    if not is_below(project_seen(caller), project):
        raise VolumeNotFoundError("no such volume")
    return project


def check_datasets(datasets: Mapping[str, str], *, own: tuple[Path, ...]) -> dict[str, Path]:
    """Raises InvalidArgumentError for a bad name, a path that is not absolute, and one from which the node's own
    directories (`own`), with every sandbox's files, could be seen."""
    found: dict[str, Path] = {}
    for name, text in datasets.items():
        parse_name(name, "dataset name")
        path = Path(text)
        if not path.is_absolute() or "\0" in text:
            raise InvalidArgumentError(f"dataset {name!r} must be an absolute path, and is {text[:80]!r}")
        real = path.resolve()
        for directory in own:
            inner = directory.resolve()
            if real.is_relative_to(inner) or inner.is_relative_to(real):
                raise InvalidArgumentError(
                    f"dataset {name!r} and {directory} lie in each other", hint="sandboxes would see files of the node"
                )
        found[name] = path
    return found
