"""Whatever is done to a tree above layers: a copy of its upper is a layer above the same layers that looks the same."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.image.scan import tree_digest
from dsec.storage.mirror import Mapped, Mirror
from dsec.storage.mounts import mount_overlay
from dsec.storage.trees import remove_tree

pytestmark = pytest.mark.root

_NAMES = ("a", "b", "c")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
paths = st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3).map("/".join)
numbers = st.integers(0, 0o7777)
operations = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "write",
                "append",
                "hole",
                "mkdir",
                "remove",
                "rename",
                "link",
                "symlink",
                "fifo",
                "chmod",
                "chown",
                "xattr",
                "time",
            ]
        ),
        paths,
        paths,
        numbers,
    ),
    max_size=40,
)


def apply(top: str, operation: tuple[str, str, str, int]) -> None:
    """What cannot be done is not done."""
    kind, path, other, number = operation
    place, target = Path(top) / path, Path(top) / other
    acts: dict[str, Callable[[], Any]] = {
        "write": lambda: place.write_bytes(b"%d" % number * 100),
        "append": lambda: _append(place, number),
        "hole": lambda: os.truncate(place, number * 1000),
        "mkdir": lambda: place.mkdir(parents=True),
        "remove": lambda: remove_tree(place),
        "rename": lambda: place.rename(target),
        "link": lambda: os.link(place, target, follow_symlinks=False),
        "symlink": lambda: target.symlink_to(path),
        "fifo": lambda: os.mkfifo(place),
        "chmod": lambda: place.chmod(number & 0o7777),
        "chown": lambda: os.chown(place, number, number // 2, follow_symlinks=False),
        "xattr": lambda: os.setxattr(place, "user.note", b"%d" % number, follow_symlinks=False),
        "time": lambda: os.utime(place, ns=(number, 10**18 + number), follow_symlinks=False),
    }
    with suppress(OSError, Exception):
        if kind in ("write", "append", "hole", "chmod") and place.is_fifo():
            return
        acts[kind]()


def _append(place: Path, number: int) -> None:
    with place.open("ab") as file:
        file.write(b"%d" % number)


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-snapshots-"))
    try:
        yield path
    finally:
        remove_tree(path)


@settings(max_examples=60, deadline=None)
@given(below=operations, before=operations, after=operations)
def test_a_copy_of_an_upper_is_a_layer_that_looks_the_same(
    below: list[tuple[str, str, str, int]],
    before: list[tuple[str, str, str, int]],
    after: list[tuple[str, str, str, int]],
) -> None:
    with scratch() as place, ExitStack() as opened:

        def held(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        for name in ("lower", "upper", "work"):
            (place / name).mkdir(mode=0o755)
        for operation in below:
            apply(str(place / "lower"), operation)
        lower = held(os.open(place / "lower", _DIRECTORY))
        view = mount_overlay([lower], place / "upper", place / "work")
        try:
            mirror = Mirror(held(os.open(place / "upper", _DIRECTORY)), place / "mirror")
            for operation in before:
                apply(f"/proc/self/fd/{view}", operation)
            mirror.look(Mapped())
            for operation in after:
                apply(f"/proc/self/fd/{view}", operation)
            mirror.take(within_s=60)
            expected = _visible(view)
        finally:
            os.close(view)
        copy = held(os.open(mirror.build(), _DIRECTORY))

        assert tree_digest(copy).digest == tree_digest(held(os.open(place / "upper", _DIRECTORY))).digest
        assert _visible(held(mount_overlay([copy, lower]))) == expected


def _visible(top: int) -> dict[str, Any]:
    """All that can be seen below, but for what the overlay counts differently: links across layers."""
    found: dict[str, Any] = {}
    for here, directories, files, fd in os.fwalk(".", dir_fd=top):
        for name in directories + files:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            entry: list[Any] = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns]
            if stat.S_ISREG(info.st_mode):
                file = os.open(name, os.O_RDONLY, dir_fd=fd)
                entry += [os.read(file, 10_000_000), {key: os.getxattr(file, key) for key in os.listxattr(file)}]
                os.close(file)
            elif stat.S_ISLNK(info.st_mode):
                entry.append(os.readlink(name, dir_fd=fd))
            found[f"{here}/{name}"] = entry
    return found
