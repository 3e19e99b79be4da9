"""A layer that is packed for an image and unpacked again is the same layer."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.core.errors import UnsupportedError
from dsec.image.archive import apply_whiteouts, unpack_layer
from dsec.image.packing import pack_layer
from dsec.image.stage import Attributes, Stage
from dsec.storage.layers import LayerKind, LayerLocation
from dsec.wire.images import Compression
from tests.images import digest_of

NAMES = st.sampled_from([b"a", b"b", b"long" * 40, b"\xff\xfe", b"sp ace", "ü".encode(), b".whatever", b"wh."])
MODES = st.sampled_from([0o644, 0o755, 0o4755, 0o1777, 0o2750, 0o000])
TIMES = st.integers(0, (1 << 34) * 1_000_000_000)
XATTRS = st.dictionaries(st.sampled_from([b"user.a", b"user.b.c"]), st.binary(max_size=40), max_size=2)


@st.composite
def attributes(draw: st.DrawFn) -> Attributes:
    owner = st.integers(0, 65_534)
    return Attributes(draw(MODES), draw(owner), draw(owner), draw(TIMES), draw(XATTRS))


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> dict[bytes, Any]:
    """Names to files (bytes), links (a tuple with their target) or directories."""
    inner = trees(depth=depth - 1) if depth else st.nothing()
    kinds = st.one_of(st.binary(max_size=3_000), st.tuples(st.sampled_from([b"a", b"../b", b"/x" * 60])), inner)
    return draw(st.dictionaries(NAMES, st.tuples(kinds, attributes()), max_size=4))


def fill(stage: Stage, tree: dict[bytes, Any], above: bytes = b"") -> None:
    for name, (kind, given_) in tree.items():
        path = above + name
        if isinstance(kind, bytes):
            stage.file(path, given_, io.BytesIO(kind))
        elif isinstance(kind, tuple):
            stage.symlink(path, kind[0], given_)
        else:
            stage.directory(path, given_)
            fill(stage, kind, path + b"/")


def packed(root: Path, target: Path, compression: Compression) -> None:
    pack_layer(LayerLocation("0" * 64, LayerKind.DIRECTORY, root), None, target, compression)


@pytest.mark.root
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees(), top=attributes(), compression=st.sampled_from(list(Compression)))
def test_any_tree_comes_back_the_same(tree: dict[bytes, Any], top: Attributes, compression: Compression) -> None:
    with tempfile.TemporaryDirectory() as place:
        root, back = Path(place) / "root", Path(place) / "back"
        with Stage(root) as stage:
            stage.directory(b"", top)
            fill(stage, tree)
            stage.finish()
        packed(root, Path(place) / "blob", compression)
        with Stage(back) as stage, (Path(place) / "blob").open("rb") as blob:
            unpack_layer(blob, stage)
            stage.finish()

        assert digest_of(back) == digest_of(root)


@pytest.mark.root
def test_hard_links_pipes_and_holes_are_packed_and_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "first").write_bytes(b"x" * 100)
    os.link(root / "first", root / "second")
    os.mkfifo(root / "pipe", 0o640)
    with (root / "holes").open("wb") as file:
        file.truncate(5 << 20)
    for name in ("one", "two"):
        packed(root, tmp_path / name, Compression.GZIP)
    with Stage(tmp_path / "back") as stage, (tmp_path / "one").open("rb") as blob:
        unpack_layer(blob, stage)
        stage.finish()

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert digest_of(tmp_path / "back") == digest_of(root)
    assert (tmp_path / "one").stat().st_size < 20_000


@pytest.mark.root
def test_what_a_layer_hides_is_hidden_by_marks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "dir").mkdir(parents=True)
    (root / "dir" / "new").write_bytes(b"1")
    os.setxattr(root / "dir", "trusted.overlay.opaque", b"y")
    os.mknod(root / "gone", stat.S_IFCHR, 0)
    packed(root, tmp_path / "blob", Compression.ZSTD)
    with Stage(tmp_path / "below") as stage:
        for name in (b"gone", b"dir/old", b"kept"):
            stage.file(name, Attributes(0o644), io.BytesIO(b"x"))
        for apply in (apply_whiteouts, unpack_layer):
            with (tmp_path / "blob").open("rb") as blob:
                apply(blob, stage)
        stage.finish()

    assert sorted(str(path.relative_to(tmp_path / "below")) for path in (tmp_path / "below").rglob("*")) == [
        "dir", "dir/new", "kept",
    ]  # fmt: skip


def test_a_name_that_would_hide_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".wh.etc").touch()

    with pytest.raises(UnsupportedError, match=r"\.wh\.etc"):
        packed(tmp_path / "root", tmp_path / "blob", Compression.NONE)
