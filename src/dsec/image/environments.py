"""Environments by name: which layers, and what the image says about running it.

<state>/environments/<name>.json              what the name stands for now, replaced by rename; of NAME:latest
                     <name>:<tag>.json        of other tags
                     <name>@<digest>.json     what a tag of the name stood for before, until it is collected
<state>/builds/<key>.json                     what a build request led to, so that it is built once
"""

from __future__ import annotations

import difflib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from dsec.core import limits
from dsec.core.errors import (
    ConflictError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
    StorageError,
)
from dsec.core.references import Reference, parse_reference, parse_tagged
from dsec.core.spec import Environment
from dsec.image.collapsed import CollapsedRuns
from dsec.image.erofs import probe_erofs
from dsec.image.records import (
    BuildRecord,
    EnvironmentRecord,
    Part,
    combine,
    config_of,
    merge_configs,
    record_digest,
    stack_layers,
)
from dsec.storage.layers import LayerKind, LayerLocation, LayerStore, Lease, sync, write_synced
from dsec.storage.space import free_bytes
from dsec.wire import codec
from dsec.wire.environments import EnvironmentInfo, EnvironmentPart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LockedEnvironment:
    """An environment as it is now: it stays the same whatever is built afterwards, while its layers are leased."""

    layers: tuple[LayerLocation, ...]  # lowest first
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def digests(self) -> tuple[str, ...]:
        return tuple(layer.digest for layer in self.layers)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The store in figures, for `dsec doctor`."""

    state: Path
    kind: LayerKind  # of layers made from now on
    reason: str  # why not EROFS; empty when it is
    environments: int
    layers: int
    layer_bytes: int
    free_bytes: int
    broken: int = 0  # layers that cannot be read
    front: str | None = None  # by which a loader that runs serves layers of stores


@dataclass(frozen=True, slots=True)
class _Cached:
    stamp: tuple[int, int, int]
    record: EnvironmentRecord


class EnvironmentStore:
    """The environments below one state directory, with their layers. Safe for use by many processes at once.

    Its calls are short reads of local files; `remove` and `collect` may take as long as removing a tree does.
    """

    def __init__(self, state: str | os.PathLike[str], *, record_keep_s: float = 0.0) -> None:
        """`record_keep_s`: how long `collect` leaves what a name stood for before it was replaced."""
        self._record_keep_s = record_keep_s
        self.layers = LayerStore(state)
        self.state = self.layers.state
        self._environments = self.state / "environments"
        self._place = str(self._environments)
        self._builds = self.state / "builds"
        self.runs = CollapsedRuns(self.layers)
        self._mutex = threading.Lock()
        self._cache: dict[str, _Cached] = {}
        self.builds_running = 0  # kept by `build`, bounded by BUILDS_MAX
        for directory in (self._environments, self._builds):
            directory.mkdir(exist_ok=True, mode=0o700)

    # ---- reading ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """What there is, as references: NAME, or NAME:TAG."""
        return sorted(str(reference) for reference in self._references() if reference.digest is None)

    def list(self) -> list[EnvironmentInfo]:
        found = []
        for name in self.names():
            try:
                record = self.record(name)
            except EnvironmentNotFoundError:
                continue  # removed meanwhile
            try:
                found.append(self._current(record, 0))
            except (EnvironmentNotFoundError, LimitError):
                found.append(record.info)  # a part of it is gone: what it was is known
        return found

    def get(self, reference: str) -> EnvironmentInfo:
        """As it is now, also of one that follows its parts.

        Raises EnvironmentNotFoundError, with names that are near, or for a part that is gone.
        """
        return self._current(self.record(reference), 0)

    def _current(self, record: EnvironmentRecord, depth: int) -> EnvironmentInfo:
        info = record.info
        if not info.follow:
            return info
        if depth >= limits.ENVIRONMENT_DEPTH_MAX:
            raise LimitError(f"environment {info.name!r} lies more than {limits.ENVIRONMENT_DEPTH_MAX} deep in others")
        try:
            parts = [
                Part(part.role, part.reference, self._current(self.record(part.reference), depth + 1))
                for part in info.parts
            ]
        except EnvironmentNotFoundError as error:
            raise EnvironmentNotFoundError(
                f"a part of environment {info.name!r} is gone: {error.message}", hint=error.hint
            ) from error
        return combine(info.name, parts, follow=True, created_at=info.created_at)

    def record(self, reference: str) -> EnvironmentRecord:
        """What NAME, NAME:TAG or NAME@DIGEST stands for now."""
        parsed = parse_reference(reference)
        if parsed.digest is not None:
            return self._exact(parsed)
        try:
            return self._load(parsed)
        except FileNotFoundError:
            raise self._unknown(reference) from None

    def _exact(self, reference: Reference) -> EnvironmentRecord:
        found: dict[str, EnvironmentRecord] = {}
        for known in self._references():
            if known.name != reference.name:
                continue
            try:
                record = self._load(known)
            except FileNotFoundError:
                continue
            if record.info.digest.startswith(reference.digest or ""):
                found.setdefault(record.info.digest, record)
        if len(found) > 1:
            raise InvalidArgumentError(f"several records are called {reference}", hint="give more of the digest")
        if not found:
            raise EnvironmentNotFoundError(
                f"no environment {reference} on this node", hint="records that nothing names any more are collected"
            )
        return next(iter(found.values()))

    def _load(self, reference: Reference) -> EnvironmentRecord:
        """Raises FileNotFoundError, or StorageError when it is damaged."""
        name = f"{reference}.json"
        try:
            stamp = _stamp(f"{self._place}/{name}")  # no Path: each create asks this
            known = self._cache.get(name)
            if known is not None and known.stamp == stamp:
                return known.record
            record = _read(self._environments / name, EnvironmentRecord)
        except FileNotFoundError:
            with self._mutex:
                self._cache.pop(name, None)
            raise
        if not record.info.digest:  # of a version before there were digests
            digest = record_digest(record.info.layers, config_of(record.info))
            record = msgspec.structs.replace(record, info=msgspec.structs.replace(record.info, digest=digest))
        with self._mutex:
            self._cache[name] = _Cached(stamp, record)
        return record

    def named(self) -> frozenset[str]:
        """Layers that some environment has, now or before, and what stands for runs of them."""
        found = {digest for reference in self._references() for digest in self._layers_of(reference)}
        return frozenset(found | set(self.runs.digests()))

    def users(self) -> dict[str, tuple[str, ...]]:
        """Layer → environments that have it, what a name was before included."""
        found: dict[str, tuple[str, ...]] = {}
        for reference in sorted(self._references(), key=str):
            for digest in self._layers_of(reference):
                found[digest] = (*found.get(digest, ()), str(reference))
        return found

    def _references(self) -> Iterator[Reference]:
        """Of every record that is stored, those before included."""
        for path in self._environments.glob("*.json"):
            try:
                yield parse_reference(path.name.removesuffix(".json"))
            except InvalidArgumentError:
                continue  # nothing of ours

    def _path(self, reference: Reference) -> Path:
        return self._environments / f"{reference}.json"

    def resolve(self, environment: Environment, *, collapsed: bool = True) -> LockedEnvironment:
        """The layers and configuration that `environment` stands for now; later parts override earlier ones.

        Runs of layers that have been collapsed are one layer here, unless that is not wanted.

        Raises EnvironmentNotFoundError, LimitError, or StorageError when a layer of it is missing or broken.
        """
        parts = [self.get(name) for name in environment.names()]
        digests = stack_layers(part.layers for part in parts)
        if collapsed:
            digests = self.runs.shorten(digests)
        if collapsed and len(digests) > limits.LOWERS_MAX:
            raise LimitError(
                f"a sandbox has at most {limits.LOWERS_MAX} layers below it, not {len(digests)}",
                hint="runs of layers of a named environment are made one by themselves (`dsec layer collapse NAME`)",
            )
        config = merge_configs(config_of(part) for part in parts)
        return LockedEnvironment(
            layers=tuple(self._layer(digest, parts) for digest in digests),
            env=config.env,
            user=config.user,
            workdir=config.workdir,
            entrypoint=config.entrypoint,
            command=config.command,
        )

    def acquire(self, environment: Environment, *, collapsed: bool = True) -> tuple[LockedEnvironment, Lease]:
        """Resolve and hold, as one: what is returned cannot be removed until the lease is released."""
        for last in (False, True):
            locked = self.resolve(environment, collapsed=collapsed)
            try:
                return locked, self.layers.lease(locked.digests())
            except NotFoundError as error:
                # Removed or replaced between the two: the name may stand for something else now.
                if last:
                    raise StorageError(
                        f"environment {environment.base!r} was removed while it was being used"
                    ) from error
        raise AssertionError("unreachable")

    def built(self, key: str) -> BuildRecord | None:
        """What this request led to before, if that is still here."""
        try:
            record = _read(self._builds / f"{key}.json", BuildRecord)
        except (FileNotFoundError, StorageError):
            return None
        return record if all(self.layers.has(digest) for digest in record.layers) else None

    def describe(self) -> StoreFacts:
        """What is here, and by a trial mount (some ten milliseconds) in which form layers are kept."""
        verdict = probe_erofs(self.layers)
        records, broken = [], 0
        for digest in self.layers.digests():
            try:
                records.append(self.layers.record(digest))
            except (NotFoundError, StorageError):
                broken += 1
        return StoreFacts(
            state=self.state,
            kind=LayerKind.EROFS if verdict.usable else LayerKind.DIRECTORY,
            reason=verdict.reason,
            environments=len(self.names()),
            layers=len(records),
            layer_bytes=sum(record.size_bytes for record in records),
            free_bytes=free_bytes(self.state),
            broken=broken,
        )

    # ---- changing -----------------------------------------------------------------------------

    def put(self, record: EnvironmentRecord) -> None:
        """Name an environment, replacing what had the name. Call inside `layers.publishing()`.

        What had the name stays as NAME@DIGEST, until it is collected.
        """
        reference = parse_tagged(record.info.name)
        try:
            before = self._load(reference)
        except (FileNotFoundError, StorageError):
            before = None
        if before is not None and before.info.digest != record.info.digest:
            self._replace(self._path(Reference(reference.name, digest=before.info.digest)), codec.to_json(before))
        self._replace(self._path(reference), codec.to_json(record))

    def put_built(self, key: str, record: BuildRecord) -> None:
        self._replace(self._builds / f"{key}.json", codec.to_json(record))

    def remove(self, name: str, *, live: Collection[str] = ()) -> None:
        """Forget an environment and remove the layers that only it has.

        Raises EnvironmentNotFoundError, or ConflictError while a sandbox uses one of those layers: in any process that
        holds a lease, or by `live`, the digests that the node's journal lists.
        """
        with self.layers.collecting():
            record = self.record(name)
            stored = self._stored_as(parse_reference(name), record)
            if users := self._users_of(stored, record.info.digest):
                raise ConflictError(
                    f"environment {name!r} is part of {', '.join(users[:5])}",
                    hint="remove those first, or replace them",
                )
            doomed = self._only_of(stored, record)
            try:
                for digest in doomed:
                    self.layers.remove(digest, live=live)
            except ConflictError as error:
                raise ConflictError(f"environment {name!r} is in use: {error.message}", hint=error.hint) from error
            self._path(stored).unlink(missing_ok=True)
            self._drop_runs(live)

    def _only_of(self, stored: Reference, record: EnvironmentRecord) -> Sequence[str]:
        """The layers that nothing else has. What a name was before has no say: it goes when it has lost a layer."""
        others: set[str] = set()
        before: dict[Reference, EnvironmentRecord] = {}
        for reference in self._references():
            if reference == stored:
                continue
            found = self._loaded(reference)
            if found is None:
                continue
            if reference.digest is not None and not self._users_of(reference, found.info.digest):
                before[reference] = found
            else:
                others.update(self._layers_of(reference))
        doomed = [digest for digest in record.info.layers if digest not in others]
        for reference, found in before.items():
            if set(found.info.layers) & set(doomed):
                self._path(reference).unlink(missing_ok=True)
        return doomed

    def _users_of(self, stored: Reference, digest: str) -> Sequence[str]:
        """Composed environments that have the record at `stored` as a part; what they were before has no say."""
        found = []
        for reference in self._references():
            record = self._loaded(reference)
            if record is None or reference == stored or reference.digest is not None:
                continue
            if any(_is_part(part, stored, digest, locked=not record.info.follow) for part in record.info.parts):
                found.append(str(reference))
        return sorted(found)

    def _drop_runs(self, live: Collection[str]) -> Sequence[str]:
        """Collapsed layers that no environment has the layers of any more; a sandbox keeps its own."""
        named = [self._layers_of(reference) for reference in self._references()]
        removed = []
        for digest in self.runs.drop(lambda layers: any(known[: len(layers)] == layers for known in named)):
            if digest in {d for layers in named for d in layers} or digest in self.runs.digests():
                continue
            try:
                self.layers.remove(digest, live=live)
            except ConflictError:
                continue
            removed.append(digest)
        return removed

    def collect(self, *, live: Collection[str] = ()) -> tuple[str, ...]:
        """Remove records that no name stands for, and layers that none names and nothing uses; which layers.

        For node start, and after replacing.
        """
        removed: set[str] = set()
        with self.layers.collecting():
            for reference in tuple(self._references()):
                record = self._loaded(reference) if reference.digest is not None else None
                if (
                    record is not None
                    and not self._is_young(reference)
                    and not self._users_of(reference, record.info.digest)
                ):
                    self._path(reference).unlink(missing_ok=True)
            removed.update(self._drop_runs(live))
            named = self.named()
            for digest in self.layers.digests():
                if digest in named or digest in live:
                    continue
                try:
                    self.layers.remove(digest)
                except ConflictError:
                    continue
                removed.add(digest)
            for path in self._builds.glob("*.json"):
                if self.built(path.stem) is None:
                    path.unlink(missing_ok=True)
        return tuple(sorted(removed))

    # ---- helpers ------------------------------------------------------------------------------

    def _stored_as(self, reference: Reference, record: EnvironmentRecord) -> Reference:
        """Where a record lies that was found by `reference`."""
        if reference.digest is None:
            return reference
        exact = Reference(reference.name, digest=record.info.digest)
        if self._path(exact).exists():
            return exact
        raise ConflictError(f"{reference} is what {record.info.name} stands for now", hint="remove that name")

    def _is_young(self, reference: Reference) -> bool:
        try:
            return time.time() - self._path(reference).stat().st_mtime < self._record_keep_s
        except FileNotFoundError:
            return False

    def _layers_of(self, reference: Reference) -> tuple[str, ...]:
        """As it is now; of one that follows parts that are gone, what it was."""
        record = self._loaded(reference)
        if record is None:
            return ()
        try:
            return self._current(record, 0).layers
        except (EnvironmentNotFoundError, LimitError):
            return record.info.layers

    def _loaded(self, reference: Reference) -> EnvironmentRecord | None:
        try:
            return self._load(reference)
        except FileNotFoundError:
            return None  # removed meanwhile

    def _replace(self, path: Path, data: bytes) -> None:
        """The new content, or the old one, also after a power loss."""
        try:
            with self.layers.staging() as work:
                write_synced(work / "draft", data)
                (work / "draft").replace(path)
            sync(path.parent)
        except OSError as error:
            raise StorageError(f"cannot write {path.name}: {error.strerror}") from error

    def _layer(self, digest: str, parts: Iterable[EnvironmentInfo]) -> LayerLocation:
        try:
            return self.layers.get(digest)
        except NotFoundError as error:
            name = next((part.name for part in parts if digest in part.layers), "?")
            raise StorageError(
                f"environment {name!r} has lost its layer {digest[:12]}",
                hint=f"build it again: dsec env build {name} --replace …",
            ) from error

    def _unknown(self, name: str) -> EnvironmentNotFoundError:
        names = self.names()
        if near := difflib.get_close_matches(name, names, n=1):
            hint = f"did you mean {near[0]}? `dsec env ls` shows all"
        elif names:
            hint = f"known are {', '.join(names[:5])}; make it with: dsec env build {name} --debian"
        else:
            hint = f"there are none yet; make it with: dsec env build {name} --debian"
        return EnvironmentNotFoundError(f"no environment {name!r} on this node", hint=hint)


def environment_info(name: str, layers: LayerStore, built: BuildRecord, *, created_at: float) -> EnvironmentInfo:
    """How the result of a build is shown under a name."""
    records = [layers.record(digest) for digest in built.layers]
    return EnvironmentInfo(
        name=str(parse_tagged(name)),
        digest=record_digest(built.layers, built.config),
        layers=built.layers,
        size_bytes=sum(record.size_bytes for record in records),
        layer_bytes=tuple(record.size_bytes for record in records),
        created_at=created_at,
        source=built.source,
        kind=str(records[-1].kind),
        env=built.config.env,
        user=built.config.user,
        workdir=built.config.workdir,
        entrypoint=built.config.entrypoint,
        command=built.config.command,
    )


def _is_part(part: EnvironmentPart, stored: Reference, digest: str, *, locked: bool) -> bool:
    """Whether a part is the record at `stored`: by its tag, or as the exact record that it is locked to."""
    named = parse_reference(part.reference)
    if stored.digest is None and named.digest is None:
        return named == stored
    return named.name == stored.name and part.digest == digest and (locked or named.digest is not None)


def _stamp(path: str) -> tuple[int, int, int]:
    info = os.stat(path)  # noqa: PTH116 - no Path: each create asks this
    return info.st_ino, info.st_mtime_ns, info.st_size


def _read(path: Path, kind: type[T]) -> T:
    try:
        return codec.from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        raise
    except (OSError, InvalidArgumentError) as error:
        raise StorageError(f"{path.name} cannot be read: {error}") from error
