"""Which Firecracker this host has, and what that version can do. An endpoint that it lacks answers 400."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dsec.backends.vm.programs import Stamp, stamp_of
from dsec.core.errors import HostError

PROGRAM: Final = "firecracker"
VERSION_MIN: Final = (1, 12)  # the oldest that was tried; snapshots of before are not ours to carry on
_ASK_S: Final = 30


@dataclass(frozen=True, slots=True)
class Firecracker:
    path: Path
    version: tuple[int, int]
    text: str  # the version in full: snapshots are for this very one
    stamp: Stamp | None = None

    @property
    def is_current(self) -> bool:
        """The program is the one that was asked for its version."""
        return stamp_of(self.path) == self.stamp

    @property
    def reports_free_pages(self) -> bool:
        """The guest tells of pages that it has freed, and the host has them back."""
        return self.version >= (1, 14)

    @property
    def has_pmem(self) -> bool:
        """Files can be memory to the guest."""
        return self.version >= (1, 14)


def find_firecracker(program: str = PROGRAM) -> Firecracker:
    """Raises HostError."""
    found = shutil.which(program)
    if found is None:
        raise HostError(f"there is no {program}", hint="github.com/firecracker-microvm/firecracker has releases")
    path = Path(found).resolve()
    return _ask(path, stamp_of(path))


@cache
def _ask(path: Path, stamp: Stamp | None) -> Firecracker:
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{path} does not tell its version: {error}") from error
    found = re.search(r"^Firecracker v(\d+)\.(\d+)\S*", said, re.MULTILINE)
    if found is None:
        raise HostError(f"{path} tells a strange version: {said[:100]}")
    version = (int(found[1]), int(found[2]))
    if version < VERSION_MIN:
        raise HostError(f"{path} is of version {found[1]}.{found[2]}; 1.12 is the oldest that works")
    return Firecracker(path, version, found[0], stamp)
