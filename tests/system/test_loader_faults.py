"""Parts of the loader die, stores hang, and what is asked of it changes: readers get what is right, or EIO in time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import UnavailableError
from dsec.storage.loader import Loader
from dsec.storage.mounts import mount_erofs
from dsec.storage.store import format
from dsec.wire.loader import AddAnswer, AddArgs, LoaderOp, SourceArgs, SourceChange
from tests.system.loader_site import DEADLINE_S, FILES, Site, content, drop_page_cache, made_site, read, until

pytestmark = pytest.mark.root


@pytest.fixture(params=["fuse", "fanotify"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with made_site(tmp_path, request.param) as site:
        yield site


def supervisor(site: Site) -> int:
    return int((site.layers.state.parent / "run" / "loader.pid").read_text())


def test_layers_are_mounted_also_while_the_supervisor_is_dead(site: Site) -> None:
    top = site.mount()
    os.kill(supervisor(site), signal.SIGKILL)
    try:
        assert read(top, 0) == content(0)
        again = site.mount()
        try:
            drop_page_cache()
            assert read(again, 1) == content(1)
        finally:
            os.close(again)
    finally:
        os.close(top)


def test_it_has_the_rights_that_it_needs_and_no_others(site: Site) -> None:
    needed = {0, 1, 2, 3, 4, 14, 19, 21, 24}  # files, memory that stays, who has a device open, mounts, limits
    old = site.loader.hello().pid
    os.kill(old, signal.SIGKILL)  # the next one has no more

    found = [old]

    def follows() -> bool:
        with suppress(UnavailableError):  # the dead one's connection, or the time between the two
            found[0] = site.loader.hello().pid
        return found[0] != old

    until(follows)
    for pid in (*found, supervisor(site)):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        for name in ("CapPrm", "CapEff", "CapBnd"):
            held = int(status[name], 16)
            assert {number for number in range(64) if held >> number & 1} <= needed, name
        assert status["NoNewPrivs"] == "1"
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        assert [line.split()[4:6] for line in limits if line.startswith("Max core")] == [["0", "0"]]


@pytest.mark.parametrize("site", ["fuse"], indirect=True)
def test_a_mount_that_is_taken_away_is_made_again(site: Site) -> None:
    os.close(site.mount())
    old = site.loader.hello().pid
    subprocess.run(["umount", os.fspath(site.layers.state.parent / "run" / "loader")], check=True)

    until(lambda: not Path(f"/proc/{old}").exists())
    top = site.mount()
    try:
        assert read(top, 2) == content(2)
    finally:
        os.close(top)


def test_a_worker_that_follows_reads_where_layers_are_now(site: Site) -> None:
    if not site.loader.hello().resends:
        pytest.skip("this kernel does not ask again what a dead worker was asked")
    top = site.mount()
    site.forget_everything()
    moved = site.data.with_name("moved")
    site.data.rename(moved)
    change = SourceChange(site.digest, SourceArgs(path=os.fspath(moved)))
    site.loader.request(LoaderOp.SOURCE, change, dict)

    os.kill(site.loader.hello().pid, signal.SIGKILL)
    until(site.loader.is_running)

    try:
        assert read(top, 3) == content(3)
    finally:
        os.close(top)


def test_another_image_of_the_same_layer_takes_the_place_of_the_first(site: Site, tmp_path: Path) -> None:
    os.close(site.mount())
    layer = site.attach()
    assert layer.remote is not None
    other = bytes(range(256)) * 4096
    (tmp_path / "blob").write_bytes(other)
    with (tmp_path / "data").open("xb") as data:
        cut = format.cut(tmp_path / "blob", data)
    (tmp_path / "index").write_bytes(cut.index)
    args = AddArgs(
        digest=site.digest,
        index=os.fspath(tmp_path / "index"),
        chunk_size=format.CHUNK_BYTES,
        size=len(other),
        source=SourceArgs(path=os.fspath(tmp_path / "data")),
    )
    first = Path(site.remote.serve(layer))
    with first.open("rb") as file:
        assert file.read(1 << 20) != other

    path = Path(site.loader.request(LoaderOp.ADD, args, AddAnswer).path)

    assert path.read_bytes() == other
    assert site.remote.stats_of(site.digest).size == len(other)
    back = msgspec.structs.replace(
        args, index=os.fspath(layer.index), size=layer.remote.size, source=SourceArgs(path=os.fspath(site.data))
    )
    site.loader.request(LoaderOp.ADD, back, AddAnswer)
    top = mount_erofs(layer.meta, path)
    try:
        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]
    finally:
        os.close(top)


def test_nobody_else_reads_layers_or_what_is_kept_of_them(site: Site, tmp_path: Path) -> None:
    os.close(site.mount())
    run = tmp_path / "run"
    closed = [run / "loader.active", tmp_path / "cache", *run.glob("loader.active/*"), *tmp_path.glob("cache/*")]
    assert {path.stat().st_mode & 0o077 for path in closed} == {0}
    if site.front == "fanotify":
        return
    (mounted,) = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{run}/loader " in line]
    assert "default_permissions" in mounted.split()[3].split(",")
    # Monitors of machines, which are other users, are given files; nobody else comes to them.
    assert ((run / "loader").stat().st_mode, (run / "loader" / site.digest).stat().st_mode) == (0o040500, 0o100444)


def test_what_is_asked_of_a_loader_that_does_not_run_does_not_start_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    loader = Loader(tmp_path / "run", tmp_path / "cache", cache_bytes=1 << 30)

    with pytest.raises(UnavailableError):
        loader.request(LoaderOp.STATS, {}, dict, start=False)

    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_that_hangs_in_the_kernel_ends_reads_in_time_and_is_used_again(site: Site) -> None:
    top = site.mount()
    site.forget_everything()
    away = site.data.with_name("away")
    site.data.rename(away)
    os.mkfifo(site.data)  # whoever opens it waits, as for a server of files that has gone
    began = time.monotonic()
    try:
        with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is looked at
            read(top, 1)
        assert failure.value.errno == errno.EIO
        assert time.monotonic() - began < 4 * DEADLINE_S
        error = site.remote.stats_of(site.digest).error
        assert error is not None
        assert error.cause == "unreachable"

        fifo = site.data.with_name("fifo")
        site.data.rename(fifo)
        away.rename(site.data)
        # Threads that hang in it get an end, and the store is asked again.
        os.close(os.open(fifo, os.O_RDWR))
        until(lambda: _reads(top, 1))
    finally:
        os.close(top)


def _reads(top: int, number: int) -> bool:
    try:
        return read(top, number) == content(number)
    except OSError:
        return False
