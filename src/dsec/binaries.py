"""Where our native programs are: in the package, or in the checkout that the package is imported from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError

_PACKAGE: Final = Path(__file__).resolve().parent
_PLACES: Final = (
    _PACKAGE / "_bin",  # an installed wheel
    _PACKAGE.parent.parent / "native" / "target" / "x86_64-unknown-linux-gnu" / "release",  # a checkout
    _PACKAGE.parent.parent / "native" / "target" / "tools",  # what set-up built of others' sources (mkfs.erofs)
)


def find_binary(name: str) -> Path:
    """The executable `name` ("dsec-agent", "dsec-launch"). Raises HostError when it has not been built.

    Never looks in PATH: what runs as root is what belongs to this version.
    """
    for place in _PLACES:
        program = place / name
        # Not Path.is_file, which raises where we may not look.
        if os.path.isfile(program) and os.access(program, os.X_OK):  # noqa: PTH113
            return program
    raise HostError(
        f"the program {name} is not there; looked in {' and '.join(map(str, _PLACES))}",
        hint="in a checkout run tools/setup; otherwise install the wheel for x86-64 Linux",
    )
