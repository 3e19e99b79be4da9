"""Which QEMU this host has, and what it can do. Tried, not inferred."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dsec.backends.base import Weakness
from dsec.backends.vm.programs import Stamp, stamp_of
from dsec.core.errors import HostError, UnsupportedError

PROGRAM: Final = "qemu-system-x86_64"
PACKAGE: Final = "qemu-system-x86"
VERSION_MIN: Final = (7, 2)
_ASK_S: Final = 30


@dataclass(frozen=True, slots=True)
class Qemu:
    path: Path
    version: tuple[int, int]
    text: str  # the version in full: state of a template is for this very one
    firmware: Path  # directory of what it loads
    stamp: Stamp | None = None

    @property
    def is_current(self) -> bool:
        """The program is the one that was asked for its version."""
        return stamp_of(self.path) == self.stamp

    @property
    def reads_state_files(self) -> bool:
        """Takes `file:` for the state of a machine; before, an open file."""
        return self.version >= (8, 2)

    @property
    def keeps_templates(self) -> bool:
        """Can open the memory of a template for reading only (readonly=on,rom=off)."""
        return self.version >= (8, 2)


def find_qemu(program: str = PROGRAM) -> Qemu:
    """Raises HostError."""
    found = shutil.which(program)
    if found is None:
        raise HostError(f"there is no {program}", hint=f"apt-get install {PACKAGE}")
    path = Path(found).resolve()
    return _ask(path, stamp_of(path))


@cache
def _ask(path: Path, stamp: Stamp | None) -> Qemu:
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=True, stdin=subprocess.DEVNULL
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise HostError(f"{path} does not tell its version: {error}") from error
    found = re.search(r"version (\d+)\.(\d+)", text)
    if found is None:
        raise HostError(f"{path} tells a strange version: {text[:100]}")
    version = (int(found[1]), int(found[2]))
    if version < VERSION_MIN:
        raise HostError(f"{path} is of version {found[1]}.{found[2]}; 7.2 is the oldest that works")
    firmware = next((place for place in _places(path) if (place / "qboot.rom").exists()), None)
    if firmware is None:
        raise HostError(f"the firmware qboot.rom of {path} is not there", hint="apt-get install qemu-system-data")
    return Qemu(path, version, text, firmware, stamp)


def _places(path: Path) -> list[Path]:
    share = path.parent.parent / "share"
    return [share / "qemu", share / "seabios", Path("/usr/share/qemu")]


@cache
def has_own_net(path: Path) -> bool:
    """Whether it was built with a net of its own for guests (`-netdev user`). Blocking, once."""
    try:
        done = subprocess.run(
            [path, "-netdev", "help"], capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return "user" in done.stdout.split()


def check_own_net(qemu: Qemu) -> None:
    """Of machines with a network card. Raises UnsupportedError. Blocking, once."""
    if not has_own_net(qemu.path):
        raise UnsupportedError(
            f"{qemu.text} was built without a net of its own (libslirp), which a network needs",
            hint="use network='none', or another build of QEMU",
        )


def tsc_khz() -> int | None:
    """What an emulated kernel is told of its clock: on a busy host it would measure it wrongly, and hang."""
    rates = re.findall(r"^cpu MHz\s*:\s*([0-9.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return round(float(rates[0]) * 1000) if rates else None


def weaknesses(*, emulated: bool, keeps_templates: bool) -> dict[str, Weakness]:
    """Of the facts "processor" and "templates"."""
    weak: dict[str, Weakness] = {}
    if emulated:
        weak["processor"] = Weakness(
            "guests are slow, and QEMU's authors do not promise that what it emulates is a boundary",
            "a machine, or a virtual machine, on which KVM runs guests",
        )
    if not keeps_templates:
        weak["templates"] = Weakness(
            "a guest that has broken through its monitor could write into the memory that later clones begin with",
            "QEMU 8.2 or newer: from the distribution's backports, or its next release",
        )
    return weak
