"""A picture of what lies on the node's disk, for `storage.collect`. Reads names, sizes and small records. Blocking."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dsec.core.errors import DsecError
from dsec.core.ids import parse_sandbox_id
from dsec.image.environments import EnvironmentStore
from dsec.node.config import ENDED_DIR
from dsec.storage.collect import Key, Kind, Thing
from dsec.storage.layers import LayerStore
from dsec.storage.trees import tree_size
from dsec.storage.volumes import MAKING, REMOVED
from dsec.wire import codec

T = TypeVar("T")

TRIAL: Final = ".quota-"


class _Part(msgspec.Struct, frozen=True):
    digest: str = ""


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[str, ...] = ()
    parts: tuple[_Part, ...] = ()
    digest: str = ""


class _Record(msgspec.Struct, frozen=True):
    """What counts here of an environment's record; the rest is ignored."""

    info: _Info


class _Build(msgspec.Struct, frozen=True):
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What the node knows to be in use."""

    sandboxes: Collection[str]  # and spares: by whatever name their things have
    layers: Collection[str]  # of sandboxes and snapshots


@dataclass(frozen=True, slots=True)
class Places:
    state: Path
    run: Path

    @property
    def environments(self) -> Path:
        return self.state / "environments"

    @property
    def builds(self) -> Path:
        return self.state / "builds"

    @property
    def layers(self) -> Path:
        return self.state / "layers"

    @property
    def blobs(self) -> Path:
        return self.state / "oci" / "blobs"

    @property
    def chunks(self) -> Path:
        return self.state / "cache"

    @property
    def sandboxes(self) -> Path:
        return self.state / "sandboxes"

    @property
    def records(self) -> Path:
        return self.state / "records"

    @property
    def ended(self) -> Path:
        return self.state / ENDED_DIR

    @property
    def sockets(self) -> Path:
        return self.run / "sb"

    @property
    def volumes(self) -> Path:
        return self.state / "volumes"


def take_census(places: Places, known: Known) -> list[Thing]:
    """Everything that a collection may have to do with. What comes or goes meanwhile may be in it or not."""
    held = _held()
    return [
        *_records(places),
        *_builds(places),
        *_layers(places, known, held),
        *_blobs(places),
        *_chunks(places, held),
        *_of_sandboxes(places, known),
        *_drafts(places, held),
    ]


def _records(places: Places) -> Iterator[Thing]:
    found = {path: record for path in _entries(places.environments, "*.json") if (record := _read(path, _Record))}
    by_digest: dict[str, list[Key]] = {}
    for path, record in found.items():
        if record.info.digest:
            by_digest.setdefault(record.info.digest, []).append((Kind.RECORD, path.name.removesuffix(".json")))
    if not found:
        return
    store = EnvironmentStore(places.state)
    now = {info.name: info.layers for info in store.list()}  # of those that follow their parts
    runs = store.runs.all()
    for path, record in found.items():
        name = path.name.removesuffix(".json")
        layers = now.get(name, record.info.layers)
        needs = {(Kind.LAYER, digest) for digest in (*layers, *record.info.layers)}
        needs.update((Kind.LAYER, run.layer) for run in runs if layers[: len(run.layers)] == run.layers)
        for part in record.info.parts:
            needs.update(key for key in by_digest.get(part.digest, ()) if key[1] != name)
        kept = "" if "@" in name else "it is what the name stands for"
        yield Thing(Kind.RECORD, name, _size(path), _time(path), kept, frozenset(needs))


def _builds(places: Places) -> Iterator[Thing]:
    for path in _entries(places.builds, "*.json"):
        record = _read(path, _Build)
        needs = frozenset((Kind.LAYER, digest) for digest in record.layers) if record else frozenset()
        yield Thing(Kind.BUILD, path.stem, _size(path), _time(path), needs=needs)


def _layers(places: Places, known: Known, held: frozenset[tuple[int, int]]) -> Iterator[Thing]:
    if not places.layers.is_dir():
        return
    store = LayerStore(places.state)
    for digest in store.digests():
        try:
            size = store.record(digest).size_bytes
        except DsecError:
            size = 0
        kept = "a sandbox or a snapshot has it" if digest in known.layers else ""
        path = places.layers / digest
        if not kept and _is_held(path, held):
            kept = "a build or a command holds it"
        yield Thing(Kind.LAYER, digest, size, _time(path), kept)


def _blobs(places: Places) -> Iterator[Thing]:
    for path in _entries(places.blobs, "*/*"):
        yield Thing(Kind.BLOB, f"{path.parent.name}:{path.name}", _size(path), _time(path))


def _chunks(places: Places, held: frozenset[tuple[int, int]]) -> Iterator[Thing]:
    """The loader has them open; what it keeps is its own to bound."""
    loading = _is_held(places.run / "loader.lock", held)
    for path in _entries(places.chunks, "[!.]*"):
        size = tree_size(path).disk_bytes
        kept = "the loader has it, and drops it when it needs room" if loading else ""
        yield Thing(Kind.CHUNKS, path.name, size, _time(path), kept, frozenset({(Kind.LAYER, path.name)}))


def _of_sandboxes(places: Places, known: Known) -> Iterator[Thing]:
    for kind, directory, suffix in (
        (Kind.UPPER, places.sandboxes, ""),
        (Kind.OUTPUT, places.records, ""),
        (Kind.SOCKET, places.sockets, ".sock"),
    ):
        for path in _entries(directory, f"*{suffix}"):
            name = path.name.removesuffix(suffix)
            if not _is_sandbox(name):
                continue
            if name in known.sandboxes:
                yield Thing(kind, path.name, 0, _time(path), "a sandbox has it")
            else:
                yield Thing(kind, path.name, tree_size(path).disk_bytes, _time(path))


def _drafts(places: Places, held: frozenset[tuple[int, int]]) -> Iterator[Thing]:
    for path in _entries(places.state / "staging", "*"):
        kept = "somebody works on it" if _is_held(path, held) else ""
        yield Thing(Kind.DRAFT, f"staging/{path.name}", tree_size(path).disk_bytes, _time(path), kept)
    for directory in (places.volumes, places.chunks, places.sandboxes, places.ended, places.state):
        for pattern in (f"{MAKING}*", f"{REMOVED}*", f"{TRIAL}*"):
            for path in _entries(directory, pattern):
                name = str(path.relative_to(places.state))
                yield Thing(Kind.DRAFT, name, tree_size(path).disk_bytes, _time(path))


def _is_sandbox(name: str) -> bool:
    try:
        parse_sandbox_id(name)
    except DsecError:
        return False
    return True


def _entries(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return codec.from_json(path.read_bytes(), kind)
    except (OSError, DsecError):
        return None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def _time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return float("inf")  # just gone, or not ours to judge


def _held() -> frozenset[tuple[int, int]]:
    """Device and inode of every file that somebody holds a lock on. To try a lock would be to have it for a moment, and
    who needs it just then would be told that the layer is being removed."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields:
                place = next(field for field in fields if field.count(":") == 2)
                major, minor, inode = place.split(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return frozenset(found)


def _is_held(path: Path, held: frozenset[tuple[int, int]]) -> bool:
    with contextlib.suppress(OSError):
        info = path.lstat()
        return (info.st_dev, info.st_ino) in held
    return False
