"""A staged tree becomes a layer that hides what it should of the layers below it."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec.image.erofs import Verdict
from dsec.image.make import make_layer
from dsec.image.scan import is_whiteout, kept_xattrs, tree_digest, walk
from dsec.image.stack import open_layer
from dsec.image.stage import Attributes, Stage
from dsec.storage.layers import LayerKind, LayerStore
from dsec.storage.mounts import mount_erofs, mount_overlay

pytestmark = pytest.mark.root


def staged(tree: Path) -> None:
    with Stage(tree) as stage:
        stage.directory(b"etc", Attributes(0o755))
        stage.file(b"etc/new", Attributes(0o644, mtime_ns=5), io.BytesIO(b"text"))
        stage.whiteout(b"etc/old")
        stage.opaque(b"srv/data")
        stage.finish()


def test_whiteouts_and_opaque_directories_are_in_the_layer(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "state")
    with layers.staging() as work:
        staged(work / "tree")
        with make_layer(layers, work / "tree", work, lambda event: None) as held:
            layer = layers.get(held.digests[0])
    if layer.kind is LayerKind.DIRECTORY:
        top = os.open(layer.meta, os.O_RDONLY | os.O_DIRECTORY)
    else:
        top = mount_erofs(layer.meta, layer.blob)
    try:
        assert is_whiteout(os.stat("etc/old", dir_fd=top, follow_symlinks=False))
        data = os.open("srv/data", os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)
        assert kept_xattrs(data) == {b"trusted.overlay.opaque": b"y"}
        os.close(data)
    finally:
        os.close(top)


def test_what_a_layer_hides_is_part_of_its_digest(tmp_path: Path) -> None:
    digests = set()
    for name in ("both", "no-whiteout", "not-opaque"):
        with Stage(tmp_path / name) as stage:
            stage.directory(b"srv", Attributes(0o755))
            if name != "no-whiteout":
                stage.whiteout(b"srv/old")
            if name != "not-opaque":
                stage.opaque(b"srv")
            stage.finish()
        fd = os.open(tmp_path / name, os.O_RDONLY)
        digests.add(tree_digest(fd).digest)
        os.close(fd)

    assert len(digests) == 3


def test_the_same_tree_is_one_layer_made_once(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "state")
    stages: list[str] = []
    found = []
    for _ in range(2):
        with layers.staging() as work:
            staged(work / "tree")
            with make_layer(layers, work / "tree", work, lambda event: stages.append(event.stage or "")) as held:
                found.append(held.digests)

    assert found[0] == found[1]
    assert layers.digests() == list(found[0])
    assert stages.count("publish") == 1


@pytest.mark.parametrize("usable", [True, False], ids=["erofs", "directory"])
def test_whiteouts_show_nowhere_also_where_there_is_nothing_to_hide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    layers = LayerStore(tmp_path / "state")
    if not usable:
        monkeypatch.setattr("dsec.image.erofs.probe_erofs", lambda store: Verdict(False, "not here"))
    with ExitStack() as opened:
        tops = []
        for name in ("lower", "upper"):
            work = opened.enter_context(layers.staging())
            with Stage(work / "tree") as stage:
                stage.file(name.encode() + b"/file", Attributes(0o644), io.BytesIO(b"x"))
                stage.whiteout(name.encode() + b"/gone")
                stage.finish()
            held = opened.enter_context(make_layer(layers, work / "tree", work, lambda event: None))
            tops.insert(0, open_layer(layers.get(held.digests[0])))
            opened.callback(os.close, tops[0])
        top = mount_overlay(tops)
        opened.callback(os.close, top)

        assert [entry.path for entry in walk(top)] == [b"", b"lower", b"lower/file", b"upper", b"upper/file"]
