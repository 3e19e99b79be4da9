"""A process that collects is killed at each step: nothing that lives is lost, and the next one leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dsec.core.clock import SystemClock
from dsec.image.environments import EnvironmentStore
from dsec.node.census import Known, Places
from dsec.node.collecting import Collector
from dsec.node.config import CollectConfig
from dsec.storage.layers import LayerStore
from tests.style.tree import ROOT

FIRST, SECOND, USED = ("1" * 64, "2" * 64, "3" * 64)


class LaterClock(SystemClock):
    """Two hours later: half removed things are nobody's by then."""

    def wall_s(self) -> float:
        return super().wall_s() + 7_200.0


def listed(directory: Path) -> set[str]:
    """Locks are made as they are needed, and stay."""
    found = (path.relative_to(directory) for path in directory.rglob("*"))
    return {str(path) for path in found if path.parts[:2] != ("s", "locks")}


def node_on(directory: Path) -> tuple[EnvironmentStore, Collector]:
    """What a node that starts there begins with: nothing of before but the disk, and a sandbox that outlived it."""
    places = Places(directory / "s", directory / "r")
    store = EnvironmentStore(places.state)

    async def tidy() -> None:
        store.layers.clean()
        store.collect(live={USED})

    known = Known(frozenset(), frozenset({USED}))
    return store, Collector(places, CollectConfig(), clock=LaterClock(), known=lambda: known, tidy=tidy)


def whole(layers: LayerStore, digest: str) -> bool:
    location = layers.get(digest)
    return (location.meta / "file").read_bytes() == bytes(8192) and layers.record(digest).digest == digest


def killed_at_each_step(directory: Path) -> Iterator[tuple[Path, str]]:
    command = [sys.executable, "-m", "tests.fault.collecting_killed", str(directory)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    for step, event in enumerate(done.stdout.splitlines()):
        yield directory / str(step), event


async def test_killed_before_each_change_of_the_disk_it_loses_nothing_and_the_next_one_does_the_rest(
    tmp_path: Path,
) -> None:
    sites = list(killed_at_each_step(tmp_path))
    events = [event for _, event in sites]
    last, _ = sites[-1]
    expected = listed(last)

    for directory, _ in sites:
        store, collector = node_on(directory)
        # What lives is there before anything is mended.
        assert store.get("base").layers == (SECOND,)
        with store.layers.lease([SECOND, USED]):
            pass
        store.layers.clean()
        await collector.collect()

        assert all(whole(LayerStore(store.state), digest) for digest in (SECOND, USED))
        assert not store.layers.has(FIRST)
        assert listed(directory) == expected
        assert (await collector.collect(dry_run=True)).items == []

    assert events[-1] == ""
    assert len(events) >= 20
    assert {"os.rename", "os.remove", "os.rmdir"} <= set(events)
