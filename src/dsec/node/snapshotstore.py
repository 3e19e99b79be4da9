"""The records of snapshots: `<state>/snapshots/<id>.json`, one each, and all of them in memory.

A record appears by one rename, on the disk before anybody is told, and goes by one unlink; layers are another's.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DsecError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
    StorageError,
)
from dsec.core.spec import Substrate
from dsec.node.host import hint_of
from dsec.storage.layers import sync, write_synced
from dsec.wire import codec
from dsec.wire.node import team_of
from dsec.wire.snapshots import SnapshotRow

_DRAFT = ".draft"


class Place(NamedTuple):
    """A snapshot's place in listings: it never changes."""

    created_at: float
    id: str


class SnapshotStore:
    """One process at a time has it. Names are reserved before the layer is made, so that nobody copies in vain."""

    def __init__(self, directory: Path) -> None:
        """Raises StorageError: a record that cannot be read must not be forgotten, for its layers would be removed."""
        self._directory = directory
        self._rows: dict[str, SnapshotRow] = {}
        self._names: dict[tuple[str, str], str] = {}  # (project, name) → id; reserved ones too
        self._counts: dict[str, int] = {}  # of each project below the root, with all below it
        self._order: list[Place] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = sorted(directory.iterdir())
        except OSError as error:
            raise StorageError(f"{directory} cannot be used: {error.strerror}") from error
        for path in paths:
            if path.suffix == _DRAFT:
                path.unlink(missing_ok=True)
            elif path.suffix == ".json":
                self._load(path)

    def _load(self, path: Path) -> None:
        try:
            row = codec.from_json(path.read_bytes(), SnapshotRow)
        except (OSError, DsecError) as error:
            raise StorageError(
                f"the record of a snapshot {path} cannot be read: {error}",
                hint="put a copy of it back, or move it away: its snapshot is lost then",
            ) from error
        self._names[row.info.project, row.info.name] = row.info.id
        self._count(row.info.project, 1)
        self._enter(row)

    # -- reading -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SnapshotRow]:
        return iter(list(self._rows.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, id: str) -> SnapshotRow | None:
        return self._rows.get(id)

    def named(self, project: str, name: str) -> SnapshotRow | None:
        return self._rows.get(self._names.get((project, name), ""))

    def after(self, place: Place) -> Iterator[tuple[Place, SnapshotRow]]:
        """In order of creation, strictly after `place`."""
        for found in self._order[bisect_right(self._order, place) :]:
            row = self._rows.get(found.id)
            if row is not None:
                yield found, row

    def projects(self) -> Iterator[str]:
        """Of each snapshot, and of each that is being made."""
        return (project for project, _ in self._names)

    def layers(self) -> frozenset[str]:
        """What must not be collected."""
        return frozenset(digest for row in self._rows.values() for digest in row.info.layers)

    def machines(self, substrate: Substrate) -> frozenset[str]:
        """What must be kept by that backend."""
        return frozenset(row.machine for row in self._rows.values() if row.machine and row.spec.substrate == substrate)

    # -- changing ----------------------------------------------------------------------------------

    def reserve(self, project: str, name: str, id: str) -> None:
        """Raises ConflictError when the name is taken, LimitError or CapacityError when there are too many."""
        taken = self._names.get((project, name))
        if taken is not None:
            raise ConflictError(
                f"there is a snapshot {name!r} already" if taken in self._rows else f"{name!r} is being made",
                hint="names of snapshots are unique in a project; choose another, or remove that one",
            )
        team = team_of(project)
        if self._counts.get(team, 0) >= limits.SNAPSHOTS_PER_PROJECT_MAX:
            raise LimitError(
                f"{team} and the projects below it have {limits.SNAPSHOTS_PER_PROJECT_MAX} snapshots, and no more",
                hint="remove some: dsec snapshot rm",
            )
        if sum(self._counts.values()) >= limits.SNAPSHOTS_MAX:
            raise CapacityError(f"the node holds {limits.SNAPSHOTS_MAX} snapshots, and no more")
        self._names[project, name] = id
        self._count(project, 1)

    def let_go(self, project: str, name: str) -> None:
        """A reservation that came to nothing."""
        del self._names[project, name]
        self._count(project, -1)

    def write(self, row: SnapshotRow) -> None:
        """Reserved before. On the disk when it returns; blocking. Raises StorageError, and then there is none."""
        path = self._path(row.info.id)
        draft = path.with_suffix(_DRAFT)
        try:
            with suppress(FileNotFoundError):
                draft.unlink()
            write_synced(draft, codec.to_json(row))
            draft.replace(path)
            sync(self._directory)
        except OSError as error:
            for left in (draft, path):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise StorageError(
                f"the record of the snapshot could not be written: {error.strerror}",
                hint=hint_of(error, "is the disk full?"),
            ) from error

    def enter(self, row: SnapshotRow) -> None:
        """What `write` has written is there from now on."""
        self._enter(row)

    def _enter(self, row: SnapshotRow) -> None:
        self._rows[row.info.id] = row
        insort(self._order, _place(row))

    def withdraw(self, row: SnapshotRow) -> None:
        """Nobody finds it any more; its name stays reserved until `unlink` has been done and `let_go` called."""
        del self._rows[row.info.id]
        del self._order[bisect_right(self._order, _place(row)) - 1]

    def unlink(self, row: SnapshotRow) -> None:
        """Blocking. Raises StorageError, and then it is still there: `enter` it again."""
        try:
            self._path(row.info.id).unlink(missing_ok=True)
            sync(self._directory)
        except OSError as error:
            raise StorageError(f"the snapshot cannot be removed: {error.strerror}") from error

    def _count(self, project: str, change: int) -> None:
        project = team_of(project)
        left = self._counts.get(project, 0) + change
        if left:
            self._counts[project] = left
        else:
            self._counts.pop(project, None)

    def _path(self, id: str) -> Path:
        return self._directory / f"{id}.json"  # minted by us


def _place(row: SnapshotRow) -> Place:
    return Place(row.info.created_at, row.info.id)


def encode_place(place: Place) -> str:
    return f"{place.created_at!r}:{place.id}"


def decode_place(text: str) -> Place:
    """Raises InvalidArgumentError."""
    moment, _, id = text[:128].partition(":")
    try:
        return Place(float(moment), id)
    except ValueError as error:
        raise InvalidArgumentError(f"{text[:80]!r} is not a cursor of a listing") from error


def not_found(reference: str) -> NotFoundError:
    return NotFoundError(f"no snapshot {reference!r}", hint="`dsec snapshot ls` shows yours")
