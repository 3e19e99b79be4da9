"""Environments go into a store layers first and record last, and come out of it as they went in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.core.errors import (
    ConflictError,
    DsecError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from dsec.core.spec import Environment
from dsec.image.build import build, push
from dsec.image.compose import compose
from dsec.image.environments import EnvironmentStore, environment_info
from dsec.image.published import ImageRecord, image_path, push_now
from dsec.image.records import BuildRecord, EnvironmentRecord, ImageConfig
from dsec.image.worker import build_now
from dsec.storage.layers import LayerKind, LayerRecord
from dsec.storage.store.places import DirectoryPlace
from dsec.storage.store.publish import sealed_digest
from dsec.wire import codec
from dsec.wire.environments import BuildEvent, BuildRequest, EnvironmentInfo, PushRequest, StoreSource
from dsec.wire.layers import ComposeRequest, Composition

CONFIG = ImageConfig(env={"A": "b"}, user="1000", workdir="/srv", entrypoint=("/bin/x",), command=("y",))
LOWER, UPPER = "1" * 64, "2" * 64
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    """With the environment "tools" of two layers; what an image holds is nothing that a store looks at."""
    store = EnvironmentStore(tmp_path / "state")
    add_layer(store, LOWER, blob=os.urandom(MIB))
    add_layer(store, UPPER)
    name(store, "tools", (LOWER, UPPER))
    return store


@pytest.fixture
def place(tmp_path: Path) -> DirectoryPlace:
    return DirectoryPlace(tmp_path / "shared")


def add_layer(store: EnvironmentStore, digest: str, *, blob: bytes = b"", kind: LayerKind = LayerKind.EROFS) -> None:
    with store.layers.staging() as work:
        staged = work / "layer"
        staged.mkdir()
        if kind is LayerKind.DIRECTORY:
            (staged / "tree").mkdir()
        else:
            (staged / "meta.erofs").write_bytes(b"meta" * 100)
        if blob:
            (staged / "data.blob").write_bytes(blob)
        record = LayerRecord(digest=digest, kind=kind, size_bytes=1, entries=1, created_at=1.0)
        store.layers.publish(staged, record)


def name(store: EnvironmentStore, name: str, layers: tuple[str, ...]) -> None:
    built = BuildRecord(layers=layers, source="a test", config=CONFIG)
    info = environment_info(name, store.layers, built, created_at=5.0)
    with store.layers.publishing():
        store.put(EnvironmentRecord(build_key=name, info=info))


def push_it(store: EnvironmentStore, place: DirectoryPlace, name: str = "tools") -> list[BuildEvent]:
    events: list[BuildEvent] = []
    push_now(store, PushRequest(name=name, store=place.url), events.append)
    return events


def pull(state: Path, place: DirectoryPlace, name: str = "mine", **options: Any) -> EnvironmentInfo:
    source = StoreSource(url=place.url, environment="tools")
    request = BuildRequest(name=name, source=source, **options)
    return build_now(EnvironmentStore(state), request, lambda event: None)


def sealed(store: EnvironmentStore, *digests: str) -> tuple[str, ...]:
    """What stores call layers of this node."""
    return tuple(sealed_digest(store.layers, digest) for digest in digests)


def test_what_went_in_comes_out(store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path) -> None:
    push_it(store, place)

    info = pull(tmp_path / "other", place)

    locked = EnvironmentStore(tmp_path / "other").resolve(Environment(base="mine"))
    assert info.layers == sealed(store, LOWER, UPPER)
    assert (info.env, info.user, info.workdir, info.entrypoint, info.command) == (
        CONFIG.env, CONFIG.user, CONFIG.workdir, CONFIG.entrypoint, CONFIG.command,
    )  # fmt: skip
    assert place.url in info.source
    assert [layer.remote is not None for layer in locked.layers] == [True, False]  # the second has no data
    assert not (tmp_path / "other" / "layers" / info.layers[0] / "data.blob").exists()


def test_pushing_again_changes_nothing(store: EnvironmentStore, place: DirectoryPlace) -> None:
    push_it(store, place)
    before = {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file()}

    said = push_it(store, place)

    assert sum("there already" in event.message for event in said) == 2
    assert {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file()} == before


def test_a_change_in_the_store_is_seen_by_the_next_build(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    push_it(store, place)
    first = pull(tmp_path / "other", place)
    assert pull(tmp_path / "other", place) == first
    name(store, "tools", (UPPER,))
    push_it(store, place)

    with pytest.raises(ConflictError):
        pull(tmp_path / "other", place)

    assert pull(tmp_path / "other", place, replace=True).layers == sealed(store, UPPER)


def test_a_directory_layer_is_refused_before_anything_is_written(
    store: EnvironmentStore, place: DirectoryPlace
) -> None:
    add_layer(store, "3" * 64, kind=LayerKind.DIRECTORY)
    name(store, "plain", (LOWER, "3" * 64))

    with pytest.raises(UnsupportedError, match="as a directory"):
        push_it(store, place, "plain")

    assert not place.root.exists()


def test_what_is_not_there_is_said_to_be_so(store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a store"):
        pull(tmp_path / "other", place)
    with pytest.raises(EnvironmentNotFoundError):
        push_it(store, place, "none")
    name(store, "others", (UPPER,))
    push_it(store, place, "others")
    with pytest.raises(NotFoundError, match="has no environment 'tools'"):
        pull(tmp_path / "other", place)


GOOD = ImageRecord(name="tools", layers=(LOWER,), source="x", created_at=1.0)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"no record", StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, name="other")), StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, version=9)), StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, layers=())), StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, layers=("../x",))), InvalidArgumentError),
        (codec.to_json(msgspec.structs.replace(GOOD, layers=("4" * 64,))), NotFoundError),
        (codec.to_json(msgspec.structs.replace(GOOD, layers=(LOWER,) * 1000)), LimitError),
        (codec.to_json(msgspec.structs.replace(GOOD, config=ImageConfig(env={"A\0": "x"}))), StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, config=ImageConfig(workdir="a\0"))), StorageError),
        (codec.to_json(msgspec.structs.replace(GOOD, source="x" * (5 * MIB))), LimitError),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path, content: bytes, error: type[DsecError]
) -> None:
    push_it(store, place)
    place.put(image_path("tools"), content)

    with pytest.raises(error):
        pull(tmp_path / "other", place)

    assert EnvironmentStore(tmp_path / "other").names() == []


@pytest.mark.parametrize("step", range(8))
def test_a_push_that_fails_anywhere_names_nothing_and_can_be_repeated(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    done = 0

    def failing(real: Callable[..., None]) -> Callable[..., None]:
        def write(*args: Any) -> None:
            nonlocal done
            if done == step:
                raise StorageError("full")
            done += 1
            real(*args)

        return write

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryPlace, "put", failing(DirectoryPlace.put))
        patch.setattr(DirectoryPlace, "put_file", failing(DirectoryPlace.put_file))
        with pytest.raises(StorageError, match="full"):
            push_it(store, place)

    assert not (place.root / image_path("tools")).exists()
    assert not list((store.state / "staging").iterdir())
    push_it(store, place)
    assert pull(tmp_path / "other", place).layers == sealed(store, LOWER, UPPER)


async def test_a_push_that_is_cancelled_leaves_nothing_half_made(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    add_layer(store, "5" * 64, blob=os.urandom(48 * MIB))
    name(store, "tools", ("5" * 64,))
    request = PushRequest(name="tools", store=place.url)
    begun = asyncio.Event()

    task = asyncio.create_task(push(store, request, lambda event: begun.set() if event.stage == "push" else None))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not (place.root / image_path("tools")).exists()
    assert not list((store.state / "staging").iterdir())
    assert not (place.root / ".drafts").exists() or not list((place.root / ".drafts").iterdir())
    await push(store, request)
    source = StoreSource(url=place.url, environment="tools")
    info = await build(EnvironmentStore(tmp_path / "other"), BuildRequest(name="mine", source=source))
    assert info.layers == sealed(store, "5" * 64)


def test_drafts_of_the_dead_are_removed_and_of_the_living_are_not(place: DirectoryPlace) -> None:
    drafts = place.root / ".drafts"
    drafts.mkdir(parents=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (drafts / f"{boot}-dead").write_text("x")
    (drafts / "another-machine-live").write_text("x")
    (drafts / "another-machine-dead").write_text("x")
    os.utime(drafts / "another-machine-dead", (1.0, 1.0))

    with place._writing("meta/ab/one") as file:
        file.write(b"content")
        place.clean()

    assert place.get("meta/ab/one") == b"content"
    assert [path.name for path in drafts.iterdir()] == ["another-machine-live"]


def test_tags_and_environments_of_parts_are_pushed_as_what_they_are(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    name(store, "kit:1.4", (UPPER,))
    name(store, "under", (LOWER,))
    made = compose(store, ComposeRequest(name="task", of=Composition(base="under", toolkits=("kit:1.4",))))
    push_it(store, place, "kit:1.4")
    there = push_now(store, PushRequest(name=f"task@{made.digest}", store=place.url), lambda event: None)
    other = EnvironmentStore(tmp_path / "other")

    found = [
        build_now(other, BuildRequest(name=to, source=StoreSource(url=place.url, environment=of)), lambda event: None)
        for to, of in (("kit:1.4", "kit:1.4"), ("mine:x", "task"))
    ]

    assert [(info.name, info.layers) for info in found] == [
        ("kit:1.4", sealed(store, UPPER)),
        ("mine:x", sealed(store, LOWER, UPPER)),
    ]
    assert found[1].digest == there.digest  # the same on every node that has it from there
    assert sorted(path.relative_to(place.root / "images") for path in (place.root / "images").rglob("*.json")) == [
        Path("kit/1.4.json"), Path("task/latest.json"),
    ]  # fmt: skip
    request = BuildRequest(name="x", source=StoreSource(url=place.url, environment="kit"))
    with pytest.raises(NotFoundError):
        build_now(other, request, lambda event: None)


def test_a_record_of_a_store_from_before_there_were_tags_is_read(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    push_it(store, place)
    (place.root / image_path("tools")).rename(place.root / "images" / "tools.json")

    assert pull(tmp_path / "other", place).layers == sealed(store, LOWER, UPPER)
