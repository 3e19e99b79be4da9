"""Reading on and on has chunks fetched before they are wanted; reading here and there has not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.storage.store import format
from dsec.wire.loader import LayerStats
from tests.system.loader_site import FILE_BYTES, FILES, Site, made_site, until

pytestmark = pytest.mark.root

_CHUNKS_READ = 4


@pytest.fixture(params=["fuse", "fanotify"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with made_site(tmp_path, request.param) as site:
        yield site


def stats(site: Site) -> LayerStats:
    return site.remote.stats_of(site.digest)


def settled(site: Site) -> LayerStats:
    """Once nothing is under way: what is present stays what it is."""
    seen: list[int] = []

    def still() -> bool:
        seen.append(stats(site).present)
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    until(still)
    return stats(site)


def test_who_reads_on_has_more_fetched_than_wanted_so_far(site: Site) -> None:
    top = site.mount()
    try:
        fd = os.open("file1", os.O_RDONLY, dir_fd=top)
        with os.fdopen(fd, "rb", buffering=0) as file:
            for _ in range(_CHUNKS_READ * format.CHUNK_BYTES // (64 << 10)):
                assert len(file.read(64 << 10)) == 64 << 10
        until(lambda: stats(site).present > stats(site).touched)
        assert settled(site).present - stats(site).touched >= 2
    finally:
        os.close(top)


def test_who_reads_here_and_there_has_little_more_fetched_than_wanted(site: Site) -> None:
    top = site.mount()
    try:
        for number in range(FILES - 1, -1, -1):  # backwards, so that none follows another
            fd = os.open(f"file{number}", os.O_RDONLY, dir_fd=top)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                assert len(os.pread(fd, 4096, FILE_BYTES // 2)) == 4096
            finally:
                os.close(fd)
        found = settled(site)
        assert found.touched >= FILES
        assert found.present <= found.touched + 2
        assert found.present < found.chunks // 4
    finally:
        os.close(top)
