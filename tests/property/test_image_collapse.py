"""Runs of layers made one: what the kernel shows of a stack is the same with and without."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.core.errors import DsecError
from dsec.image import erofs
from dsec.image.collapse import Merge
from dsec.image.scan import tree_digest, walk
from dsec.image.stage import Attributes, Stage
from dsec.storage.mounts import detached_erofs, mount_overlay
from dsec.storage.trees import remove_tree

pytestmark = pytest.mark.root

paths = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3).map(b"/".join)
things = st.tuples(
    st.sampled_from(["file", "file", "directory", "symlink", "fifo", "link", "whiteout", "opaque"]),
    paths,
    st.integers(1, 3),
)
stacks = st.lists(st.lists(things, max_size=7), min_size=2, max_size=5)


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-collapse-"))
    try:
        yield path
    finally:
        remove_tree(path)


def write(tree: Path, items: list[tuple[str, bytes, int]]) -> None:
    with Stage(tree) as stage:
        first: bytes | None = None
        for kind, path, number in items:
            attributes = Attributes(0o700 + number, number, 2 * number, number * 10**9, {b"user.n": b"%d" % number})
            try:
                match kind:
                    case "file":
                        stage.file(path, attributes, io.BytesIO(b"x" * number))
                        first = first or path
                    case "directory":
                        stage.directory(path, attributes)
                    case "symlink":
                        stage.symlink(path, b"%d" % number, attributes)
                    case "fifo":
                        stage.fifo(path, attributes)
                    case "link" if first is not None:
                        stage.hardlink(path, first)
                    case "whiteout":
                        stage.whiteout(path)
                    case "opaque":
                        stage.opaque(path)
            except DsecError:
                continue  # something else is in the way
        stage.finish()


def image(tree: Path, opened: ExitStack) -> int:
    into = tree.with_name(f"{tree.name}.image")
    into.mkdir()
    erofs.make_image(tree, into, digest="0" * 64)
    fd = detached_erofs(into / "meta.erofs", into / "data.blob")
    opened.callback(os.close, fd)
    return fd


def view(lowest_first: Sequence[int], opened: ExitStack) -> int:
    top = mount_overlay(list(reversed(lowest_first)))
    opened.callback(os.close, top)
    return top


def described(top: int) -> list[tuple[bytes, str, int]]:
    return [(entry.path, f"{entry.info.st_mode:o}", entry.info.st_mtime_ns) for entry in walk(top)]


@given(stack=stacks, data=st.data(), blind=st.booleans())
@settings(max_examples=60)
def test_a_collapsed_run_shows_and_hides_what_its_layers_do(
    stack: list[list[tuple[str, bytes, int]]], data: st.DataObject, blind: bool
) -> None:
    start = data.draw(st.integers(int(blind and len(stack) > 2), len(stack) - 2))
    blind = blind and start > 0  # something lies below all that is snapshotted
    end = data.draw(st.integers(start + 2, len(stack)))
    with scratch() as place, ExitStack() as opened:
        layers = []
        for number, items in enumerate(stack):
            write(place / str(number), items)
            layers.append(image(place / str(number), opened))
        run = [os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=layer) for layer in reversed(layers[start:end])]
        for fd in run:
            opened.callback(os.close, fd)
        (place / "collapsed").mkdir(mode=0o755)

        below = view(layers[:start], opened) if start and not blind else None
        Merge(run, below, place / "collapsed", blind=blind).run()

        one = image(place / "collapsed", opened)
        before, after = view(layers, opened), view([*layers[:start], one, *layers[end:]], opened)
        assert described(after) == described(before)
        assert tree_digest(after).digest == tree_digest(before).digest
