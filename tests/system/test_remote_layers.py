"""Layers of a store are mounted at once and read chunk by chunk: what fails on the way never shows as content."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dsec.core.errors import NotFoundError, StorageError, UnavailableError
from dsec.storage.loader import Loader
from dsec.storage.mounts import mount_erofs
from dsec.storage.remote import RemoteLayers
from dsec.storage.store import format
from dsec.storage.store.publish import attach_layer, read_trace
from tests.system.loader_site import (
    DEADLINE_S,
    FILE_BYTES,
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


@pytest.fixture(params=["fuse", "fanotify"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with made_site(tmp_path, request.param) as site:
        yield site


def test_only_what_is_read_is_fetched_and_it_is_right(site: Site) -> None:
    top = site.mount()
    try:
        before = site.remote.stats_of(site.digest)
        assert read(top, 3) == content(3)
        stats = site.remote.stats_of(site.digest)
        assert before.fetched_bytes < stats.fetched_bytes < stats.size // 2
        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]
    finally:
        os.close(top)
    assert site.layers.record(site.digest).size_bytes < FILE_BYTES


def test_a_trace_is_fetched_before_anybody_asks(site: Site) -> None:
    top = site.mount()
    read(top, 5)
    os.close(top)
    recorded = site.remote.record_trace(site.attach())
    site.remote.forget(site.digest)
    site.forget_everything()

    site.remote.serve(site.attach())

    assert len(read_trace(site.store, site.digest, format.CHUNK_BYTES)) == recorded > 0
    until(lambda: site.remote.stats_of(site.digest).present >= recorded)
    assert site.remote.stats_of(site.digest).misses == 0


def pid_of_worker(site: Site) -> int:
    """A request is repeated once by itself; two workers may have been killed under it."""
    found: list[int] = []

    def asked() -> bool:
        with suppress(UnavailableError):
            found.append(site.loader.hello().pid)
        return bool(found)

    until(asked)
    return found[0]


def test_kill_9_of_the_worker_under_reads_loses_nothing(site: Site) -> None:
    top = site.mount()
    wrong: list[int] = []

    def reader(number: int) -> None:
        for _ in range(4):
            drop_page_cache()
            if read_again(number) != content(number):
                wrong.append(number)

    def read_again(number: int) -> bytes:
        """By fanotify a read that was not noted yet fails with its worker (docs/internals/loader.md)."""
        for _ in range(100):
            try:
                return read(top, number)
            except OSError as error:
                if site.front != "fanotify" or error.errno != errno.EIO:
                    raise
        raise AssertionError("each of a hundred reads has failed")

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(FILES)]
    if not site.loader.hello().resends:
        pytest.skip("this kernel does not ask again what a dead worker was asked")
    try:
        for thread in threads:
            thread.start()
        for _ in range(3):
            os.kill(pid_of_worker(site), signal.SIGKILL)
            until(site.loader.is_running)
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    finally:
        os.close(top)
    assert wrong == []


def test_a_chunk_that_was_changed_in_the_store_is_an_error_and_never_content(site: Site) -> None:
    original = site.data.read_bytes()
    site.data.write_bytes(original[: len(original) // 2] + bytes(len(original) - len(original) // 2))
    top = site.mount()
    site.remote.loader.hello()
    try:
        outcomes = set()
        for number in (0, FILES - 1):
            try:
                outcomes.add(read(top, number) == content(number))
            except OSError as error:
                outcomes.add(error.errno == 5)
        assert outcomes == {True}
        assert site.remote.stats_of(site.digest).corrupt > 0

        site.data.write_bytes(original)
        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]
    finally:
        os.close(top)


def test_a_cache_that_was_damaged_while_nobody_ran_is_found_out(site: Site) -> None:
    top = site.mount()
    read(top, 2)
    os.close(top)
    root = site.data.parent.parent.parent.parent
    cached = next((root / "cache").glob("*/data"))
    # Whoever writes a guarded file waits for a worker too.
    for pid in processes(root) if site.front == "fanotify" else [site.loader.hello().pid]:
        os.kill(pid, signal.SIGKILL)
    with cached.open("r+b") as file:
        file.write(b"\xff" * (4 << 20))
    if site.front == "fuse":
        until(site.loader.is_running)
    drop_page_cache()

    top = site.mount()
    try:
        assert [read(top, number) for number in range(FILES)] == [content(number) for number in range(FILES)]
    finally:
        os.close(top)


def test_a_store_that_goes_away_and_comes_back_is_waited_for(site: Site) -> None:
    top = site.mount()
    site.forget_everything()
    away = site.data.with_name("away")
    site.data.rename(away)
    threading.Timer(1.5, lambda: away.rename(site.data)).start()
    try:
        assert read(top, 1) == content(1)
    finally:
        os.close(top)
    assert site.remote.stats_of(site.digest).waiting == 0


@pytest.mark.parametrize("site", ["fuse"], indirect=True)
def test_the_cache_keeps_within_its_bound(site: Site, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    loader = Loader(tmp_path / "small", tmp_path / "small-cache", cache_bytes=4 << 20)
    remote = RemoteLayers(loader)
    layer = site.attach()
    try:
        top = mount_erofs(layer.meta, Path(remote.serve(layer)))
        for number in range(FILES):
            assert read(top, number) == content(number)
        os.close(top)
        until(lambda: remote.stats().cache_bytes <= 4 << 20)  # runs of chunks that are under way come on top
        assert remote.stats().layers[0].evicted_bytes > 0
    finally:
        loader.shutdown()


def test_a_layer_that_a_store_lacks_or_garbles_is_not_attached(site: Site) -> None:
    with pytest.raises(NotFoundError):
        attach_layer(site.layers, "ab" * 32, site.store)
    for kind in ("meta", "index"):
        (name,) = site.store.names(kind)
        good = site.store.get(name)
        site.store.put(name, good[:-1])
        with pytest.raises(StorageError):
            site.attach()
        site.store.put(name, good)

    assert site.layers.digests() == []
    assert site.attach().digest == site.digest
    assert site.layers.record(site.digest).origin == site.store.url
