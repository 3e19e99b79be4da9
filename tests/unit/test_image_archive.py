"""Hostile and ordinary archives: what is taken, what is refused, and that nothing leaves the tree."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.image.archive import unpack
from dsec.image.stage import Stage
from dsec.wire.environments import Ownership
from tests.images import directory, hardlink, listing, member, symlink, tar_of


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tmp_path / "outer" / "tree"


def stage_of(tree: Path, **options: object) -> Stage:
    tree.parent.mkdir(parents=True, exist_ok=True)
    return Stage(tree, **options)  # type: ignore[arg-type]


def unpacked(data: bytes, tree: Path, **options: object) -> dict[str, str]:
    with stage_of(tree, **options) as stage:
        unpack(io.BytesIO(data), stage)
        stage.finish()
    return listing(tree)


ORDINARY = [
    directory("./"),
    directory("./dir", mtime=1_000),
    member("./dir/file", b"content", mode=0o640, mtime=1_234),
    symlink("./dir/link", "file"),
    hardlink("./dir/same", "./dir/file"),
    member("implied/parent/file", b"x"),
]
ORDINARY_LISTING = {
    "dir": "/",
    "dir/file": "content",
    "dir/link": "-> file",
    "dir/same": "content",
    "implied": "/",
    "implied/parent": "/",
    "implied/parent/file": "x",
}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_each_format_is_read(tree: Path, format: int) -> None:
    assert unpacked(tar_of(ORDINARY, format=format), tree) == ORDINARY_LISTING

    assert (tree / "dir/file").stat().st_mode & 0o7777 == 0o640
    assert (tree / "dir/file").stat().st_mtime == 1_234
    assert (tree / "dir").stat().st_mtime == 1_000
    assert (tree / "dir/file").stat().st_ino == (tree / "dir/same").stat().st_ino


@pytest.mark.parametrize(
    "compress",
    [
        bytes,
        gzip.compress,
        lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
        lzma.compress,
        lambda data: lzma.compress(data[:700]) + b"\0" * 8 + lzma.compress(data[700:]),
        zstandard.compress,
        lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
    ],
    ids=["plain", "gzip", "gzip-parts", "xz", "xz-parts", "zstd", "zstd-parts"],
)
def test_each_compression_is_known_by_content(tree: Path, compress) -> None:  # type: ignore[no-untyped-def]
    assert unpacked(compress(tar_of(ORDINARY)), tree) == ORDINARY_LISTING


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a/..", "/../evil", "./../evil"])
def test_names_that_lead_out_are_refused(tree: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="leads out"):
        unpacked(tar_of([member(name, b"x")]), tree)

    assert not (tree.parent / "evil").exists()


def test_absolute_names_are_taken_from_the_top(tree: Path) -> None:
    assert unpacked(tar_of([member("/etc/file", b"x")]), tree) == {"etc": "/", "etc/file": "x"}


def test_writing_through_links_stays_inside(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.mkdir(parents=True)
    members = [
        symlink("absolute", str(outside)),
        directory("a"),
        symlink("a/up", "../../../../../../.." + str(outside)),
        directory("usr/lib"),
        symlink("lib", "usr/lib"),
        member("lib/file", b"x"),
    ]
    assert unpacked(tar_of(members), tree)["usr/lib/file"] == "x"

    for through in ("absolute/evil", "a/up/evil"):
        with pytest.raises(InvalidArgumentError):  # a chroot would not find them either
            unpacked(tar_of([*members, member(through, b"x")]), tree)
    assert list(outside.iterdir()) == []


def test_an_absolute_link_leads_into_the_tree(tree: Path) -> None:
    found = unpacked(tar_of([directory("target"), symlink("link", "/target"), member("link/file", b"x")]), tree)

    assert found == {"target": "/", "target/file": "x", "link": "-> /target"}


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd", "missing", "a/../../outside"])
def test_hard_links_to_outside_are_refused(tree: Path, target: str) -> None:
    tree.parent.mkdir()
    (tree.parent / "outside").write_text("x")

    with pytest.raises(InvalidArgumentError):
        unpacked(tar_of([hardlink("link", target)]), tree)

    assert (tree.parent / "outside").stat().st_nlink == 1


def test_a_hard_link_through_a_link_stays_inside(tree: Path) -> None:
    tree.parent.mkdir()
    (tree.parent / "outside").write_text("x")

    with pytest.raises(InvalidArgumentError):
        unpacked(tar_of([symlink("up", str(tree.parent)), hardlink("link", "up/outside")]), tree)

    assert (tree.parent / "outside").stat().st_nlink == 1


def test_a_hard_link_to_a_link_is_that_link(tree: Path) -> None:
    found = unpacked(tar_of([symlink("a", "/etc/passwd"), hardlink("b", "a")]), tree)

    assert found == {"a": "-> /etc/passwd", "b": "-> /etc/passwd"}


def test_a_file_over_a_hard_link_does_not_write_through_it(tree: Path) -> None:
    found = unpacked(tar_of([member("a", b"first"), hardlink("b", "a"), member("b", b"second")]), tree)

    assert found == {"a": "first", "b": "second"}


def test_a_file_over_a_link_replaces_the_link(tree: Path) -> None:
    tree.parent.mkdir()
    outside = tree.parent / "outside"
    outside.write_text("kept")

    found = unpacked(tar_of([symlink("a", str(outside)), member("a", b"new")]), tree)

    assert found == {"a": "new"}
    assert outside.read_text() == "kept"


def test_the_last_of_several_entries_of_one_name_counts(tree: Path) -> None:
    members = [
        member("x", b"1"),
        directory("x"),
        member("x/y", b"2"),
        symlink("x", "nowhere"),
        directory("x"),
        directory("x", mode=0o700),
        member("x/z", b"3"),
        member("x/z", b"4"),
    ]

    assert unpacked(tar_of(members), tree) == {"x": "/", "x/z": "4"}
    assert (tree / "x").stat().st_mode & 0o7777 == 0o700


def test_device_nodes_are_left_out_and_counted(tree: Path) -> None:
    with stage_of(tree) as stage:
        nodes = [
            member("zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
            member("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
            member("whiteout", type=tarfile.CHRTYPE),
            member("pipe", type=tarfile.FIFOTYPE),
        ]
        unpack(io.BytesIO(tar_of(nodes)), stage)
        stage.finish()

        assert str(stage.dropped) == "3 device nodes left out"
    assert [path.name for path in tree.iterdir()] == ["pipe"]
    assert (tree / "pipe").is_fifo()


@pytest.mark.root
def test_owners_and_special_bits_are_kept(tree: Path) -> None:
    unpacked(tar_of([member("su", b"x", uid=7, gid=65_534, mode=0o6755)]), tree)

    info = (tree / "su").stat()
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (7, 65_534, 0o6755)


@pytest.mark.parametrize("ids", [{"uid": 65_535}, {"gid": 65_536}, {"uid": 1 << 40}, {"uid": -5}])
def test_ids_that_a_sandbox_lacks_are_refused_with_a_hint(tree: Path, ids: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="squash"):
        unpacked(tar_of([member("file", b"x", **ids)], format=tarfile.GNU_FORMAT), tree)


@pytest.mark.root
@pytest.mark.parametrize(("owner", "wanted"), [(Ownership.SQUASH, (65_534, 5)), (Ownership.ROOT, (0, 0))])
def test_ids_that_a_sandbox_lacks_are_given_away_when_asked(
    tree: Path, owner: Ownership, wanted: tuple[int, int]
) -> None:
    unpacked(tar_of([member("file", b"x", uid=100_000, gid=5)]), tree, owner=owner)

    info = (tree / "file").stat()
    assert (info.st_uid, info.st_gid) == wanted


def test_only_user_attributes_are_kept(tree: Path) -> None:
    headers = {
        "SCHILY.xattr.user.kept": "value",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.capability": "cap",
        "SCHILY.xattr.user.": "no name",
    }

    with stage_of(tree) as stage:
        unpack(io.BytesIO(tar_of([member("file", b"x", pax_headers=headers)])), stage)

        assert stage.dropped.xattrs == 3
    assert os.listxattr(tree / "file") == ["user.kept"]
    assert os.getxattr(tree / "file", "user.kept") == b"value"


def test_times_keep_their_nanoseconds(tree: Path) -> None:
    unpacked(tar_of([member("file", b"x", pax_headers={"mtime": "1700000000.123456789"})]), tree)

    assert (tree / "file").stat().st_mtime_ns == 1_700_000_000_123_456_789


@pytest.mark.parametrize("time", ["-5.5", "nan", "inf", "1e400", "9" * 30])
def test_impossible_times_do_no_harm(tree: Path, time: str) -> None:
    assert unpacked(tar_of([member("file", b"x", pax_headers={"mtime": time})]), tree) == {"file": "x"}


# ---- bombs -----------------------------------------------------------------------------------------


class Zeros:
    """A tar member's content that has no end."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = min(size, self.left)
        self.left -= size
        return b"\0" * size


