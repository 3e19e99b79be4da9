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
# A device that is told to come reads as its number.
_ZRAM_UNTIL_THE_END: Final = (
    'read -r _; swapoff "/dev/zram$0"; echo 1 >"/sys/block/zram$0/reset"; echo "$0" >/sys/class/zram-control/hot_remove'
)
_ZRAM: Final = Path("/sys/class/zram-control/hot_add")
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
    with _swapped_to(file, [_UNTIL_THE_END, str(file)]):
        yield


@contextmanager
def own_zram(size_bytes: int) -> Iterator[Path]:
    """In memory, compressed: gives the device's directory in sysfs. Needs root. Raises NoSwapError."""
    assert 0 < size_bytes <= SWAP_BYTES_MAX
    try:
        number = _ZRAM.read_text().strip()
    except OSError as error:
        raise NoSwapError(f"this kernel has no zram: {error}") from error
    device = Path("/sys/block", f"zram{number}")
    with _swapped_to(Path("/dev", device.name), [_ZRAM_UNTIL_THE_END, number], size=(device / "disksize", size_bytes)):
        yield device


@contextmanager
def _swapped_to(file: Path, end: list[str], *, size: tuple[Path, int] | None = None) -> Iterator[None]:
    guard = subprocess.Popen(["/bin/sh", "-c", *end], stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    try:
        if size is not None:
            size[0].write_text(str(size[1]))
        for command in (["mkswap", "-q", str(file)], ["swapon", "-p", "32000", str(file)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoSwapError(done.stderr.strip())
        yield
    finally:
        guard.stdin.close()
        guard.wait(_OFF_S)
