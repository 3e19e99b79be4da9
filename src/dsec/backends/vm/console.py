"""What a machine says while it boots. An image may run a program of its own by then (its preload), which may talk
without end: a FIFO takes no room on the disk, and its end is kept, for whoever asks why a machine did not come up."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_SHOWN: Final = 2_000
_READ_BYTES: Final = 64 * 1024  # all that a FIFO holds


class BootConsole:
    """While entered, `path` is a FIFO that its owner may write to, and what comes is read."""

    def __init__(self, path: Path, *, owner: int) -> None:
        self.path = path
        self._owner = owner
        self._fd = -1
        self._end = b""

    def __enter__(self) -> Self:
        os.mkfifo(self.path, 0o600)
        os.chown(self.path, self._owner, self._owner)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            piece = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:  # who wrote has ended, and a FIFO that is at its end would be looked at without end
            asyncio.get_running_loop().remove_reader(self._fd)
        self._end = (self._end + piece)[-_SHOWN:]
        return bool(piece)

    def last_words(self) -> str:
        """To be put behind a sentence."""
        if self._read():
            self._read()  # it may have been full once, and was filled again meanwhile
        text = self._end.decode("utf-8", "replace").strip()
        return f"; console: {text}" if text else ""