def test_too_much_content_is_refused(tree: Path) -> None:
    with pytest.raises(LimitError, match="content"):
        unpacked(tar_of([member("a", b"x" * 600), member("b", b"x" * 600)]), tree, bytes_max=1_000)


def test_a_bomb_of_zeros_is_stopped_and_takes_no_room(tree: Path) -> None:
    info = tarfile.TarInfo("zeros")
    info.size = 64 << 20
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        archive.addfile(info, Zeros(info.size))

    with pytest.raises(LimitError, match="content"):
        unpacked(out.getvalue(), tree, bytes_max=32 << 20)
    assert (tree / "zeros").stat().st_blocks * 512 < 1 << 20


def test_too_many_entries_are_refused(tree: Path) -> None:
    with pytest.raises(LimitError, match="entries"):
        unpacked(tar_of([member(str(number)) for number in range(20)]), tree, entries_max=10)


def test_parents_that_are_implied_count_as_entries(tree: Path) -> None:
    with pytest.raises(LimitError, match="entries"):
        unpacked(tar_of([member("a/b/c/d/e/f/g/h/i/j/k")]), tree, entries_max=10)


@pytest.mark.parametrize("name", ["d/" * 300 + "f", ("n" * 250 + "/") * 16 + "f"])
def test_too_deep_or_too_long_names_are_refused(tree: Path, name: str) -> None:
    with pytest.raises(LimitError):
        unpacked(tar_of([member(name)]), tree)


