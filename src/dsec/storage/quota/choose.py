"""Which limit on disk use this node can enforce: found by trial on the file system of its state, never inferred."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import secrets
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError
from dsec.core.limits import MIB
from dsec.storage.quota.image import attach, make_image, mounted
from dsec.storage.quota.project import lift_limit, limit_directory
from dsec.storage.trees import remove_tree

_TRIAL_BYTES: Final = 1 * MIB
_STEP: Final = 64 * 1024
_NOBODY: Final = 65_534
_WRITER_S: Final = 30.0
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Mechanism(enum.StrEnum):
    PROJECT = "project"
    IMAGE = "image"


# In the order in which they are taken: what costs less comes first.
COSTS: Final = {
    Mechanism.PROJECT: "counted by the file system itself; costs nothing that can be measured",
    Mechanism.IMAGE: "an ext4 of their own in a file, on a loop device; some 15 ms a create, and an own page cache",
}


@dataclass(frozen=True, slots=True)
class Found:
    mechanism: Mechanism | None
    lacking: dict[Mechanism, str] = field(default_factory=dict)  # why those before it are not to be had

    @property
    def reason(self) -> str:
        return "; ".join(f"{mechanism}: {why}" for mechanism, why in self.lacking.items())


def find_mechanism(state: Path, *, only: Mechanism | None = None) -> Found:
    """The first of all (or `only` one) that holds a writer to its limit below `state`. Takes some 30 ms; blocks."""
    lacking: dict[Mechanism, str] = {}
    if os.geteuid() != 0:
        return Found(None, dict.fromkeys(Mechanism, "needs root"))
    for mechanism in Mechanism:
        if only is not None and mechanism is not only:
            continue
        why = _try(mechanism, state)
        if why is None:
            return Found(mechanism, lacking)
        lacking[mechanism] = why
    return Found(None, lacking)


def _try(mechanism: Mechanism, state: Path) -> str | None:
    """Why not; None when a file that grows beyond the limit is stopped there."""
    trial = state / f".quota-{secrets.token_hex(6)}"
    try:
        trial.mkdir(mode=0o700)
        try:
            return _on_project(trial) if mechanism is Mechanism.PROJECT else _on_image(trial)
        finally:
            remove_tree(trial)
    except OSError as error:
        return error.strerror or str(error)
    except DsecError as error:
        return error.message
    except subprocess.TimeoutExpired:
        return "the trial took too long"


def _on_project(trial: Path) -> str | None:
    inside = trial / "inside"
    inside.mkdir()
    inside.chmod(0o777)
    project = limit_directory(inside, _TRIAL_BYTES)
    try:
        return _fill_as_nobody(inside)
    finally:
        (inside / "file").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            lift_limit(trial, project)


def _on_image(trial: Path) -> str | None:
    image = trial / "disk.img"
    make_image(image, _TRIAL_BYTES, journal=False)
    with attach(image) as device, mounted(device) as top:
        return _fill(top)


def _fill_as_nobody(directory: Path) -> str | None:
    """Quotas do not hold who has CAP_SYS_RESOURCE. (An overlay gives it up for those who write through it.)"""
    # Not our own interpreter, which nobody may be able to run where it lies.
    words = ["dd", "if=/dev/zero", "of=file", f"bs={_STEP}", f"count={4 * _TRIAL_BYTES // _STEP}", "oflag=dsync"]
    done = subprocess.run(
        words,
        cwd=directory,
        user=_NOBODY,
        group=_NOBODY,
        extra_groups=[],
        env={"PATH": os.defpath, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_WRITER_S,
        check=False,
    )
    if done.returncode == 0:
        return "a file grew beyond the limit"
    said = done.stderr.decode("ascii", "replace").strip()
    if any(os.strerror(number) in said for number in _FULL):
        return None
    return f"nobody could write: {said[:200] or done.returncode}"


def _fill(directory: int) -> str | None:
    fd = os.open("file", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        for _ in range(4 * _TRIAL_BYTES // _STEP):
            os.write(fd, bytes(_STEP))
            os.fdatasync(fd)  # blocks may be promised before they are counted
    except OSError as error:
        if error.errno in _FULL:
            return None
        raise
    finally:
        os.close(fd)
    return "a file grew beyond the limit"
