"""Snapshots below which overlays become one, killed by SIGKILL before their first, second, … change of the disk.

    python -m tests.fault.merging_killed DIRECTORY

Makes DIRECTORY/0, DIRECTORY/1, … and prints for each what was changed last; the last line is of one that nobody killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from dsec.backends.vm import merging
from dsec.backends.vm.saved import SavedMachines
from dsec.core import limits
from dsec.testing.kills import CHANGES, STEPS_MAX, killed_before
from tests.unit.test_vm_merging import saved_above

BELOW: Final = "below"
WRITES: Final = "dsec.write"


def store_in(directory: Path) -> SavedMachines:
    limits.MACHINE_OVERLAYS_MAX, limits.MACHINE_OVERLAYS_KEPT = 3, 1  # type: ignore[misc]
    return SavedMachines(directory / "saved")


def run_and_be_killed(directory: Path, step: int) -> str:
    store = store_in(directory)
    below = None
    for number in range(3):
        below = saved_above(store, below, number)
    assert below is not None
    directory.joinpath(BELOW).write_text(below.id)
    store.keep([below.id])
    write = merging._write

    def told(fd: int, content: bytes, at: int) -> None:
        sys.audit(WRITES)
        write(fd, content[: len(content) // 2], at)  # a write is killed in its middle, too
        sys.audit(WRITES)
        write(fd, content[len(content) // 2 :], at + len(content) // 2)

    merging._write = told
    try:
        return killed_before(step, lambda: saved_above(store, below, 3), changes={*CHANGES, "os.chmod", WRITES})
    finally:
        merging._write = write


def main() -> int:
    for step in range(STEPS_MAX):
        event = run_and_be_killed(Path(sys.argv[1]) / str(step), step)
        print(event, flush=True)
        if not event:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
