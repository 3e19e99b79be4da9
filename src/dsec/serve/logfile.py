"""The log of a detached service: one file and its predecessor, bounded, also for what Python itself writes."""

from __future__ import annotations

import io
import os
from pathlib import Path


class RotatingLog(io.TextIOBase):
    """A text stream on `path`, with standard output and error led into the same file.

    Above `bytes_max` the file becomes `<path>.1`, in place of the one before, and a new one is begun. So both together
    stay below twice that, whatever is logged; a crash's traceback is in the newer one.
    """

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._size = 0
        self._open()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        if self._size and self._size + len(data) > self._bytes_max:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
        os.write(1, data)
        self._size += len(data)
        return len(text)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            self._size = os.fstat(descriptor).st_size
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        finally:
            os.close(descriptor)
