"""What a sandbox starts from when that is another's disk: a snapshot, or the moment of a fork."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dsec.core.errors import NotFoundError, StorageError, UnsupportedError
from dsec.core.spec import NetworkMode, SandboxSpec
from dsec.node.environments import Environments, Resolved
from dsec.node.rows import ImageRow, SandboxRow
from dsec.wire.snapshots import SnapshotRow

# Names are unique, and a job may have ended: whoever is made from it has its own, or none.
_NOT_TAKEN: Final = {"name", "job", "job_id", "member", "links"}


@dataclass(frozen=True, slots=True)
class Origin:
    """`snapshot` is the id of one that has a record; a fork's has none."""

    spec: SandboxSpec
    layers: tuple[str, ...]  # lowest first
    image: ImageRow = field(default_factory=ImageRow)
    user: str | None = None
    workdir: str | None = None
    snapshot: str | None = None
    base: tuple[str, ...] = ()  # digests of the environment
    machine: str = ""  # that it goes on from: what runs in it runs on
    is_fork: bool = False  # one more of the same, and not what somebody asks for

    async def acquire(self, environments: Environments) -> Resolved:
        """Held until the result's hold is released. Raises StorageError when a layer of it is lost."""
        try:
            hold, layers = await environments.layers(self.layers)
        except NotFoundError as error:
            raise StorageError(f"a layer of the snapshot is lost: {error.message}") from error
        return Resolved(
            hold=hold,
            layers=layers,
            env=dict(self.image.env),
            user=self.user,
            workdir=self.workdir,
            entrypoint=self.image.entrypoint,
            command=self.image.command,
        )

    def spec_for(self, asked: SandboxSpec, said: frozenset[str] = frozenset()) -> SandboxSpec:
        """What is asked for, and where that is a default, what the other sandbox had. Variables and labels add up.
        `said`: what is asked for though it is a default.

        Volumes are only those that are asked for: a name means one of whoever asks, who may be of another project. So
        is a network, but of forks: who does not ask for one has none, and a machine with a card reaches nothing by it.
        Raises UnsupportedError for another substrate.
        """
        default = () if "substrate" in said else (_DEFAULTS["substrate"],)
        if asked.substrate not in (*default, self.spec.substrate):
            raise UnsupportedError(
                f"a snapshot of a {self.spec.substrate} sandbox cannot become a {asked.substrate} sandbox"
            )
        has_card = self.spec.network is not NetworkMode.NONE
        datasets = tuple(mount for mount in self.spec.volumes if mount.dataset)
        changes: dict[str, Any] = {name: getattr(asked, name) for name in _NOT_TAKEN}
        changes["volumes"] = datasets
        for name, default in _DEFAULTS.items():
            value = getattr(asked, name)
            if name not in _NOT_TAKEN and (value != default or (name in said and value is not None)):
                changes[name] = value
        if asked.network is NetworkMode.NONE and not self.is_fork:
            changes |= {"egress": ()} if self.machine and has_card else {"network": NetworkMode.NONE, "egress": None}
        changes["env"] = self.spec.env | asked.env
        changes["labels"] = self.spec.labels | asked.labels
        return msgspec.structs.replace(self.spec, **changes)


def origin_of(snapshot: SnapshotRow) -> Origin:
    return Origin(
        spec=snapshot.spec,
        layers=snapshot.info.layers,
        image=ImageRow(snapshot.env, snapshot.entrypoint, snapshot.command),
        user=snapshot.user,
        workdir=snapshot.workdir,
        snapshot=snapshot.info.id,
        base=snapshot.base,
        machine=snapshot.machine,
    )


def origin_of_fork(row: SandboxRow, layers: tuple[str, ...], machine: str = "") -> Origin:
    """Children of a sandbox, on these layers, or copies of this machine; a snapshot that it was made from itself stays
    theirs."""
    return Origin(
        spec=row.spec,
        layers=layers,
        image=row.image,
        user=row.user,
        workdir=row.workdir,
        snapshot=row.snapshot,
        base=row.base or row.layers,
        machine=machine,
        is_fork=True,
    )


# The environment is the other sandbox's, whatever is asked.
_DEFAULTS: Final = {
    field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(SandboxSpec)
    if field.name != "environment"
}