@pytest.mark.parametrize("map", ["0,5,1,99999999999", "50,5,0,5", "0,-5", "0,5,3,5"])
def test_a_sparse_map_that_lies_is_refused(tree: Path, map: str) -> None:
    headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.size": "100",
        "GNU.sparse.map": map,
    }

    with pytest.raises(InvalidArgumentError):
        unpacked(tar_of([member("x", b"hello" * 4, pax_headers=headers)]), tree)


@pytest.mark.parametrize("name", ["n" * 256, "a\0b", ".", "./."])
def test_names_that_no_file_can_have_are_refused(tree: Path, name: str) -> None:
    headers = {"path": name}
    with pytest.raises(InvalidArgumentError):
        unpacked(tar_of([member("x", b"x", pax_headers=headers)]), tree)


def test_a_huge_header_is_refused_before_it_is_read(tree: Path) -> None:
    for type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        header = tarfile.TarInfo("header")
        header.type = type
        header.size = 8 << 30

        with pytest.raises(LimitError, match="headers"):
            unpacked(header.tobuf(tarfile.GNU_FORMAT) + b"x" * 10_000, tree)


def test_headers_that_nest_without_end_are_refused(tree: Path) -> None:
    header = tarfile.TarInfo("header")
    header.type = tarfile.GNUTYPE_LONGNAME
    header.size = 2
    one = header.tobuf(tarfile.GNU_FORMAT) + b"x\0".ljust(512, b"\0")

    with pytest.raises((InvalidArgumentError, LimitError)):
        unpacked(one * 5_000, tree)


def test_a_sparse_file_keeps_its_holes(tree: Path) -> None:
    headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.size": str(8 << 20),
        "GNU.sparse.map": f"{4 << 20},5",
    }

    unpacked(tar_of([member("x", b"hello", pax_headers=headers)]), tree)

    data = (tree / "sparse").read_bytes()
    assert len(data) == 8 << 20
    assert data.strip(b"\0") == b"hello"
    assert (tree / "sparse").stat().st_blocks * 512 < 4 << 20


# ---- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"x", b"not a tar" * 1000, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"PK\3\4"]
)
def test_what_is_no_archive_is_refused(tree: Path, data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        unpacked(data, tree)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, zstandard.compress])
@pytest.mark.parametrize("cut", [0.3, 0.6, 0.8])
def test_an_archive_that_ends_early_is_refused(tree: Path, compress, cut: float) -> None:  # type: ignore[no-untyped-def]
    data = compress(tar_of([member(f"file{number}", os.urandom(3_000)) for number in range(20)]))
    keep = int(len(data) * cut) // 512 * 512 + 100

    with pytest.raises(InvalidArgumentError):
        unpacked(data[:keep], tree)


def test_a_damaged_header_is_not_taken_for_the_end(tree: Path) -> None:
    data = bytearray(tar_of([member("a", b"1"), member("b", b"2")]))
    data[1_024 + 10] ^= 0xFF

    with pytest.raises(InvalidArgumentError, match="damaged"):
        unpacked(bytes(data), tree)


def test_a_wrong_checksum_of_the_compression_is_refused(tree: Path) -> None:
    data = bytearray(gzip.compress(tar_of([member("a", b"1")])))
    data[-8] ^= 0xFF

    with pytest.raises(InvalidArgumentError, match="damaged"):
        unpacked(bytes(data), tree)
