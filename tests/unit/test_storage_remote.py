"""What the loader is told of layers, and what is remembered of what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.core.errors import CapacityError, HostError, StorageError
from dsec.storage import remote
from dsec.storage.layers import LayerKind, LayerRecord, LayerStore, RemoteBlob
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.places import Location
from dsec.wire.loader import (
    AddAnswer,
    AddArgs,
    HelloAnswer,
    LayerStats,
    LoaderOp,
    SourceArgs,
    SourceChange,
    StatsAnswer,
    StoreFailure,
)

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


class Blocky(TalkedTo):
    """A loader that can make block devices, or says so."""

    def __init__(self, *, blocks: bool = True, fails: Exception | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        self.fails = fails
        self.added: list[AddArgs] = []

    def hello(self) -> HelloAnswer:
        return HelloAnswer(version=1, pid=1, resends=True, front="fuse", blocks=self.blocks)

    def request(self, op: LoaderOp, args: Any, answer: type, *, start: bool = True) -> Any:
        if op is not LoaderOp.ADD:
            return super().request(op, args, answer, start=start)
        self.added.append(args)
        if args.block and self.fails is not None:
            raise self.fails
        return AddAnswer("/dev/null" if args.block else "/dev/zero")


class Still:
    def location(self, path: str) -> Location:
        return Location(path=f"/store/{path}")


@pytest.mark.parametrize(
    ("asked", "blocks", "fails", "wanted", "said"),
    [
        (True, True, None, True, [True]),
        (False, True, None, True, [False]),
        (True, False, None, True, [False]),  # a loader that cannot
        (True, True, None, False, [False]),  # a node that does not want any
        (True, True, HostError("no queue"), True, [True, False]),
        (True, True, CapacityError("256 already"), True, [True, False]),
    ],
)
def test_a_layer_becomes_a_block_device_where_that_works_and_a_file_elsewhere(
    layers: LayerStore,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
    blocks: bool,
    fails: Exception | None,
    wanted: bool,
    said: list[bool],
) -> None:
    monkeypatch.setattr(remote, "open_place", lambda url: Still())
    monkeypatch.setattr(RemoteLayers, "_prefetch_trace", lambda *_: None)
    loader = Blocky(blocks=blocks, fails=fails)
    served = RemoteLayers(loader, blocks=wanted)  # type: ignore[arg-type]
    layer = replace(layers.get(DIGESTS[2]), index=Path("/index"))

    path = served.serve(layer, block=asked)

    assert path == ("/dev/null" if said == [True] else "/dev/zero")
    assert [args.block for args in loader.added] == said
    assert served.serve(layer, block=asked) == path
    assert len(loader.added) == len(said)  # once
    assert served.serve(layer, block=not asked) in ("/dev/null", "/dev/zero")
    assert len(loader.added) > len(said)  # who asks for the other is not given this one


def test_who_asks_for_no_device_says_what_an_older_loader_understands() -> None:
    source = SourceArgs(path="/data")
    args = AddArgs(digest=DIGESTS[0], index="/index", chunk_size=1, size=1, source=source)

    assert "block" not in msgspec.to_builtins(args)
    assert msgspec.convert({"version": 1, "pid": 2, "resends": True, "front": "fuse"}, HelloAnswer).blocks is False
