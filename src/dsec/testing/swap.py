"""Swap of a test's own: a file that the host swaps to meanwhile, and never after, however the test ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dsec.core.limits import GIB, MIB

SWAP_BYTES_MAX: Final = 2 * GIB  # the machine is shared
# It waits for the end of whoever has its input, which the kernel closes for one that is killed too.
_UNTIL_THE_END: Final = 'read -r _; swapoff "$0"; rm -f "$0"'
_OFF_S: Final = 120.0


class NoSwapError(Exception):
    """This host takes no more swap."""


@contextmanager
def own_swap(directory: Path, size_bytes: int) -> Iterator[None]:
    """Preferred to what the host has. Needs root. Raises NoSwapError."""
    assert 0 < size_bytes <= SWAP_BYTES_MAX
    file = directory / "swap"
    with file.open("wb") as out:
        for _ in range(0, size_bytes, MIB):
            out.write(bytes(MIB))
    file.chmod(0o600)
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _UNTIL_THE_END, str(file)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        for command in (["mkswap", "-q", str(file)], ["swapon", "-p", "32000", str(file)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoSwapError(done.stderr.strip())
        yield
    finally:
        guard.stdin.close()
        guard.wait(_OFF_S)
