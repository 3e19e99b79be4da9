"""What the loader is told of layers, and what is remembered of what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.core.errors import StorageError
from dsec.storage import remote
from dsec.storage.layers import LayerKind, LayerRecord, LayerStore, RemoteBlob
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.places import Location
from dsec.wire.loader import LayerStats, LoaderOp, SourceChange, StatsAnswer, StoreFailure

DIGESTS = ("1" * 64, "2" * 64, "3" * 64)
STATS = LayerStats(
    digest=DIGESTS[0], size=1, chunk_size=1, chunks=1, present=0, touched=0, waiting=0, read_bytes=0, fetched_bytes=0,
    fetches=0, hits=0, misses=0, errors=0, corrupt=0, evicted_bytes=0, held_bytes=0,
)  # fmt: skip


class TalkedTo:
    """A loader that says what it is told to say."""

    def __init__(self) -> None:
        self.stats = [STATS]
        self.changes: list[SourceChange] = []

    def is_running(self) -> bool:
        return True

    def request(self, op: LoaderOp, args: Any, answer: type, *, start: bool = True) -> Any:
        if op is LoaderOp.SOURCE:
            self.changes.append(args)
            return {}
        return StatsAnswer(self.stats, 0, 0)


class Moving:
    """A store whose URLs are good for a while."""

    asked = 0

    def location(self, path: str) -> Location:
        if DIGESTS[0] in path:
            raise StorageError("no credentials")
        self.asked += 1
        return Location(url=f"http://127.0.0.1/{self.asked}", expires_at=1e12)


@pytest.fixture
def loader() -> TalkedTo:
    return TalkedTo()


@pytest.fixture
def layers(tmp_path: Path) -> LayerStore:
    layers = LayerStore(tmp_path)
    for digest in DIGESTS:
        with layers.staging() as work:
            (work / "layer").mkdir()
            (work / "layer" / "meta.erofs").touch()
            url = "file:///store" if digest == DIGESTS[2] else "http://store"
            blob = RemoteBlob(store=url, size=1, chunk_size=1, stored=1)
            record = LayerRecord(
                digest=digest, kind=LayerKind.EROFS, size_bytes=1, entries=1, created_at=1.0, remote=blob
            )
            layers.publish(work / "layer", record)
    return layers


def test_a_failure_is_told_to_all_until_the_store_gives_again(loader: TalkedTo) -> None:
    layers = RemoteLayers(loader)  # type: ignore[arg-type]
    failure = StoreFailure("gone", "404")
    loader.stats = [msgspec.structs.replace(STATS, error=failure)]  # the loader says so once

    assert layers.stats_of(DIGESTS[0]).error == failure
    loader.stats = [STATS]
    assert [layers.stats_of(DIGESTS[0]).error for _ in range(2)] == [failure, failure]
    loader.stats = [msgspec.structs.replace(STATS, fetches=1)]
    assert layers.stats_of(DIGESTS[0]).error is None


def test_sources_are_told_anew_and_one_that_fails_does_not_keep_back_others(
    loader: TalkedTo, layers: LayerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = remote.open_place
    moving = Moving()
    monkeypatch.setattr(remote, "open_place", lambda url: moving if url == "http://store" else real(url))

    RemoteLayers(loader).renew(layers)  # type: ignore[arg-type]

    (change,) = loader.changes
    assert (change.digest, change.source.url) == (DIGESTS[1], "http://127.0.0.1/1")
    assert change.source.addresses == ("127.0.0.1:80",)


def test_a_layer_that_has_come_back_is_not_forgotten(loader: TalkedTo) -> None:
    removed: list[str] = []
    others = loader.request

    def request(op: LoaderOp, args: Any, answer: type, *, start: bool = True) -> Any:
        if op is LoaderOp.REMOVE:
            removed.append(args.digest)
            return {}
        return others(op, args, answer)

    loader.request = request  # type: ignore[method-assign]
    layers = RemoteLayers(loader)  # type: ignore[arg-type]

    layers.forget(DIGESTS[0], unless=lambda digest: digest == DIGESTS[0])
    layers.forget(DIGESTS[1], unless=lambda digest: digest == DIGESTS[0])

    assert removed == [DIGESTS[1]]
