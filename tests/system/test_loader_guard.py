"""Who waits for a chunk: whatever part of the loader dies, waiting readers get what is right and never zeros."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dsec.core.errors import DsecError
from dsec.storage.loader import Loader
from dsec.storage.mounts import mount_erofs
from dsec.storage.remote import RemoteLayers
from dsec.wire.loader import EvictAnswer, EvictArgs, LoaderOp
from tests.system.loader_site import (
    DEADLINE_S,
    FILES,
    Site,
    content,
    drop_page_cache,
    made_site,
    processes,
    read,
    until,
)

pytestmark = pytest.mark.root

_READ = """
import hashlib, os, sys
try:
    with open(f"/proc/self/fd/{sys.argv[1]}/file{sys.argv[2]}", "rb") as file:
        print(hashlib.sha256(file.read()).hexdigest())
except OSError as error:
    print("errno", error.errno)
"""


@pytest.fixture(params=["fuse", "fanotify"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with made_site(tmp_path, request.param) as site:
        yield site


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Site]:
    with made_site(tmp_path, "fanotify") as site:
        yield site


def root_of(site: Site) -> Path:
    return site.layers.state.parent


def digest_of(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


@contextmanager
def mounted(site: Site) -> Iterator[int]:
    top = site.mount()
    try:
        yield top
    finally:
        os.close(top)


@contextmanager
def waiting_reader(site: Site, top: int, number: int) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for a file of a store that has gone, which comes back when the block says so."""
    words = [sys.executable, "-c", _READ, str(top), str(number)]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, pass_fds=[top])
    try:
        until(lambda: site.remote.stats_of(site.digest).waiting > 0)
        yield reader
    finally:
        reader.kill()
        reader.communicate(timeout=DEADLINE_S)


def begin(top: int, number: int) -> bytes:
    fd = os.open(f"file{number}", os.O_RDONLY, dir_fd=top)
    try:
        return os.pread(fd, 4096, 0)
    finally:
        os.close(fd)


def said(reader: subprocess.Popen[str]) -> str:
    return reader.communicate(timeout=2 * DEADLINE_S)[0].strip()


@contextmanager
def without_store(site: Site) -> Iterator[None]:
    away = site.data.with_name("away")
    site.data.rename(away)
    try:
        yield
    finally:
        away.rename(site.data)


def test_a_reader_that_waits_is_answered_by_the_next_worker(site: Site) -> None:
    if not site.loader.hello().resends:
        pytest.skip("this kernel does not ask again what a dead worker was asked")
    assert site.loader.hello().front == site.front
    with mounted(site) as top:
        with without_store(site):
            with_reader = waiting_reader(site, top, 3)
            reader = with_reader.__enter__()
            os.kill(site.loader.hello().pid, signal.SIGKILL)
        try:
            assert said(reader) == digest_of(3)
            assert read(top, 4) == content(4)
        finally:
            with_reader.__exit__(None, None, None)


def test_a_reader_that_waits_can_be_killed_and_holds_up_nobody(site: Site) -> None:
    with mounted(site) as top:
        assert begin(top, 5) == content(5)[:4096]
        with without_store(site), waiting_reader(site, top, 1) as reader:
            drop_page_cache()
            assert begin(top, 5) == content(5)[:4096]
            reader.kill()
            assert reader.wait(DEADLINE_S) == -signal.SIGKILL
        until(lambda: site.remote.stats_of(site.digest).waiting == 0)
        assert read(top, 1) == content(1)


