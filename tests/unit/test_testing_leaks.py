"""Each kind of leak is noticed, named, and forgiven once it has gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec.testing.leaks import Watched, leaks_between, no_leaks, no_leaks_async, take_snapshot, wait_for_no_leaks

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def clean_up() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(clean_up: ExitStack, command: list[str], **options: object) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    clean_up.callback(process.wait)
    clean_up.callback(process.kill)
    return process


def leaks_of(watched: Watched, action: Callable[[], object]) -> list[str]:
    before = take_snapshot(watched)
    action()
    return leaks_between(before, take_snapshot(watched))


def test_nothing_done_is_no_leak() -> None:
    assert leaks_of(Watched(), lambda: None) == []


def test_a_process_of_before_is_no_leak_whatever_it_does(clean_up: ExitStack) -> None:
    process = start(clean_up, SLEEPER)
    before = take_snapshot(Watched())

    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert leaks_between(before, take_snapshot(Watched())) == []


def test_a_child_process_is_a_leak_until_it_is_reaped(clean_up: ExitStack) -> None:
    before = take_snapshot(Watched())
    process = start(clean_up, SLEEPER)

    leaks = leaks_between(before, take_snapshot(Watched()))
    assert [leak.split()[2] for leak in leaks if leak.startswith("processes:")] == [str(process.pid)]

    process.kill()
    process.wait()
    assert wait_for_no_leaks(Watched(), before) == []


def test_a_grandchild_whose_parent_has_gone_is_found_by_its_marker(clean_up: ExitStack, tmp_path: Path) -> None:
    watched = Watched(markers=(str(tmp_path).encode(),))
    before = take_snapshot(watched)
    code = "import os, sys; p = os.fork(); print(p) if p else (os.close(1), __import__('time').sleep(600))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
    clean_up.callback(os.kill, int(done.stdout), 9)

    leaks = leaks_between(before, take_snapshot(watched))

    assert any(leak.startswith(f"processes: process {int(done.stdout)} ") for leak in leaks)


def test_a_file_and_a_directory_are_leaks(tmp_path: Path) -> None:
    watched = Watched(directories=(tmp_path,))

    leaks = leaks_of(watched, lambda: (tmp_path / "a").mkdir() or (tmp_path / "a" / "b").write_bytes(b""))

    assert leaks == [f"files: {tmp_path}/a", f"files: {tmp_path}/a/b"]


def test_an_open_descriptor_is_a_leak(clean_up: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")

    leaks = leaks_of(Watched(), lambda: clean_up.enter_context((tmp_path / "f").open()))

    assert len(leaks) == 1
    assert leaks[0].endswith(f"→ {tmp_path}/f")


def test_a_lock_on_a_byte_range_is_a_leak(clean_up: ExitStack, tmp_path: Path) -> None:
    file = clean_up.enter_context((tmp_path / "slots").open("w"))
    watched = Watched(lock_directories=(tmp_path,))

    leaks = leaks_of(watched, lambda: fcntl.lockf(file, fcntl.LOCK_EX, 1, 5))

    assert leaks == [f"locks: POSIX lock on {tmp_path}/slots, bytes 5 to 5"]


@pytest.mark.root
def test_a_mount_is_a_leak(clean_up: ExitStack, tmp_path: Path) -> None:
    def mount() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True, timeout=60)
        clean_up.callback(subprocess.run, ["umount", tmp_path], check=True, timeout=60)

    other = Watched(directories=(tmp_path.with_name("of-another-test"),))
    before = take_snapshot(other)
    leaks = leaks_of(Watched(markers=(os.fsencode(tmp_path),)), mount)

    assert len(leaks) == 1
    assert leaks[0].startswith(f"mounts: {tmp_path} (mount ")
    assert leaks_between(before, take_snapshot(other)) == [], "and is none of another test, whose machine it is, too"


@pytest.mark.root
def test_a_cgroup_and_a_process_in_it_are_leaks(clean_up: ExitStack) -> None:
    name = f"dsec-leak-test-{os.getpid()}"
    hierarchies = [path for path in Path("/sys/fs/cgroup").iterdir() if (path / "cgroup.procs").exists()]
    if not hierarchies:
        pytest.skip("there are no cgroups")
    # Preferably a v1 hierarchy: those vanish late.
    directory = min(hierarchies, key=lambda path: (path / "cgroup.controllers").exists()) / name
    watched = Watched(roots=frozenset(), cgroups=(name,), descriptors=False)
    before = take_snapshot(watched)

    directory.mkdir()
    clean_up.callback(lambda: directory.rmdir() if directory.exists() else None)
    process = start(clean_up, SLEEPER)
    (directory / "cgroup.procs").write_text(str(process.pid))

    leaks = leaks_between(before, take_snapshot(watched))
    assert f"cgroups: {directory}" in leaks
    assert f"processes: process {process.pid} in {directory}" in leaks

    # A cgroup that goes a little later is no leak.
    process.kill()
    process.wait()
    threading.Timer(0.1, directory.rmdir).start()
    assert wait_for_no_leaks(watched, before) == []


@pytest.mark.root
def test_a_namespace_that_only_a_descriptor_holds_is_a_leak(clean_up: ExitStack) -> None:
    process = start(clean_up, ["unshare", "--net", *SLEEPER])

    def hold() -> None:
        path = f"/proc/{process.pid}/ns/net"
        own = Path("/proc/self/ns/net").readlink()
        while Path(path).readlink() == own:
            assert process.poll() is None
        clean_up.callback(os.close, os.open(path, os.O_RDONLY))

    leaks = leaks_of(Watched(roots=frozenset()), hold)

    assert any(leak.startswith("namespaces: net:[") for leak in leaks)


@pytest.mark.root
def test_a_namespace_of_a_process_is_a_leak(clean_up: ExitStack) -> None:
    watched = Watched()
    before = take_snapshot(watched)
    process = start(clean_up, ["unshare", "--net", *SLEEPER])
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{process.pid}/ns/net").readlink() == own:
        assert process.poll() is None

    leaks = leaks_between(before, take_snapshot(watched))

    assert any(leak.startswith("namespaces: net:[") for leak in leaks)


def test_the_context_manager_fails_with_the_list(tmp_path: Path) -> None:
    def leak() -> None:
        with no_leaks(Watched(directories=(tmp_path,)), deadline_s=0.05):
            (tmp_path / "left").write_bytes(b"")

    with pytest.raises(AssertionError, match=r"1 left behind:\n  files: .*/left"):
        leak()


def test_an_error_of_the_block_is_not_hidden(tmp_path: Path) -> None:
    def leak_and_fail() -> None:
        with no_leaks(Watched(directories=(tmp_path,))):
            (tmp_path / "left").write_bytes(b"")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        leak_and_fail()


async def test_the_async_form_lets_the_loop_close_what_is_closing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"")
    async with no_leaks_async():
        file = path.open()
        asyncio.get_running_loop().call_later(0.05, file.close)


async def test_the_async_form_fails_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left behind"):
        async with no_leaks_async(Watched(directories=(tmp_path,)), deadline_s=0.05):
            (tmp_path / "left").write_bytes(b"")
