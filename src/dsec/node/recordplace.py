"""Where the records of execs are: a directory for each sandbox that has run one, of which some are made ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec.storage.spread import spread_children

# To make a directory here costs 0.2 ms (its inode is looked for apart from all others), to rename one 0.03. More than
# these are wanted only by a burst, which has the machine busy anyway.
_FRESH_MAX: Final = 4
_PAUSE_S: Final = 0.02  # after the first command of a sandbox, whose caller waits for what it says


class RecordPlace:
    """Of one directory, which is there. Those made ahead are removed by `close`, or by the next `start`."""

    def __init__(self, directory: Path, *, bytes_max: int, has_room: Callable[[], bool]) -> None:
        self.directory = directory
        self.bytes_max = bytes_max  # of a sandbox
        self.has_room = has_room  # for more, of all
        self._ahead: Path | None = None
        self._fresh: list[Path] = []
        self._made = 0
        self._later: asyncio.TimerHandle | None = None

    def start(self, ahead: Path) -> None:
        """From now on some are made ahead, whenever there is time: in `ahead`, on the same file system."""
        with suppress(OSError):
            ahead.mkdir(mode=0o700, exist_ok=True)
            spread_children(ahead)
            for left in ahead.iterdir():
                left.rmdir()
            self._ahead = ahead
            self._make_later()

    def make(self, path: Path) -> None:
        """The directory `path`, if it is not there. Raises OSError."""
        if self._fresh:
            fresh = self._fresh.pop()
            if self._later is None:
                self._make_later()
            with suppress(OSError):
                fresh.rename(path)
                return
            with suppress(OSError):  # there is one already
                fresh.rmdir()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def close(self) -> None:
        self._ahead = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        while self._fresh:
            with suppress(OSError):
                self._fresh.pop().rmdir()

    def _make_one(self) -> None:
        self._later = None
        if self._ahead is None:
            return
        self._made += 1
        fresh = self._ahead / str(self._made)
        with suppress(OSError):  # a full disk is told to whoever wants to write
            fresh.mkdir(mode=0o700)
            self._fresh.append(fresh)
            if len(self._fresh) < _FRESH_MAX:
                self._make_later()

    def _make_later(self) -> None:
        self._later = asyncio.get_running_loop().call_later(_PAUSE_S, self._make_one)
