"""The layers of an image, one by one and united by the kernel, are the same tree as all of them unpacked into one."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsec.core.errors import DsecError
from dsec.image import erofs
from dsec.image.environments import EnvironmentStore
from dsec.image.scan import tree_digest, walk
from dsec.image.sources import oci
from dsec.image.stack import Unpacking, open_layer, unpack_stack
from dsec.image.stage import Stage
from dsec.storage.layers import Lease
from dsec.storage.mounts import mount_overlay
from dsec.storage.trees import remove_tree
from dsec.wire.environments import OciSource, Ownership
from tests.images import Layout, directory, member, symlink, tar_of

pytestmark = pytest.mark.root

names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
marks = st.tuples(st.lists(names, max_size=2), st.sampled_from([".wh.a", ".wh.b", ".wh..wh..opq"])).map(
    lambda found: "/".join([*found[0], found[1]])
)
things = st.one_of(
    st.tuples(st.just("file"), paths, st.integers(0, 3)),
    st.tuples(st.just("directory"), paths, st.integers(0, 3)),
    st.tuples(st.just("symlink"), paths, st.integers(0, 3)),
    st.tuples(st.just("mark"), marks, st.integers(0, 3)),
)
stacks = st.lists(st.lists(things, max_size=6), min_size=2, max_size=4)


def archive(items: list[tuple[str, str, int]]) -> bytes:
    members = []
    for kind, path, number in items:
        info = {"mtime": 100 + number, "uid": number, "gid": 2 * number}
        if kind == "file" or kind == "mark":
            members.append(member(path, b"x" * number, mode=0o600 + number, **info))
        elif kind == "directory":
            members.append(directory(path, mode=0o700 + number, **info))
        else:
            members.append(symlink(path, ("a", "/b", "../c", "a/b")[number], **info))
    return tar_of(members, format=tarfile.GNU_FORMAT)


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-stacks-"))
    try:
        # As directories: what the overlay makes of layers is the same, and mkfs is a process for each.
        with patch.object(erofs, "probe_erofs", lambda store: erofs.Verdict(False, "not here")):
            yield path
    finally:
        remove_tree(path)


@contextmanager
def united(store: EnvironmentStore, digests: tuple[str, ...]) -> Iterator[int]:
    with ExitStack() as opened:
        tops = []
        for digest in reversed(digests):
            tops.append(open_layer(store.layers.get(digest)))
            opened.callback(os.close, tops[-1])
        top = mount_overlay(tops)
        opened.callback(os.close, top)
        yield top


def stacked(place: Path, source: OciSource) -> tuple[EnvironmentStore, Lease]:
    store = EnvironmentStore(place / "state")
    with store.layers.staging() as work, oci.opened(source) as (_, archives):
        return store, unpack_stack(Unpacking(store, Ownership.KEEP, work, lambda event: None), archives)


def described(top: int) -> dict[bytes, tuple[int, ...]]:
    return {
        e.path: (e.info.st_mode, e.info.st_uid, e.info.st_mtime_ns, e.info.st_size * (not e.path)) for e in walk(top)
    }


@given(stack=stacks)
@example(stack=[[("file", "a/a", 0)], [("mark", "a/.wh.a", 0), ("file", "a/a", 0), ("mark", "a/.wh..wh..opq", 0)]])
@settings(max_examples=60)
def test_layers_one_by_one_are_the_same_tree_as_all_in_one(stack: list[list[tuple[str, str, int]]]) -> None:
    with scratch() as place:
        layout = Layout(place / "layout")
        layout.image([archive(items) for items in stack])
        source = OciSource(str(layout.root))
        try:
            with Stage(place / "one") as stage:
                oci.fill(source, stage)
                stage.finish()
        except DsecError:
            return  # an archive that contradicts itself

        store, lease = stacked(place, source)

        with lease, united(store, lease.digests) as top:
            one = os.open(place / "one", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if tree_digest(top).digest != tree_digest(one).digest:
                    assert described(top) == described(one)
                    raise AssertionError("the trees differ in their content")
            finally:
                os.close(one)
