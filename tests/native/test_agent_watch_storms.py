"""Watches under load: what is told, applied to what was there, gives what is there, or an overflow is told."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsec.wire.frames import FrameType
from tests.native.agent_wire import AgentWire, request

Event = dict[str, Any]

_ENDS_MAX = 100  # each takes one overflow; a tree at rest has at most one for each directory


class Told:
    """A watched tree as a caller knows it: what was there, and what was told since."""

    def __init__(self, wire: AgentWire, root: Path) -> None:
        self.wire = wire
        self.root = root
        self.known = tree(root)
        self.wrong: list[str] = []
        self.overflows = 0
        self.stream = self.wire.open("watch", path=os.fsencode(root), recursive=True)
        self.wire.result(self.stream)

    def until_end(self) -> None:
        """Makes a last file and takes all that is told up to it.

        An overflow begins with a listing of its own time, and what is told next may be older than that listing: only a
        file that is told itself, with no overflow on the way, is an end.
        """
        for _ in range(_ENDS_MAX):
            name, overflows = f"end-{time.monotonic_ns()}".encode(), self.overflows
            (self.root / os.fsdecode(name)).touch()
            told = False
            while not told and self.overflows == overflows:
                event = self.wire.body(self.wire.frame(self.stream), FrameType.EVENT)
                self.take(event)
                told = event["path"] == name
            if told:
                return
        raise AssertionError(f"{_ENDS_MAX} files were each followed by an overflow")

    def until_same(self) -> None:
        """What a walk finds may be told after a later change."""
        self.until_end()
        while True:
            while not self.wire.none_within(self.stream, 0.05):
                self.take(self.wire.body(self.wire.frame(self.stream), FrameType.EVENT))
            if self.known == tree(self.root):
                return
            # Fails at its deadline.
            self.take(self.wire.body(self.wire.frame(self.stream), FrameType.EVENT))

    def take(self, event: Event) -> None:
        kind, path, directory = event["kind"], event["path"], event["directory"]
        if kind == "overflow":
            self.overflows += 1
            self.known = tree(self.root)
        elif kind == "created":
            self.expect(path not in self.known, event)
            self.known[path] = directory
        elif kind == "deleted":
            self.expect(path in self.known, event)
            self.forget(path)
        elif kind == "moved":
            self.expect(event["source"] in self.known, event)
            self.move(event["source"], path)
        else:
            self.expect(path in self.known, event)

    def expect(self, right: bool, event: Event) -> None:
        if not right:
            self.wrong.append(f"{event['kind']} {event['path']!r} {event['source']!r}")

    def forget(self, path: bytes) -> None:
        for name in [name for name in self.known if name == path or name.startswith(path + b"/")]:
            del self.known[name]

    def move(self, source: bytes, path: bytes) -> None:
        if source not in self.known:
            return
        self.forget(path)
        for name in [name for name in self.known if name == source or name.startswith(source + b"/")]:
            self.known[path + name[len(source) :]] = self.known.pop(name)


def tree(root: Path) -> dict[bytes, bool]:
    found = {}
    for directory, directories, files in os.walk(os.fsencode(root)):
        for name in [*directories, *files]:
            path = directory + b"/" + name
            found[os.path.relpath(path, os.fsencode(root))] = name in directories
    return found


def test_ten_thousand_files_in_a_thousand_directories_are_told_once_each(wire: AgentWire, tmp_path: Path) -> None:
    told = Told(wire, tmp_path)

    for number in range(1_000):
        directory = tmp_path / f"d{number % 100}" / f"e{number}"
        directory.mkdir(parents=True)
        for name in range(9):
            (directory / f"f{name}").touch()
    told.until_same()

    assert told.wrong == []


def test_a_tree_that_is_there_is_watched_whole_before_the_answer(wire: AgentWire, tmp_path: Path) -> None:
    directories = [tmp_path / f"d{number % 50}" / f"e{number}" for number in range(5_000)]
    for directory in directories:
        directory.mkdir(parents=True)
    told = Told(wire, tmp_path)

    for directory in directories:
        (directory / "f").touch()
    told.until_same()

    assert told.overflows == 0
    assert told.wrong == []


def test_a_long_walk_holds_up_nobody(wire: AgentWire, tmp_path: Path) -> None:
    for number in range(5_000):
        (tmp_path / "d" / f"e{number % 50}" / str(number)).mkdir(parents=True)
    watch = request(1_001, "watch", path=os.fsencode(tmp_path), recursive=True)
    stat = request(1_003, "stat", path=b"/")

    # In one piece: both are there when the agent begins with the first.
    wire.socket.sendall(watch + stat)

    # Asked for later, answered sooner.
    assert wire.next_streams(2) == [1_003, 1_001]


def test_a_directory_that_moves_in_is_told_with_all_that_it_holds(wire: AgentWire, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    for number in range(300):
        (outside / f"a{number % 10}" / f"b{number}").mkdir(parents=True)
        (outside / f"a{number % 10}" / f"b{number}" / "f").touch()
    told = Told(wire, inside)

    outside.rename(inside / "all")
    (inside / "all" / "a1" / "b1" / "late").touch()
    told.until_same()

    assert (told.wrong, told.overflows) == ([], 0)


def test_a_name_that_is_taken_again_at_once_is_two_things(wire: AgentWire, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "d" / "old").mkdir(parents=True)
    told = Told(wire, inside)

    (inside / "d").rename(outside)
    (inside / "d" / "new").mkdir(parents=True)
    (inside / "d" / "new" / "f").touch()
    (outside / "unseen").touch()
    told.until_same()

    assert told.wrong == []


_STORM = """
import os, random, sys
root, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
os.chdir(root)
def name(): return "/".join(rng.choice("abc") for _ in range(rng.randint(1, 3)))
for number in range(count):
    try:
        what = rng.randrange(8)
        if what < 3: os.makedirs(name(), exist_ok=True)
        elif what < 5: open(name() + f"/f{rng.randrange(4)}", "w").close()
        elif what < 7: os.rename(name(), name())
        else:
            for path, directories, files in os.walk(name(), topdown=False):
                for file in files: os.unlink(os.path.join(path, file))
                for directory in directories: os.rmdir(os.path.join(path, directory))
    except OSError:
        pass
"""


@pytest.mark.parametrize("writers", [1, 2])
def test_a_storm_of_renames_is_told_right_or_as_an_overflow(
    wire: AgentWire, tmp_path: Path, rng: random.Random, writers: int
) -> None:
    told = Told(wire, tmp_path)
    seeds = [str(rng.randrange(1 << 30)) for _ in range(writers)]
    storms = [subprocess.Popen([sys.executable, "-c", _STORM, str(tmp_path), seed, "3000"]) for seed in seeds]
    assert [storm.wait(60) for storm in storms] == [0] * writers
    told.until_end()
    if not told.overflows:
        told.until_same()
    assert told.overflows or told.wrong == [], seeds

    # All that is there is watched now, whatever was told before.
    told.known = tree(tmp_path)
    for directory in [name for name, is_directory in told.known.items() if is_directory]:
        (tmp_path / os.fsdecode(directory) / "last").touch()
    told.until_same()