def test_readers_wait_for_others_when_supervisor_and_worker_have_died(guarded: Site) -> None:
    with mounted(guarded) as top:
        with without_store(guarded):
            with_reader = waiting_reader(guarded, top, 2)
            reader = with_reader.__enter__()
            worker = guarded.loader.hello().pid
            os.kill(int((root_of(guarded) / "run" / "loader.pid").read_text()), signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
        try:
            assert said(reader) == digest_of(2)
            assert guarded.loader.hello().pid != worker
            assert read(top, 6) == content(6)
        finally:
            with_reader.__exit__(None, None, None)


def test_the_keeper_is_followed_by_another_which_keeps_as_well(guarded: Site) -> None:
    with mounted(guarded) as top:
        root = root_of(guarded)
        (keeper,) = processes(root, "--keep")
        os.kill(keeper, signal.SIGKILL)
        until(lambda: processes(root, "--keep") not in ([], [keeper]))
        until(lambda: (root / "run" / "loader.keep").read_text().split()[:1] == [str(processes(root, "--keep")[0])])
        worker = guarded.loader.hello().pid
        os.kill(int((root / "run" / "loader.pid").read_text()), signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]


@pytest.mark.parametrize("survivor", ["supervisor", "worker", "keeper"])
def test_who_waits_is_answered_whichever_two_of_the_three_die(guarded: Site, survivor: str) -> None:
    with mounted(guarded) as top:
        with without_store(guarded):
            with_reader = waiting_reader(guarded, top, 2)
            reader = with_reader.__enter__()
            found = holders(guarded)
            assert len(found) == 3
            for name, pid in found.items():
                if name != survivor:
                    os.kill(pid, signal.SIGKILL)
        try:
            assert said(reader) == digest_of(2)
            assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]
        finally:
            with_reader.__exit__(None, None, None)
        assert len(holders(guarded)) == (2 if survivor == "worker" else 3)


def holders(site: Site) -> dict[str, int]:
    """The processes that have the group, once worker and keeper have it: a supervisor follows a worker that dies, and
    none one that lives."""
    root = root_of(site)
    found: dict[str, int] = {}

    def are_there() -> bool:
        found.clear()
        with suppress(DsecError, OSError, ValueError, IndexError):
            found["worker"] = site.loader.hello().pid
            (found["keeper"],) = processes(root, "--keep")
            if (root / "run" / "loader.keep").read_text().split()[0] != str(found["keeper"]):
                return False
            found.update(("supervisor", pid) for pid in processes(root, "--supervise"))
            return all(_has_group(pid) for pid in found.values())
        return False

    until(are_there)
    return found


def _has_group(pid: int) -> bool:
    links = (link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return any(os.fspath(link.readlink()) == "anon_inode:[fanotify]" for link in links)


def test_when_all_of_a_loader_by_fuse_is_killed_at_once_nothing_wrong_is_read(tmp_path: Path) -> None:
    """What `dsec doctor` names instead of fanotify, of which this is not true."""
    with made_site(tmp_path, "fuse") as site, mounted(site) as top:
        assert begin(top, 0) == content(0)[:4096]
        for pid in processes(root_of(site)):
            os.kill(pid, signal.SIGKILL)
        until(lambda: processes(root_of(site)) == [])
        drop_page_cache()

        outcomes = {_outcome(top, number) for number in range(FILES)}
        assert outcomes <= {"right", "EIO"}
        assert "EIO" in outcomes
        with mounted(site) as again:
            assert [read(again, number) for number in range(FILES)] == [content(number) for number in range(FILES)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_all_but_one_at_any_moment_show_no_zeros(guarded: Site, rng: random.Random) -> None:
    """Each turn begins with an empty cache, when all have the group, and one of them outlives it."""
    for _ in range(25):
        guarded.remote.forget(guarded.digest)
        guarded.forget_everything()
        with mounted(guarded) as top, ThreadPoolExecutor(FILES) as pool:
            assert guarded.remote.stats_of(guarded.digest).present == 0
            alive = holders(guarded)
            outcomes = [pool.submit(_outcome, top, number) for number in range(FILES)]
            for name in rng.sample(sorted(alive), rng.randint(1, len(alive) - 1)):
                time.sleep(rng.uniform(0.0, 0.02))
                with suppress(ProcessLookupError):
                    os.kill(alive[name], signal.SIGKILL)
            assert {outcome.result(2 * DEADLINE_S) for outcome in outcomes} <= {"right", "EIO"}
            holders(guarded)
            assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]


def test_a_layer_that_is_whole_needs_nobody(guarded: Site) -> None:
    with mounted(guarded) as top:
        guarded.remote.prefetch(guarded.digest)
        until(lambda: guarded.remote.stats_of(guarded.digest).present == guarded.remote.stats_of(guarded.digest).chunks)
        before = guarded.remote.stats_of(guarded.digest)
        assert read(top, 0) == content(0)
        after = guarded.remote.stats_of(guarded.digest)
        assert after.hits == before.hits  # the kernel does not ask
        for pid in processes(root_of(guarded)):
            os.kill(pid, signal.SIGKILL)
        drop_page_cache()
        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]


