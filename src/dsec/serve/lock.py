"""One service for one run directory: a lock on a file that also says whose it is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from dsec.core.errors import ConflictError, HostError

FILE_NAME: Final = "dsec.pid"


class RunLock:
    """Held while the process lives; the kernel drops it with its holder, however that ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, run_dir: Path, name: str = FILE_NAME) -> RunLock:
        """Raises ConflictError, which names the holder, or HostError."""
        descriptor = _open(run_dir / name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _pid(descriptor)
            os.close(descriptor)
            raise already_running(run_dir, pid) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise HostError(
                f"cannot write {run_dir / name}: {error.strerror}", hint=f"make room in {run_dir}"
            ) from error
        return cls(descriptor)

    def release(self) -> None:
        """Idempotent. The file stays: to remove it would let two processes lock two files of one name."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def already_running(run_dir: Path, pid: int | None) -> ConflictError:
    who = f"process {pid}" if pid else "another process"
    return ConflictError(
        f"dsec is running on {run_dir} already, as {who}",
        hint="use it, stop it with `dsec down`, or choose another --run-dir and --state-dir",
    )


def holder_of(run_dir: Path) -> int | None:
    """Pid of the service on `run_dir`; None when there is none. Raises HostError."""
    try:
        descriptor = os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"cannot read {run_dir / FILE_NAME}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(descriptor)
    finally:
        os.close(descriptor)
    return None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HostError(f"cannot open {path}: {error.strerror}") from error


def _pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else None
