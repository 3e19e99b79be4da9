"""What nodes do with a program of theirs that outlives them and holds a run directory by a lock: start it, see
whether it is there, and say what its refusals mean. Blocking."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsec.core.errors import (
    CapacityError,
    DsecError,
    HostError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from dsec.storage.locks import try_lock

START_S: Final = 20.0  # also to end; a machine under load takes some seconds
_HELD: Final = 3  # a program's exit code when another one has the run directory
_SAID: Final = 300  # of what it wrote, for an error


def is_held(lock: Path) -> bool:
    """Whether a program has the run directory: its lock says."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, shared=True)
    finally:
        os.close(fd)


def start(name: str, words: Sequence[str], log: Path, *, hint: str, keep_log: bool) -> bool:
    """It puts itself into the background and exits 0 once it serves. False: another one holds the run directory, and
    may just be coming up, or be on its way out. Raises HostError with the end of its log, UnavailableError."""
    try:
        with log.open("ab" if keep_log else "wb") as output:
            done = subprocess.run(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                timeout=START_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{name} did not serve within {START_S:g} s", retry_after_s=5.0) from error
    except OSError as error:
        raise HostError(f"cannot run {words[0]}, with its log in {log.parent}: {error}") from error
    if done.returncode not in (0, _HELD):
        said = log.read_text(errors="replace").strip()[-_SAID:]
        raise HostError(f"{name} does not start: {said or 'no message'}", hint=hint)
    return done.returncode == 0


def error_of(text: str, code: str, *, hint: str | None = None) -> DsecError:
    """A program's refusal, by the word that it has for it; `hint` is for what the kernel refused it."""
    if code == "not_found":
        return NotFoundError(text)
    if code == "invalid":
        return InvalidArgumentError(text)
    if code == "busy":
        return CapacityError(text)
    return HostError(text, hint=hint)
