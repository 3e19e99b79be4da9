"""Trees of every shape: archives and copies agree, what is made can be removed, nonsense is refused in words."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.core.errors import DsecError
from dsec.image.archive import apply_whiteouts, unpack, unpack_layer
from dsec.image.sources import directory
from dsec.image.stage import Stage
from dsec.storage.trees import remove_tree, tree_size
from dsec.wire.environments import DirectorySource, Ownership
from tests.images import digest_of, tar_of

# Each example makes trees on the disk: a quarter of what the profile asks for is enough.
few = settings(max_examples=settings().max_examples // 4)

names = st.one_of(
    st.sampled_from(["a", "b", "c", ".wh.a", "é", "x" * 200]),
    st.binary(min_size=1, max_size=8).map(
        lambda raw: os.fsdecode(raw.replace(b"/", b"_").replace(b"\0", b"_").replace(b".", b"_"))
    ),
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
entries = st.lists(
    st.tuples(
        paths,
        st.sampled_from(["file", "directory", "symlink", "hardlink", "fifo"]),
        st.binary(max_size=40) | st.sampled_from([b"\0" * 5_000, b"x" * 10_000]),
        st.integers(0, 0o7777),
        st.integers(0, 2_000_000_000_000_000_000),
    ),
    max_size=15,
)


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-trees-"))
    try:
        yield path
    finally:
        remove_tree(path)
        assert not path.exists()


def members_of(items: list[tuple[str, str, bytes, int, int]]) -> list[tuple[tarfile.TarInfo, bytes]]:
    members = []
    for index, (path, kind, data, mode, mtime_ns) in enumerate(items):
        info = tarfile.TarInfo(path)
        info.mode = mode
        info.pax_headers = {"mtime": f"{mtime_ns // 10**9}.{mtime_ns % 10**9:09d}"}
        content = b""
        if kind == "directory":
            info.type = tarfile.DIRTYPE
        elif kind == "symlink":
            info.type, info.linkname = tarfile.SYMTYPE, data.hex() or "x"
        elif kind == "hardlink" and index > 0:
            info.type, info.linkname = tarfile.LNKTYPE, items[0][0]
        elif kind == "fifo":
            info.type = tarfile.FIFOTYPE
        else:
            content = data
            info.size = len(data)
        members.append((info, content))
    return members


def staged(data: bytes, tree: Path) -> Stage | None:
    """The tree, or None for an archive that contradicts itself."""
    with Stage(tree, owner=Ownership.ROOT) as stage:
        try:
            unpack(io.BytesIO(data), stage)
        except DsecError:
            return None
        stage.finish()
        return stage


@few
@given(items=entries)
def test_a_copy_of_an_unpacked_archive_is_the_same_tree(items: list[tuple[str, str, bytes, int, int]]) -> None:
    with scratch() as place:
        if staged(tar_of(members_of(items)), place / "one") is None:
            return

        with Stage(place / "two", owner=Ownership.ROOT) as stage:
            directory.fill(DirectorySource(str(place / "one")), stage)
            stage.finish()

        assert digest_of(place / "one") == digest_of(place / "two")
        assert tree_size(place / "one").entries == tree_size(place / "two").entries


@few
@given(items=entries)
def test_an_archive_unpacks_to_the_same_tree_each_time(items: list[tuple[str, str, bytes, int, int]]) -> None:
    data = tar_of(members_of(items))
    with scratch() as place:
        first, second = staged(data, place / "one"), staged(data, place / "two")

        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert digest_of(place / "one") == digest_of(place / "two")
            assert first.entries == second.entries


@few
@given(items=entries, position=st.integers(0, 200), what=st.sampled_from(["mode", "content", "name", "time", "more"]))
def test_any_change_changes_the_digest(items: list[tuple[str, str, bytes, int, int]], position: int, what: str) -> None:
    with scratch() as place:
        if staged(tar_of(members_of(items)), place / "one") is None:
            return
        files = sorted(path for path in (place / "one").rglob("*") if path.is_file() and not path.is_symlink())
        before = digest_of(place / "one")
        if what == "more" or not files:
            (place / "one" / "entirely-new").write_text("")
        else:
            change(files[position % len(files)], what)

        assert digest_of(place / "one") != before


def change(path: Path, what: str) -> None:
    info = path.stat()
    if what == "mode":
        path.chmod((info.st_mode & 0o7777) ^ 0o001)
    elif what == "content":
        with path.open("ab") as file:
            file.write(b"!")
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    elif what == "name":
        path.rename(path.with_name("renamed-by-the-test"))
    else:
        os.utime(path, ns=(0, info.st_mtime_ns + 1))


@few
@given(data=st.binary(max_size=3_000))
def test_any_bytes_are_an_archive_or_refused_in_words(data: bytes) -> None:
    with scratch() as place:
        staged(data, place / "tree")


@few
@given(
    items=entries,
    cuts=st.lists(st.tuples(st.integers(0, 20_000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4),
)
def test_damaged_archives_are_refused_in_words_and_reach_nothing_outside(
    items: list[tuple[str, str, bytes, int, int]], cuts: list[tuple[int, bytes]]
) -> None:
    data = bytearray(tar_of(members_of(items)))
    for position, noise in cuts:
        start = position % len(data)
        data[start : start + len(noise)] = noise
    with scratch() as place:
        (place / "outside").write_text("kept")
        for action in (unpack, unpack_layer, apply_whiteouts):
            with Stage(place / "tree", owner=Ownership.SQUASH) as stage:
                with suppress(DsecError):
                    action(io.BytesIO(bytes(data)), stage)
                    stage.finish()

        assert sorted(path.name for path in place.iterdir()) == ["outside", "tree"]
        assert (place / "outside").read_text() == "kept"
