"""`dsec down`: stops the service of a run directory. Sandboxes run on, and are taken over by the next `dsec up`."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Final

from dsec.core.errors import DeadlineError, HostError
from dsec.serve.lock import holder_of

STOP_TIMEOUT_S: Final = 30.0

_HURRY_AFTER: Final = 0.5  # of the time allowed: then the second signal


def stop_service(run_dir: Path, *, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
    """The pid that was stopped, None when there was nothing to stop. Raises DeadlineError when it does not end."""
    pid = holder_of(run_dir)
    if pid is None:
        return None
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # The pid may have passed to another process between reading it and opening it: the lock says.
        if holder_of(run_dir) != pid:
            return None
        deadline = time.monotonic() + timeout_s
        for wait_s in (timeout_s * _HURRY_AFTER, max(0.0, deadline - time.monotonic())):
            _signal(handle, pid)
            if select.select([handle], [], [], min(wait_s, max(0.0, deadline - time.monotonic())))[0]:
                return pid
    finally:
        os.close(handle)
    raise DeadlineError(f"process {pid} does not end", hint=f"kill -KILL {pid}: its sandboxes run on")


def _signal(handle: int, pid: int) -> None:
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise HostError(f"process {pid} belongs to another user") from error
