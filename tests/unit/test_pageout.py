"""What a process that stands still gives back, measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dsec.core.errors import HostError
from dsec.core.limits import MIB
from dsec.density.pageout import has_swap, page_out

pytestmark = pytest.mark.root

HELD = (
    "import os, sys; held = os.urandom(1024) * (64 << 10); print('up', flush=True); "
    "sys.stdin.readline(); print(len(held))"
)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """With 64 MiB of its own, and stopped."""
    command = [sys.executable, "-c", HELD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_what_was_written_goes_to_swap_and_comes_back(holder: subprocess.Popen[str]) -> None:
    if not has_swap():
        pytest.skip("this host has no swap")

    done = page_out(holder.pid, threading.Event())
    holder.send_signal(signal.SIGCONT)
    said = holder.communicate("\n")[0]

    assert done.given_back_bytes > 48 * MIB
    assert done.swapped_bytes > 48 * MIB
    assert said == f"{64 * MIB}\n"


def test_without_swap_a_process_keeps_what_it_has_written(holder: subprocess.Popen[str]) -> None:
    if has_swap():
        pytest.skip("this host has swap")

    done = page_out(holder.pid, threading.Event())

    assert done.resident_bytes > 64 * MIB
    assert done.swapped_bytes == 0


def test_who_is_to_run_again_waits_for_nothing(holder: subprocess.Popen[str]) -> None:
    stop = threading.Event()
    stop.set()

    done = page_out(holder.pid, stop)

    assert done.given_back_bytes == 0


def test_a_process_that_has_ended_is_told() -> None:
    with subprocess.Popen(["true"]) as process:
        pass

    with pytest.raises(HostError, match="cannot be paged out"):
        page_out(process.pid, threading.Event())


def test_one_that_ends_meanwhile_is_an_error_and_leaves_no_descriptor(holder: subprocess.Popen[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(HostError):
        page_out(holder.pid, threading.Event())

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
