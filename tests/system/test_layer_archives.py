"""A single layer of an image becomes a layer of its own: above others it hides what it marks, as in the image."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.sources import tarball
from dsec.image.stack import open_layer
from dsec.image.stage import Stage
from dsec.image.worker import build_now
from dsec.storage.layers import LayerKind
from dsec.storage.mounts import mount_overlay
from dsec.wire.environments import BuildRequest, OciSource, TarSource
from tests.images import Layout, directory, gzipped, listing, member, symlink, tar_of

pytestmark = pytest.mark.root

LOWER = tar_of([
    directory("etc"), member("etc/old", b"1"), member("etc/kept", b"2"), directory("var"), member("var/x", b"3"),
    member("top", b"4"), symlink("link", "etc"),
])  # fmt: skip
UPPER = tar_of([
    directory("etc", mode=0o700), member("etc/.wh.old"), member("etc/new", b"5"), directory("var"),
    member("var/.wh..wh..opq"), member("var/y", b"6"), member(".wh.link"), member("top", b"7"), member(".wh.top"),
    member(".wh..wh.plnk"),
])  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


def build(store: EnvironmentStore, name: str, source: TarSource | OciSource) -> None:
    build_now(store, BuildRequest(name=name, source=source), lambda event: None)


def shown(store: EnvironmentStore, *names: str) -> dict[str, str]:
    """What a sandbox of these would see."""
    layers = store.resolve(Environment(names[0], toolkits=names[1:])).layers
    if any(layer.kind is not LayerKind.EROFS for layer in layers):
        pytest.skip("this host makes no EROFS images")
    with ExitStack() as opened:
        lowers = [open_layer(layer) for layer in reversed(layers)]
        tops = [mount_overlay(lowers)] if len(lowers) > 1 else []
        for fd in (*lowers, *tops):
            opened.callback(os.close, fd)
        return listing(Path(f"/proc/self/fd/{(tops or lowers)[0]}"))


def test_it_hides_what_it_hides_in_its_image(store: EnvironmentStore, tmp_path: Path) -> None:
    (tmp_path / "lower.tar").write_bytes(LOWER)
    (tmp_path / "upper.tar.gz").write_bytes(gzipped(UPPER))
    layout = Layout(tmp_path / "layout")
    layout.image([LOWER, UPPER])

    build(store, "lower", TarSource(str(tmp_path / "lower.tar")))
    build(store, "upper", TarSource(str(tmp_path / "upper.tar.gz"), layer=True))
    build(store, "image", OciSource(str(tmp_path / "layout")))

    found = shown(store, "lower", "upper")
    assert found == {
        "etc": "/", "etc/kept": "2", "etc/new": "5", "var": "/", "var/y": "6", "top": "7",
    }  # fmt: skip
    assert shown(store, "image") == found


def test_without_being_told_so_an_archive_is_taken_as_it_is(store: EnvironmentStore, tmp_path: Path) -> None:
    (tmp_path / "upper.tar").write_bytes(UPPER)
    build(store, "plain", TarSource(str(tmp_path / "upper.tar")))
    build(store, "layer", TarSource(str(tmp_path / "upper.tar"), layer=True))

    assert shown(store, "plain")[".wh.link"] == ""
    assert store.get("plain").layers != store.get("layer").layers


@pytest.mark.parametrize(
    "members",
    [
        [member(".wh...")],
        [member("a/.wh..")],
        [member(".wh.")],
        [member(".wh..wh..opq")],
        [symlink("out", "/etc"), member("../.wh.passwd")],
    ],
)
def test_marks_that_mean_harm_are_refused(tmp_path: Path, members: list[tuple[object, bytes]]) -> None:
    (tmp_path / "layer.tar").write_bytes(tar_of(members))

    with Stage(tmp_path / "tree") as stage, pytest.raises(InvalidArgumentError):
        tarball.fill(TarSource(str(tmp_path / "layer.tar"), layer=True), stage)


def test_a_mark_behind_a_link_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("kept")
    (tmp_path / "layer.tar").write_bytes(
        tar_of([symlink("out", str(tmp_path / "outside")), member("out/.wh.file"), member("up/.wh..wh..opq")])
    )
    with Stage(tmp_path / "tree") as stage:
        try:
            tarball.fill(TarSource(str(tmp_path / "layer.tar"), layer=True), stage)
            stage.finish()
        except DsecError:
            pass

    assert (tmp_path / "outside/file").read_text() == "kept"
