"""A node that is killed while snapshots below a disk become one: at each step nothing is lost, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsec.backends.vm.saved import SavedMachines
from dsec.core import limits
from tests.fault.merging_killed import BELOW, WRITES
from tests.style.tree import ROOT
from tests.unit.test_vm_merging import NEEDS, saved_above


def names(store: SavedMachines) -> set[str]:
    return {path.name for path in store.directory.iterdir()}


def test_killed_before_each_change_of_the_disk_the_machines_are_whole_and_the_next_one_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "tests.fault.merging_killed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    events = done.stdout.splitlines()
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_MAX", 3)
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_KEPT", 1)
    merged = set()

    for step, event in enumerate(events):
        store = SavedMachines(tmp_path / str(step) / "saved")
        below = store.get((tmp_path / str(step) / BELOW).read_text(), NEEDS)  # reads all of it
        made = [name for name in names(store) - {below.id} if not name.startswith("new-")]
        for id in made:  # the kernel has done what it was asked for before
            assert store.get(id, NEEDS).manifest.overlays == 2, (step, event)
        assert bool(made) == (event == ""), (step, event)
        store.keep([below.id, *made])
        assert names(store) == {below.id, *made}, (step, event)

        again = saved_above(store, below, 3)
        assert SavedMachines(store.directory).get(again.id, NEEDS).manifest.overlays == 2
        merged.add((again.directory / again.template.overlays[0]).read_bytes())

    assert len(merged) == 1, "it reads otherwise after some"
    assert events[-1] == ""
    assert {"os.rename", "os.remove", "os.link", "os.chmod", WRITES} <= set(events)
