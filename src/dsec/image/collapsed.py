"""Runs of layers that have been made one: which, and where they are used instead.

<state>/collapsed/<key>.json      one run each; the key names all layers from the lowest to the end of the run
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.storage.layers import LayerStore, sync, write_synced
from dsec.wire import codec


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`layer` stands for the layers from `start` on, above the others: what those have decides what it hides."""

    version: int = 1
    layers: tuple[str, ...]  # digests from the lowest of the environment to the highest of the run
    start: int
    layer: str

    @property
    def of(self) -> tuple[str, ...]:
        """The layers that it stands for."""
        return self.layers[self.start :]


class CollapsedRuns:
    """The runs below one state directory. Their records are read again when one has come or gone."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers
        self._directory = layers.state / "collapsed"
        self._directory.mkdir(exist_ok=True, mode=0o700)
        self._stamp = -1
        self._runs: tuple[Run, ...] = ()

    def all(self) -> tuple[Run, ...]:
        stamp = self._directory.stat().st_mtime_ns
        if stamp != self._stamp:
            found = tuple(run for path in sorted(self._directory.glob("*.json")) if (run := _read(path)))
            self._stamp, self._runs = stamp, found
        return self._runs

    def digests(self) -> frozenset[str]:
        return frozenset(run.layer for run in self.all())

    def find(self, layers: tuple[str, ...], start: int) -> Run | None:
        """The run from `start` to the end of `layers`, if its layer is here."""
        run = _read(self._path(layers, start))
        return run if run is not None and self._layers.has(run.layer) else None

    def shorten(self, digests: tuple[str, ...]) -> tuple[str, ...]:
        """The same tree, with fewer layers where there are many and runs of them have been collapsed."""
        if len(digests) <= limits.COLLAPSE_ABOVE:
            return digests
        runs = [run for run in self.all() if digests[: len(run.layers)] == run.layers and self._layers.has(run.layer)]
        shorter: list[str] = []
        at = 0
        while at < len(digests):
            best = max((run for run in runs if run.start == at), key=lambda run: len(run.layers), default=None)
            shorter.append(digests[at] if best is None else best.layer)
            at = at + 1 if best is None else len(best.layers)
        # The kernel refuses the same lower twice: then they stay as they are.
        return tuple(shorter) if len(set(shorter)) == len(shorter) else digests

    def put(self, run: Run) -> None:
        """Call inside `layers.publishing()`."""
        path = self._path(run.layers, run.start)
        try:
            with self._layers.staging() as work:
                write_synced(work / "draft", codec.to_json(run))
                (work / "draft").replace(path)
            sync(self._directory)
        except OSError as error:
            raise StorageError(f"cannot write {path.name}: {error.strerror}") from error
        self._stamp = -1

    def drop(self, is_used: Callable[[tuple[str, ...]], bool]) -> list[str]:
        """Forget the runs of which nobody has the layers any more; the layers that stood for them."""
        dropped = [run for run in self.all() if not is_used(run.layers)]
        for run in dropped:
            self._path(run.layers, run.start).unlink(missing_ok=True)
        self._stamp = -1
        return [run.layer for run in dropped]

    def _path(self, layers: tuple[str, ...], start: int) -> Path:
        return self._directory / f"{run_key(layers, start)}.json"


def run_key(layers: tuple[str, ...], start: int) -> str:
    return hashlib.sha256(f"collapse 1 {start} {' '.join(layers)}".encode()).hexdigest()


def _read(path: Path) -> Run | None:
    try:
        return codec.from_json(path.read_bytes(), Run)
    except (OSError, InvalidArgumentError):
        return None  # it is only ever a shortcut
