"""Each layer of an image is a layer of its own, shared between images."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, InvalidArgumentError, LimitError
from dsec.image import stack
from dsec.image.environments import EnvironmentStore
from dsec.image.scan import is_whiteout, kept_xattrs, walk
from dsec.image.stack import open_layer
from dsec.image.worker import build_now
from dsec.storage.mounts import mount_overlay
from dsec.wire.environments import BuildEvent, BuildRequest, EnvironmentInfo, OciSource
from tests.images import Layout, directory, hardlink, member, symlink, tar_of

pytestmark = pytest.mark.root

BASE = tar_of([
    directory("srv", mode=0o750, uid=5, gid=6, mtime=77), member("srv/old", b"1", mtime=78), directory("srv/data"),
    member("srv/data/x", b"2"), symlink("way", "srv"), member("other", b"3"),
])  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def build(
    store: EnvironmentStore, layout: Layout, name: str, *, refresh: bool = False, events: list[BuildEvent] | None = None
) -> EnvironmentInfo:
    request = BuildRequest(name=name, source=OciSource(str(layout.root), name), refresh=refresh)
    return build_now(store, request, lambda event: events.append(event) if events is not None else None)


@contextmanager
def opened(store: EnvironmentStore, digest: str) -> Iterator[int]:
    with united(store, (digest,)) as top:
        yield top


@contextmanager
def united(store: EnvironmentStore, digests: tuple[str, ...]) -> Iterator[int]:
    with ExitStack() as closing:
        tops = [open_layer(store.layers.get(digest)) for digest in reversed(digests)]
        for top in tops:
            closing.callback(os.close, top)
        top = mount_overlay(tops)
        closing.callback(os.close, top)
        yield top


def paths(top: int) -> list[str]:
    return [os.fsdecode(entry.path) for entry in walk(top)][1:]


def read(top: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY, dir_fd=top)
    try:
        return os.read(fd, 1_000)
    finally:
        os.close(fd)


def test_images_with_the_same_lower_layers_share_them(store: EnvironmentStore, layout: Layout) -> None:
    middle = tar_of([member("srv/new", b"4")])
    layout.image([BASE, middle, tar_of([member("one", b"1")])], name="one")
    layout.image([BASE, middle, tar_of([member("two", b"2")])], name="two")
    events: list[BuildEvent] = []

    one = build(store, layout, "one")
    two = build(store, layout, "two", events=events)

    assert len(one.layers) == 3
    assert one.layers[:2] == two.layers[:2]
    assert one.layers[2] != two.layers[2]
    assert len([event for event in events if event.stage == "publish"]) == 1  # nothing was made twice
    assert len(store.layers.digests()) == 4


def test_a_layer_is_the_same_whenever_it_is_made(store: EnvironmentStore, layout: Layout) -> None:
    hides = tar_of(
        [member("srv/.wh.old"), member("srv/data/.wh..wh..opq"), member("srv/data/y"), hardlink("l", "other")]
    )
    layout.image([BASE, hides], name="a")
    first = build(store, layout, "a")
    began = time.time_ns()

    again = build(store, layout, "a", refresh=True)

    assert again.layers == first.layers
    with opened(store, first.layers[1]) as top:
        assert all(entry.info.st_mtime_ns < began for entry in walk(top))


def test_directories_that_a_layer_does_not_mention_stay_as_they_are_below(
    store: EnvironmentStore, layout: Layout
) -> None:
    layout.image([BASE, tar_of([member("way/new", b"4"), member("fresh/file", b"5")])], name="a")

    info = build(store, layout, "a")

    with opened(store, info.layers[1]) as top:
        assert paths(top) == ["fresh", "fresh/file", "srv", "srv/new"]
        srv = os.stat("srv", dir_fd=top)
        assert (stat.S_IMODE(srv.st_mode), srv.st_uid, srv.st_gid, srv.st_mtime) == (0o750, 5, 6, 77)
        # New ones hide nothing of what may lie below in another environment.
        fd = os.open("fresh", os.O_RDONLY, dir_fd=top)
        assert kept_xattrs(fd) == {}
        os.close(fd)
    with united(store, info.layers) as top:
        assert read(top, "way/new") == b"4"


def test_what_is_hidden_is_marked_and_nothing_else(store: EnvironmentStore, layout: Layout) -> None:
    hides = [
        member("srv/.wh.old"),
        member("srv/.wh.missing"),
        member("srv/data/.wh..wh..opq"),
        member("srv/data/y", b"9"),
    ]
    layout.image([BASE, tar_of(hides)], name="a")

    info = build(store, layout, "a")

    with opened(store, info.layers[1]) as top:
        assert paths(top) == ["srv", "srv/data", "srv/data/y", "srv/old"]
        assert is_whiteout(os.stat("srv/old", dir_fd=top, follow_symlinks=False))
        for path, marks in (("srv", {}), ("srv/data", {b"trusted.overlay.opaque": b"y"})):
            fd = os.open(path, os.O_RDONLY, dir_fd=top)
            assert kept_xattrs(fd) == marks
            # mkfs.erofs marks directories that hold whiteouts, so that they show nowhere.
            assert set(os.listxattr(fd)) - {"trusted.overlay.origin"} == {name.decode() for name in marks}
            os.close(fd)
    with united(store, info.layers) as top:
        assert paths(top) == ["other", "srv", "srv/data", "srv/data/y", "way"]


def test_a_layer_that_changes_nothing_is_none(store: EnvironmentStore, layout: Layout) -> None:
    layout.image([BASE, tar_of([]), tar_of([member(".wh.missing")])], name="a")

    assert len(build(store, layout, "a").layers) == 1


def test_what_becomes_of_another_kind_is_so(store: EnvironmentStore, layout: Layout) -> None:
    changes = [member("srv", b"a file"), directory("other"), member("other/in", b"1"), directory("way")]
    layout.image([BASE, tar_of(changes)], name="a")

    with united(store, build(store, layout, "a").layers) as top:
        assert paths(top) == ["other", "other/in", "srv", "way"]
        assert read(top, "srv") == b"a file"


def test_links_to_outside_stay_inside(store: EnvironmentStore, layout: Layout, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    out = [symlink("out", str(precious)), symlink("up", "../../../../../../../.." + str(precious))]
    evil = [member("out/.wh.file"), member("up/.wh..wh..opq"), member("out/.wh..wh..opq")]
    layout.image([tar_of(out), tar_of(evil)], name="a")
    layout.image([tar_of(out), tar_of([member("out/file", b"evil")])], name="b")

    build(store, layout, "a")
    with pytest.raises(InvalidArgumentError):
        build(store, layout, "b")

    assert {path.name: path.read_text() for path in precious.iterdir()} == {"file": "x"}


def test_bounds_are_those_of_all_layers_together(
    store: EnvironmentStore, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.image([tar_of([member(f"{n}/{i}") for i in range(5)]) for n in range(3)], name="a")
    unpacking = stack.Unpacking
    monkeypatch.setattr("dsec.image.worker.Unpacking", lambda *args, **rest: unpacking(*args, **rest, entries_left=15))

    with pytest.raises(LimitError):
        build(store, layout, "a")

    assert list((store.state / "staging").iterdir()) == []


def test_where_nothing_can_be_united_an_image_is_one_layer(
    store: EnvironmentStore, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    layout.image([BASE, tar_of([member("srv/.wh.old")])], name="a")
    monkeypatch.setattr(stack, "mount_overlay", refuse)
    events: list[BuildEvent] = []

    info = build(store, layout, "a", events=events)

    assert any("become one" in event.message for event in events)
    assert len(info.layers) == 1
    with opened(store, info.layers[0]) as top:
        assert paths(top) == ["other", "srv", "srv/data", "srv/data/x", "way"]


def test_a_layer_cannot_forge_what_the_overlay_understands(store: EnvironmentStore, layout: Layout) -> None:
    marks = {f"SCHILY.xattr.trusted.overlay.{name}": "y" for name in ("opaque", "redirect", "metacopy", "whiteout")}
    forged = [
        directory("srv/data", pax_headers=marks),
        member("srv/more", b"1", pax_headers=marks),
        member("srv/old", type=tarfile.CHRTYPE, devmajor=0, devminor=0),
        member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    ]
    layout.image([BASE, tar_of(forged)], name="a")

    with united(store, build(store, layout, "a").layers) as top:
        assert paths(top) == ["other", "srv", "srv/data", "srv/data/x", "srv/more", "srv/old", "way"]
        assert read(top, "srv/old") == b"1"


@pytest.mark.parametrize(
    "member",
    [
        member("../out"), member("way/../../out"), member("srv/.wh..."), member("srv/.wh.."), hardlink("l", "missing"),
        hardlink("l", "way/../../etc/passwd"), hardlink("l", "srv"), member("other/file"), member("x" * 300),
    ],
)  # fmt: skip
def test_a_higher_layer_that_makes_no_sense_is_refused_and_leaves_nothing(
    store: EnvironmentStore, layout: Layout, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    layout.image([BASE], name="base")
    layout.image([BASE, tar_of([member])], name="a")
    build(store, layout, "base")
    before = store.layers.digests()

    with pytest.raises(DsecError):
        build(store, layout, "a")

    assert (store.names(), store.layers.digests()) == (["base"], before)
    assert list((store.state / "staging").iterdir()) == []


def test_links_to_what_the_same_layer_hides_are_refused_and_to_what_it_has_are_not(
    store: EnvironmentStore, layout: Layout
) -> None:
    layout.image([BASE, tar_of([member("srv/.wh.old"), hardlink("l", "srv/old")])], name="a")
    layout.image(
        [BASE, tar_of([member("srv/old", b"new"), member("srv/old", b"newer"), hardlink("l", "way/old")])], name="b"
    )

    with pytest.raises(InvalidArgumentError):
        build(store, layout, "a")

    with united(store, build(store, layout, "b").layers) as top:
        assert read(top, "l") == read(top, "srv/old") == b"newer"
        assert os.stat("l", dir_fd=top).st_nlink == 2
