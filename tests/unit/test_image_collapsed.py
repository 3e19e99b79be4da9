"""Which layers are made one, and when the one is used instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dsec.core import limits
from dsec.core.spec import Environment
from dsec.image.collapse import collapse_now, plan_runs
from dsec.image.collapsed import Run
from dsec.image.environments import EnvironmentStore
from dsec.image.inventory import get_layer
from dsec.image.scan import tree_digest
from dsec.image.stack import open_layer
from dsec.image.worker import build_now
from dsec.storage.mounts import mount_overlay
from dsec.wire.environments import BuildEvent, BuildRequest, EnvironmentInfo, OciSource
from dsec.wire.layers import CollapseRequest
from tests.images import Layout, directory, member, tar_of

LAYERS = 20


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


def build(
    store: EnvironmentStore, path: Path, *, last: bytes = b"", name: str = "tall", replace: bool = False
) -> EnvironmentInfo:
    """Of many layers, each of which hides a file of the one below it."""
    layout = Layout(path)
    layers = [tar_of([directory("d"), *(member(f"d/{n}", b"x") for n in range(LAYERS))])]
    for number in range(1, LAYERS):
        mine = [member(f"d/.wh.{number - 1}"), member(f"e/{number}", b"y" * number)]
        layers.append(tar_of(mine + ([member("last", last)] if number == LAYERS - 1 else [])))
    layout.image(layers)
    request = BuildRequest(name=name, source=OciSource(str(path)), replace=replace)
    return build_now(store, request, lambda event: None)


@contextmanager
def tree(store: EnvironmentStore, digests: tuple[str, ...]) -> Iterator[str]:
    with ExitStack() as closing:
        tops = [open_layer(store.layers.get(digest)) for digest in reversed(digests)]
        tops.append(mount_overlay(tops))
        for top in tops:
            closing.callback(os.close, top)
        yield tree_digest(tops[-1]).digest


def shown(store: EnvironmentStore, digests: tuple[str, ...]) -> str:
    with tree(store, digests) as digest:
        return digest


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([0] * limits.COLLAPSE_ABOVE, []),
        ([0] * 20, [(0, 12)]),
        ([0] * 61, [(0, 53)]),
        ([0, None, *[0] * 18], [(2, 12)]),
        ([None] * 20, []),
        ([1, 1, 1, 9, 1, 1, 20, 1, 1, *[1] * 11], [(0, 3), (4, 6), (7, 12)]),
        ([4] * 24, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16)]),
    ],
)
def test_runs_are_of_local_layers_up_to_a_size(sizes: list[int | None], runs: list[tuple[int, int]]) -> None:
    assert plan_runs(sizes, bytes_max=9) == runs


@pytest.mark.root
def test_a_collapsed_run_is_used_and_shows_the_same(store: EnvironmentStore, tmp_path: Path) -> None:
    info = build(store, tmp_path / "one")
    before = store.resolve(Environment("tall")).digests()
    assert before == info.layers
    events: list[BuildEvent] = []

    collapse_now(store, CollapseRequest(name="tall"), events.append)

    after = store.resolve(Environment("tall")).digests()
    assert len(after) == 1 + limits.COLLAPSE_KEPT
    assert after[1:] == before[-limits.COLLAPSE_KEPT :]
    assert shown(store, after) == shown(store, before)
    assert store.get("tall").layers == before  # what it is made of has not changed
    assert store.resolve(Environment("tall"), collapsed=False).digests() == before
    assert get_layer(store, after[0]).collapsed == before[: -limits.COLLAPSE_KEPT]
    made = len([event for event in events if event.stage == "collapse"])
    collapse_now(store, CollapseRequest(name="tall"), events.append)
    assert len([event for event in events if event.stage == "collapse"]) == made == 1


@pytest.mark.root
def test_another_top_layer_uses_the_same_run(store: EnvironmentStore, tmp_path: Path) -> None:
    build(store, tmp_path / "one")
    collapse_now(store, CollapseRequest(name="tall"), lambda event: None)
    run = store.resolve(Environment("tall")).digests()[0]

    second = build(store, tmp_path / "two", last=b"changed", name="second")

    shorter = store.resolve(Environment("second")).digests()
    assert shorter[0] == run
    assert shown(store, shorter) == shown(store, second.layers)


@pytest.mark.root
def test_a_run_goes_with_the_last_that_has_its_layers(store: EnvironmentStore, tmp_path: Path) -> None:
    build(store, tmp_path / "one")
    collapse_now(store, CollapseRequest(name="tall"), lambda event: None)
    run = store.resolve(Environment("tall")).digests()[0]
    build(store, tmp_path / "two", last=b"changed", name="second")

    store.remove("tall")
    assert store.collect() == ()
    assert store.layers.has(run)
    with store.layers.lease([run]):  # a sandbox
        store.remove("second")
        assert store.layers.has(run)
    assert store.collect() == (run,)

    assert store.layers.digests() == []
    assert list((store.state / "collapsed").iterdir()) == []


def test_a_run_is_no_use_where_others_lie_below_or_its_layer_is_lost(store: EnvironmentStore) -> None:
    digests = tuple(f"{number:064x}" for number in range(20))
    store.runs.put(Run(layers=digests[:5], start=0, layer="f" * 64))

    assert store.runs.shorten(digests) == digests  # lost
    assert store.runs.find(digests[:5], 0) is None
    assert store.runs.shorten(digests[1:]) == digests[1:]


def test_a_damaged_run_is_none(store: EnvironmentStore) -> None:
    (store.state / "collapsed" / "x.json").write_text("{")

    assert store.runs.all() == ()
