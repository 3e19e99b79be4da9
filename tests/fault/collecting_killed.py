"""Collections that are killed by SIGKILL before their first, second, … change of the disk, each in its own process.

    python -m tests.fault.collecting_killed DIRECTORY

Makes DIRECTORY/0, DIRECTORY/1, … and prints for each what it changed last; the last line is of one that nobody killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dsec.testing.kills import STEPS_MAX, killed_before
from tests.fault.test_node_collecting import Site


class KilledSite(Site):
    """With a layer that only a sandbox has, chunks of a layer that goes, and remains of all kinds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.used = self.layer("3")
        self.live_layers.add(self.used)
        for digest in (self.first, self.second):
            chunks = self.places.chunks / digest
            chunks.mkdir(parents=True)
            (chunks / "data").write_bytes(bytes(4096))
            self.aged(chunks)
        with self.store.layers.staging() as work:
            (work / "half").mkdir()
            (work / "half" / "file").touch()
            work.rename(work.with_name("killed-before"))
        self.strays()


def run_and_be_killed(directory: Path, step: int) -> str:
    """What the collection was about to do when it was killed; empty when it came to its end."""
    site = KilledSite(directory)
    return killed_before(step, lambda: asyncio.run(site.collector().collect()))


def main() -> int:
    for step in range(STEPS_MAX):
        event = run_and_be_killed(Path(sys.argv[1]) / str(step), step)
        print(event, flush=True)
        if not event:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
