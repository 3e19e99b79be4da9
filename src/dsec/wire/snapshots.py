"""Snapshots of sandboxes, forks and rollbacks: shared by node, API, SDK and CLI."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.core.references import parse_tagged
from dsec.core.spec import SandboxSpec
from dsec.wire.environments import EnvironmentInfo
from dsec.wire.records import Sandbox


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox had at one moment, as its owner sees it: on its disk, and of a virtual machine in its memory."""

    id: str
    name: str  # unique in its project; the id where none was given
    project: str
    sandbox: str  # that it is of
    substrate: str
    environment: str  # of the sandbox
    created_at: float
    layers: tuple[str, ...]  # digests, lowest first; the last is its own
    size_bytes: int  # of its own layer, on the node's disk
    entries: int
    parent: str | None = None  # id of the snapshot that the sandbox was made from
    frozen_ms: float = 0.0  # for how long the sandbox stood still
    notes: str = ""  # what a snapshot cannot hold, and this one lacks
    keeps: str = "disk"  # or "disk+memory": what runs goes on where it was
    node: str | None = None  # where it is, in a list of a cluster


class SnapshotPage(msgspec.Struct, frozen=True):
    snapshots: list[SnapshotInfo] = []
    next: str | None = None  # cursor for the next page
    missing: list[str] = []  # nodes that did not answer


class SnapshotQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sandbox: str | None = None  # only of this one
    limit: int = limits.LIST_PAGE_DEFAULT
    cursor: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= limits.LIST_PAGE_MAX:
            raise LimitError(f"a page has between 1 and {limits.LIST_PAGE_MAX} snapshots, not {self.limit}")


class SnapshotRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    snapshot: str  # name or id

    def __post_init__(self) -> None:
        parse_name(self.snapshot, "snapshot name")


class SnapshotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str | None = None  # None: its id

    def __post_init__(self) -> None:
        if self.name is not None:
            parse_name(self.name, "snapshot name")


class SnapshotTake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    request: SnapshotRequest


class ForkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`count` new sandboxes on what this one has on its disk now: all of them, or none."""

    count: int = 1
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT  # for each create

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise InvalidArgumentError(f"count must be a whole number, not {self.count!r}")
        if not 1 <= self.count <= limits.FORKS_MAX:
            raise LimitError(f"count must be between 1 and {limits.FORKS_MAX}, and is {self.count}")
        if not 0 < self.timeout_s <= limits.CREATE_TIMEOUT_S_MAX:
            raise LimitError(f"timeout_s must be above 0 and at most {limits.CREATE_TIMEOUT_S_MAX:g}")


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    request: ForkRequest


class Forked(msgspec.Struct, frozen=True):
    sandboxes: list[Sandbox]


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    snapshot: str  # name or id

    def __post_init__(self) -> None:
        parse_name(self.snapshot, "snapshot name")


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    request: RollbackRequest


class PublishRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make a workspace or toolkit of what a snapshot has above its environment, without what nobody wants in one."""

    name: str  # NAME or NAME:TAG
    kind: str = "workspace"  # or toolkit
    keep: tuple[str, ...] = ()  # rules of residue that are not to be applied
    replace: bool = False  # the name may stand for something else now
    dry_run: bool = False  # only say what would be removed

    def __post_init__(self) -> None:
        parse_tagged(self.name)
        if self.kind not in ("workspace", "toolkit"):
            raise InvalidArgumentError(f"kind must be workspace or toolkit, not {self.kind[:40]!r}")


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    snapshot: str  # name or id
    request: PublishRequest

    def __post_init__(self) -> None:
        parse_name(self.snapshot, "snapshot name")


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule was about."""

    rule: str
    entries: int
    size_bytes: int
    paths: list[str]  # the first of them; with a directory goes all below it


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What publishing has made, and what it has left out."""

    environment: EnvironmentInfo | None = None  # None: nothing was made, as asked
    removed: list[Removed] = []


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """Stored by the node; readers ignore fields that they do not know."""

    version: int = 1
    info: SnapshotInfo
    principal: str
    spec: SandboxSpec
    env: dict[str, str] = {}  # of the image, without what the spec adds
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    base: tuple[str, ...] = ()  # digests of the environment; what is above them is of snapshots
    machine: str = ""  # id of the machine that stands still, which its backend keeps
    key: str | None = None  # of the request that made it
    request_hash: bytes = b""
