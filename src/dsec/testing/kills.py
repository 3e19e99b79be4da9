"""Work that is ended by SIGKILL just before its first, second, … change of the disk, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

# What changes a disk, as the interpreter tells it just before.
CHANGES: Final = frozenset({"os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"})
STEPS_MAX: Final = 500


def killed_before(step: int, work: Callable[[], object], *, changes: Collection[str] = CHANGES) -> str:
    """What `work` was about to do when it was killed; empty when it came to its end. The process must have one thread.

    Raises AssertionError when it failed by itself.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_in_child(step, work, changes, writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        event = told.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) if event else os.waitstatus_to_exitcode(status) == 0, status
    return event


def _run_in_child(step: int, work: Callable[[], object], changes: Collection[str], writing: int) -> None:
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in changes:
            seen += 1
            if seen > step:
                os.write(writing, event.encode())
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(watch)
        work()
        status = 0
    finally:
        os._exit(status)