def test_what_is_still_mounted_after_the_end_is_never_read_as_zeros(guarded: Site) -> None:
    with mounted(guarded) as top:
        assert read(top, 0) == content(0)
        guarded.loader.shutdown()
        with pytest.raises(OSError, match="Input/output"):
            read(top, FILES - 1)
        # And goes on when the layer is served again.
        with mounted(guarded):
            assert read(top, FILES - 1) == content(FILES - 1)
        guarded.loader.shutdown()
        assert processes(root_of(guarded)) == processes(root_of(guarded), "--keep") != []
    until(lambda: processes(root_of(guarded)) == [])


def test_a_cache_that_a_mount_reads_stays_whatever_the_bound(guarded: Site, tmp_path: Path) -> None:
    (tmp_path / "small" / "run").mkdir(parents=True)
    loader = Loader(tmp_path / "small" / "run", tmp_path / "small" / "cache", cache_bytes=4 << 20, front="fanotify")
    remote = RemoteLayers(loader)
    layer = guarded.attach()
    try:
        top = mount_erofs(layer.meta, Path(remote.serve(layer)))
        try:
            for number in range(FILES):
                assert read(top, number) == content(number)
            remote.forget(guarded.digest)
            assert loader.request(LoaderOp.EVICT, EvictArgs(1 << 40), EvictAnswer).freed_bytes == 0
            drop_page_cache()
            outcomes = {_outcome(top, number) for number in range(FILES)}
            assert outcomes <= {"right", "EIO"}
        finally:
            os.close(top)
        freed = 0

        def evicted() -> bool:
            nonlocal freed
            freed += loader.request(LoaderOp.EVICT, EvictArgs(1 << 40), EvictAnswer).freed_bytes
            return freed > 0

        until(evicted)
    finally:
        loader.shutdown()


def _outcome(top: int, number: int) -> str:
    try:
        return "right" if read(top, number) == content(number) else "wrong"
    except OSError:
        return "EIO"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_every_process_but_one_lose_nothing(guarded: Site) -> None:
    with mounted(guarded) as top:
        for turn in range(12):
            drop_page_cache()
            words = [sys.executable, "-c", _READ, str(top), str(turn % FILES)]
            readers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, pass_fds=[top]) for _ in range(3)]
            alive = processes(root_of(guarded))
            alive.pop(turn % len(alive))
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            for reader in readers:
                # A read in the moment between event and note is told EIO, and never zeros.
                assert said(reader) in (digest_of(turn % FILES), "errno 5")
            until(guarded.loader.is_running)
            until(lambda: len(processes(root_of(guarded))) > 1)
            until(lambda: len(processes(root_of(guarded), "--keep")) == 1)


def test_a_reader_through_a_mount_for_reading_only_is_told_and_harms_nobody(guarded: Site) -> None:
    """The kernel cannot open for us what its mount says that nobody writes."""
    path = "/" + guarded.remote.serve(guarded.attach()).partition("/root/")[2]
    worker = guarded.loader.hello().pid
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && head -c 4096 "$1" | wc -c'

    through = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", path], capture_output=True, text=True, check=False
    )

    assert (through.stdout.strip(), "error" in through.stderr) == ("0", True), through.stderr
    assert guarded.loader.hello().pid == worker
    with mounted(guarded) as top:
        assert hashlib.sha256(read(top, 0)).hexdigest() == digest_of(0)
