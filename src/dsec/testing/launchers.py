"""Ends `dsec-launch` and `dsec-loader` of a test's run directory, which outlive the node by design."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec.testing.processes import all_processes, command_line, descendants, read_process

_END_S: Final = 60.0
_POLL_S: Final = 0.01
_MNT_DETACH: Final = 2


def end_launcher(run_dir: Path) -> None:
    """Kills launcher and loader of exactly this run directory, and what is still below them; takes their mounts away.

    Nothing happens when none runs. Raises AssertionError when something resists.
    """
    mark = b"\0--run\0" + str(run_dir).encode() + b"\0"
    # Its lxcfs is nobody's descendant once the launcher that started it has been killed; nor may it be started again.
    lxcfs = b"\0-p\0" + str(run_dir).encode() + b"/lxcfs.pid\0"
    for wanted in (mark, lxcfs):
        for pid in list(all_processes()):
            if wanted in command_line(pid):
                _kill_with_descendants(pid)
    # The loader's comes last: mounts in the pinned namespace read through it. It may not answer any more.
    for mount in (run_dir / "launch.mnt", run_dir / "loader"):
        if _is_mount(mount):
            _unmount(mount)


def remove_cgroups(parent: str) -> None:
    """Removes the empty cgroup directories below `parent` (relative to each hierarchy's root), and itself.

    Waits for those whose processes are just ending. Raises AssertionError when one stays in use.
    """
    roots = [Path("/sys/fs/cgroup"), *(p for p in Path("/sys/fs/cgroup").iterdir() if p.is_dir())]
    until_s = time.monotonic() + _END_S
    for top in [root / parent for root in roots if (root / parent / "cgroup.procs").exists()]:
        while top.exists():
            for directory, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    Path(directory).rmdir()
            assert not top.exists() or time.monotonic() < until_s, f"{top} is still in use"
            if top.exists():
                time.sleep(_POLL_S)


def _kill_with_descendants(pid: int) -> None:
    for victim in (pid, *descendants(frozenset({pid}))):
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    until_s = time.monotonic() + _END_S
    while (info := read_process(pid)) is not None and info.state != "Z":
        assert time.monotonic() < until_s, f"{info} does not end"
        time.sleep(_POLL_S)
    # The one that we started ourselves is ours to reap; for any other somebody else waits.
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _is_mount(path: Path) -> bool:
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return any(line.split(" ")[4] == str(path) for line in lines)


def _unmount(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.umount2(os.fsencode(path), _MNT_DETACH)
    assert result == 0, f"{path} stays mounted: {os.strerror(ctypes.get_errno())}"
