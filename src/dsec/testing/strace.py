"""Failing system calls of running programs, by strace(1): static ones too, and nothing is changed in them.

strace counts the calls of each process by itself: `Fault("openat", 3)` is the third `openat` of every process that is
followed, from the moment it is.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.testing.processes import read_process

ATTACH_S: Final = 60.0
_POLL_S: Final = 0.005
_END_S: Final = 1.0
_CALL: Final = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(\(| resumed)")

# What a call of this kind says on a host that is at its end; others say EIO.
_ERRORS: Final = {
    **dict.fromkeys(("openat", "open", "pipe2", "dup", "dup2", "dup3", "socket", "accept4", "pidfd_open"), "EMFILE"),
    **dict.fromkeys(("clone", "clone3", "fork", "vfork"), "EAGAIN"),
    **dict.fromkeys(("mmap", "brk", "mremap", "mprotect", "mount", "fsopen", "fsmount", "move_mount"), "ENOMEM"),
    **dict.fromkeys(("write", "pwrite64", "mkdir", "mkdirat", "symlinkat", "fallocate", "ftruncate"), "ENOSPC"),
    **dict.fromkeys(("poll", "ppoll", "epoll_wait", "epoll_pwait", "wait4", "waitid"), "ENOMEM"),
    **dict.fromkeys(("recvmsg", "recvfrom", "sendmsg", "sendto"), "ENOBUFS"),
    "epoll_ctl": "ENOSPC",
}
# They do not return, or cannot fail, or are asked for the kernel's own sake.
CANNOT_FAIL: Final = frozenset(
    (
        *("exit", "exit_group", "rt_sigreturn", "restart_syscall", "sched_yield", "umask", "alarm"),
        *("getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"),
        *("set_tid_address", "set_robust_list", "rseq", "clock_gettime", "gettimeofday", "time"),
    )
)


def strace() -> str | None:
    return shutil.which("strace")


@dataclass(frozen=True, slots=True)
class Fault:
    """The nth call of this name in each process fails with this error."""

    call: str
    nth: int
    error: str = ""

    @property
    def code(self) -> str:
        return self.error or _ERRORS.get(self.call, "EIO")

    def __str__(self) -> str:
        return f"{self.call}:{self.nth}:{self.code}"


@dataclass(slots=True)
class Traced:
    """What was seen; complete once the block has ended."""

    calls: dict[int, Counter[str]] = field(default_factory=dict)  # by process
    hits: list[str] = field(default_factory=list)  # the lines of calls that were made to fail

    def faults(self) -> list[Fault]:
        """One for each call that any process made, of those that can fail."""
        most: Counter[str] = Counter()
        for counted in self.calls.values():
            for call, count in counted.items():
                most[call] = max(most[call], count)
        names = sorted(set(most) - CANNOT_FAIL)
        return [Fault(name, nth) for name in names for nth in range(1, most[name] + 1)]


@contextmanager
def traced(pid: int, fault: Fault | None = None) -> Iterator[Traced]:
    """Follows `pid` and what it starts meanwhile; with a fault that call fails. At the end all are let go, unharmed."""
    program = strace()
    assert program is not None, "strace is not installed"
    found = Traced()
    with tempfile.TemporaryDirectory(prefix="dsec-strace-", dir="/tmp") as directory:
        lines = Path(directory) / "lines"
        options = ["-f", "-qq", "-s", "48", "-o", str(lines), "-p", str(pid)]
        if fault is not None:
            options += ["-e", f"trace={fault.call}", "-e", f"inject={fault.call}:error={fault.code}:when={fault.nth}"]
        process = subprocess.Popen(
            [program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _wait_until_attached(pid, process)
            yield found
        finally:
            _let_go(pid, process)
        for line in lines.read_text(errors="replace").splitlines():
            if (match := _CALL.match(line)) is None:
                continue
            if match[3] == "(":
                found.calls.setdefault(int(match[1]), Counter())[match[2]] += 1
            if "(INJECTED" in line:
                found.hits.append(line)


def _let_go(pid: int, process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + ATTACH_S
    while True:
        try:
            process.communicate(timeout=_END_S)
            return
        except subprocess.TimeoutExpired:
            # Of a program with threads that has ended it waits for the first thread, which comes after the others, and
            # for those it does not wait. Without it they are their parent's.
            if not _lives(pid):
                process.kill()
            assert time.monotonic() < until_s, "strace does not end"


def _wait_until_attached(pid: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + ATTACH_S
    while _tracer(pid) != process.pid:
        if not _lives(pid):
            return  # the first call that failed was its last
        if process.poll() is not None:
            _, said = process.communicate()
            raise AssertionError(f"strace has ended: {said.decode(errors='replace')[:500]}")
        assert time.monotonic() < until_s, "strace does not attach"
        time.sleep(_POLL_S)


def _tracer(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("TracerPid:")), 0)


def _lives(pid: int) -> bool:
    info = read_process(pid)
    return info is not None and info.state not in "ZX"
