"""Environments by name: which layers, and what the image says about running it.

<state>/environments/<name>.json        one record each, replaced by rename
<state>/builds/<key>.json               what a build request led to, so that it is built once
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Collection, Iterable
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
from dsec.core.ids import parse_name
from dsec.core.spec import Environment, check_env, check_path
from dsec.image.erofs import probe_erofs
from dsec.storage.layers import LayerKind, LayerLocation, LayerStore, Lease, sync, write_synced
from dsec.storage.space import free_bytes
from dsec.wire import codec
from dsec.wire.environments import EnvironmentInfo

T = TypeVar("T")


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about running it."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def check_config(config: ImageConfig) -> None:
    """As a caller's would be: every sandbox made from the image starts with it. InvalidArgumentError, LimitError."""
    check_env(config.env)
    if config.workdir is not None:
        check_path(config.workdir, "the image's working directory")
    if len(config.user or "") > 255 or "\0" in (config.user or ""):
        raise InvalidArgumentError("the image's user must be at most 255 characters without NUL")
    words = [*config.entrypoint, *config.command]
    if sum(map(len, words)) > limits.ARGV_BYTES_MAX or any("\0" in word for word in words):
        raise LimitError(f"the image's command is over {limits.ARGV_BYTES_MAX} bytes, or holds NUL")


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Stored; readers ignore fields that they do not know."""

    version: int = 1
    build_key: str
    info: EnvironmentInfo


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one request led to. It is a hint: a layer may have been removed since."""

    version: int = 2
    layers: tuple[str, ...]  # digests, lowest first
    source: str
    config: ImageConfig = ImageConfig()


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


@dataclass(frozen=True, slots=True)
class _Cached:
    stamp: tuple[int, int, int]
    record: EnvironmentRecord


class EnvironmentStore:
    """The environments below one state directory, with their layers. Safe for use by many processes at once.

    Its calls are short reads of local files; `remove` and `collect` may take as long as removing a tree does.
    """

    def __init__(self, state: str | os.PathLike[str]) -> None:
        self.layers = LayerStore(state)
        self.state = self.layers.state
        self._environments = self.state / "environments"
        self._builds = self.state / "builds"
        self._mutex = threading.Lock()
        self._cache: dict[str, _Cached] = {}
        self.builds_running = 0  # kept by `build`, bounded by BUILDS_MAX
        for directory in (self._environments, self._builds):
            directory.mkdir(exist_ok=True, mode=0o700)

    # ---- reading ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(path.name.removesuffix(".json") for path in self._environments.glob("*.json"))

    def list(self) -> list[EnvironmentInfo]:
        found = []
        for name in self.names():
            try:
                found.append(self.record(name).info)
            except EnvironmentNotFoundError:
                continue  # removed meanwhile
        return found

    def get(self, name: str) -> EnvironmentInfo:
        """Raises EnvironmentNotFoundError, with names that are near."""
        return self.record(name).info

    def record(self, name: str) -> EnvironmentRecord:
        path = self._environments / f"{parse_name(name, 'environment name')}.json"
        try:
            stamp = _stamp(path)
            known = self._cache.get(name)
            if known is not None and known.stamp == stamp:
                return known.record
            record = _read(path, EnvironmentRecord)
        except FileNotFoundError:
            with self._mutex:
                self._cache.pop(name, None)
            raise self._unknown(name) from None
        with self._mutex:
            self._cache[name] = _Cached(stamp, record)
        return record

    def resolve(self, environment: Environment) -> LockedEnvironment:
        """The layers and configuration that `environment` stands for now; later parts override earlier ones.

        Raises EnvironmentNotFoundError, LimitError, or StorageError when a layer of it is missing or broken.
        """
        parts = [self.get(name) for name in environment.names()]
        digests = _highest_only([digest for part in parts for digest in part.layers])
        if len(digests) > limits.LOWERS_MAX:
            raise LimitError(f"an environment has at most {limits.LOWERS_MAX} layers, not {len(digests)}")
        env: dict[str, str] = {}
        for part in parts:
            env.update(part.env)
        return LockedEnvironment(
            layers=tuple(self._layer(digest, parts) for digest in digests),
            env=env,
            user=_last(part.user for part in parts),
            workdir=_last(part.workdir for part in parts),
            entrypoint=_last(part.entrypoint or None for part in parts) or (),
            command=_last(part.command or None for part in parts) or (),
        )

    def acquire(self, environment: Environment) -> tuple[LockedEnvironment, Lease]:
        """Resolve and hold, as one: what is returned cannot be removed until the lease is released."""
        for last in (False, True):
            locked = self.resolve(environment)
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
        """Name an environment, replacing what had the name. Call inside `layers.publishing()`."""
        name = parse_name(record.info.name, "environment name")
        self._replace(self._environments / f"{name}.json", codec.to_json(record))

    def put_built(self, key: str, record: BuildRecord) -> None:
        self._replace(self._builds / f"{key}.json", codec.to_json(record))

    def remove(self, name: str, *, live: Collection[str] = ()) -> None:
        """Forget an environment and remove the layers that only it has.

        Raises EnvironmentNotFoundError, or ConflictError while a sandbox uses one of those layers: in any process that
        holds a lease, or by `live`, the digests that the node's journal lists.
        """
        with self.layers.collecting():
            record = self.record(name)
            others = {d for other in self.list() if other.name != name for d in other.layers}
            doomed = [digest for digest in record.info.layers if digest not in others]
            try:
                for digest in doomed:
                    self.layers.remove(digest, live=live)
            except ConflictError as error:
                raise ConflictError(f"environment {name!r} is in use: {error.message}", hint=error.hint) from error
            (self._environments / f"{name}.json").unlink(missing_ok=True)

    def collect(self, *, live: Collection[str] = ()) -> tuple[str, ...]:
        """Remove layers that no environment names and nothing uses; which. For node start, and after replacing."""
        removed = []
        with self.layers.collecting():
            named = {digest for info in self.list() for digest in info.layers}
            for digest in self.layers.digests():
                if digest in named or digest in live:
                    continue
                try:
                    self.layers.remove(digest)
                except ConflictError:
                    continue
                removed.append(digest)
            for path in self._builds.glob("*.json"):
                if self.built(path.stem) is None:
                    path.unlink(missing_ok=True)
        return tuple(removed)

    # ---- helpers ------------------------------------------------------------------------------

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
            name = next(part.name for part in parts if digest in part.layers)
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
        name=name,
        layers=built.layers,
        size_bytes=sum(record.size_bytes for record in records),
        created_at=created_at,
        source=built.source,
        kind=str(records[-1].kind),
        env=built.config.env,
        user=built.config.user,
        workdir=built.config.workdir,
        entrypoint=built.config.entrypoint,
        command=built.config.command,
    )


def _highest_only(digests: list[str]) -> list[str]:
    """Each layer once. The kernel refuses the same lower twice, and only its highest place shows."""
    return list(reversed(dict.fromkeys(reversed(digests))))


def _last(values: Iterable[T | None]) -> T | None:
    found: T | None = None
    for value in values:
        if value is not None:
            found = value
    return found


def _stamp(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_ino, info.st_mtime_ns, info.st_size


def _read(path: Path, kind: type[T]) -> T:
    try:
        return codec.from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        raise
    except (OSError, InvalidArgumentError) as error:
        raise StorageError(f"{path.name} cannot be read: {error}") from error
