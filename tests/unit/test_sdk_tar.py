"""Tar streams out of and into directories. What comes from a sandbox is hostile."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.core.errors import ConflictError, DsecError, LimitError, ProtocolError
from dsec.sdk.tar import tar_chunks
from dsec.sdk.untar import Unpacked, Unpacker


def unpack(
    data: bytes, target: Path, *, step: int = 10_000, bytes_max: int = 1 << 30, entries: int = 1_000
) -> Unpacked:
    with Unpacker(target, bytes_max=bytes_max, entries_max=entries) as unpacker:
        for start in range(0, len(data), step):
            unpacker.feed(data[start : start + step])
        return unpacker.finish()


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


END = bytes(1024)


def tree_of(root: Path) -> dict[str, tuple[str, object, int]]:
    found: dict[str, tuple[str, object, int]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode & 0o777
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()), 0)
        elif path.is_dir():
            found[name] = ("dir", None, mode)
        else:
            found[name] = ("file", path.read_bytes(), mode)
    return found


@pytest.fixture
def tree(tmp_path: Path, rng: random.Random) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / ("deep" * 40) / ("er" * 60)).mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    (root / "a").write_bytes(b"hello")
    (root / "zero").write_bytes(b"")
    (root / "sub" / "big").write_bytes(rng.randbytes(700_001))
    (root / "sub" / ("deep" * 40) / ("er" * 60) / "long-é漢").write_bytes(b"x" * 512)
    (root / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "tool").chmod(0o755)
    (root / "sub" / "up").symlink_to("../a")
    os.link(root / "a", root / "sub" / "hard")
    os.mkfifo(root / "fifo")
    return root


@pytest.mark.parametrize("step", [1_000_000, 10_000, 513, 97])
def test_what_is_packed_is_unpacked_the_same(tree: Path, tmp_path: Path, step: int) -> None:
    done = unpack(b"".join(tar_chunks(tree)), tmp_path / "out", step=step)

    (tree / "fifo").unlink()
    assert tree_of(tmp_path / "out") == tree_of(tree)
    assert done.skipped == []
    assert (tmp_path / "out/sub/hard").stat().st_ino == (tmp_path / "out/a").stat().st_ino
    for name in ("a", "sub", "tool"):
        assert (tmp_path / "out" / name).stat().st_mtime_ns == (tree / name).stat().st_mtime_ns


def test_other_programs_read_what_is_packed(tree: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(b"".join(tar_chunks(tree)))) as archive:
        names = archive.getnames()
        owners = {(m.uid, m.gid, m.uname) for m in archive.getmembers()}

    assert "sub/big" in names
    assert "fifo" not in names
    assert not any(name.startswith("/") for name in names)
    assert owners == {(0, 0, "")}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_what_other_programs_pack_is_unpacked(tree: Path, tmp_path: Path, form: int) -> None:
    raw = io.BytesIO()
    (tree / "fifo").unlink()
    with tarfile.open(fileobj=raw, mode="w", format=form) as archive:
        archive.add(tree, arcname=".")

    unpack(raw.getvalue(), tmp_path / "out")

    assert tree_of(tmp_path / "out") == tree_of(tree)


def test_packing_takes_constant_memory(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    with open(root / "sparse", "wb") as file:
        file.truncate(64 << 20)

    assert max(len(chunk) for chunk in tar_chunks(root)) < 1 << 20


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, (3 << 16) + 5, 4 << 20])
def test_zeroes_become_holes_and_read_the_same(tmp_path: Path, size: int, rng: random.Random) -> None:
    data = bytearray(size)
    for _ in range(3 if size > 1 << 17 else 0):
        at = rng.randrange(size)
        data[at] = 1
    root = tmp_path / "tree"
    root.mkdir()
    (root / "f").write_bytes(data)

    unpack(b"".join(tar_chunks(root)), tmp_path / "out")

    assert (tmp_path / "out/f").read_bytes() == data
    assert (tmp_path / "out/f").stat().st_blocks * 512 <= 4 << 16


def test_a_file_that_shrinks_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "f").write_bytes(bytes(2 << 20))
    chunks = tar_chunks(root)
    next(chunks)

    os.truncate(root / "f", 10)

    with pytest.raises(ConflictError):
        list(chunks)


# ---- hostile archives ----

ESCAPES: dict[str, Callable[[str], bytes]] = {
    "absolute name": lambda out: member(f"{out}/evil", data=b"x"),
    "name with ..": lambda out: member("../evil", data=b"x"),
    "name with .. inside": lambda out: member("a/../../evil", data=b"x"),
    "through a link to outside": lambda out: member("l", tarfile.SYMTYPE, link=out) + member("l/evil", data=b"x"),
    "through a relative link": lambda out: member("l", tarfile.SYMTYPE, link="..") + member("l/evil", data=b"x"),
    "through a link to inside, then up": lambda out: (
        member("d/e/", tarfile.DIRTYPE)
        + member("l", tarfile.SYMTYPE, link="d/e")
        + member("m", tarfile.SYMTYPE, link="l/../../..")
        + member("m/evil", data=b"x")
    ),
    "hard link to outside": lambda out: (
        member("h", tarfile.LNKTYPE, link=f"{out}/victim") + member("h", data=b"overwritten")
    ),
    "hard link with ..": lambda out: member("h", tarfile.LNKTYPE, link="../victim") + member("h", data=b"overwritten"),
    "hard link through a link": lambda out: (
        member("l", tarfile.SYMTYPE, link=".") + member("h", tarfile.LNKTYPE, link="l/../../victim")
    ),
    "file over a link to a file outside": lambda out: (
        member("v", tarfile.SYMTYPE, link="../victim") + member("v", data=b"overwritten")
    ),
    "directory over a link": lambda out: (
        member("l", tarfile.SYMTYPE, link="x") + member("l", tarfile.DIRTYPE) + member("l/evil", data=b"x")
    ),
}


@pytest.mark.parametrize("how", ESCAPES)
def test_nothing_is_written_outside_the_target(tmp_path: Path, how: str) -> None:
    (tmp_path / "victim").write_text("precious")
    target = tmp_path / "target"

    unpack(ESCAPES[how](str(tmp_path)) + END, target)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["target", "victim"]
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "victim").stat().st_nlink == 1


@pytest.mark.parametrize("link", ["/etc/passwd", "..", "../x", "a/../../x", "a/../b"])
def test_links_that_lead_or_could_lead_out_are_left_out_and_named(tmp_path: Path, link: str) -> None:
    done = unpack(member("l", tarfile.SYMTYPE, link=link) + member("ok", data=b"1") + END, tmp_path / "t")

    assert not os.path.lexists(tmp_path / "t/l")
    assert (tmp_path / "t/ok").read_bytes() == b"1"
    assert len(done.skipped) == 1


def test_a_link_of_the_caller_in_the_target_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t/l").symlink_to(tmp_path / "outside")

    done = unpack(member("l/evil", data=b"x") + END, tmp_path / "t")

    assert list((tmp_path / "outside").iterdir()) == []
    assert len(done.skipped) == 1


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_left_out(tmp_path: Path, kind: bytes) -> None:
    done = unpack(member("dev", kind, devmajor=1, devminor=5) + member("ok") + END, tmp_path / "t")

    assert [p.name for p in (tmp_path / "t").iterdir()] == ["ok"]
    assert len(done.skipped) == 1


def test_set_id_bits_are_not_taken_over(tmp_path: Path) -> None:
    unpack(member("f", mode=0o6755) + member("d", tarfile.DIRTYPE, mode=0o7777) + END, tmp_path / "t")

    assert (tmp_path / "t/f").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "t/d").stat().st_mode & 0o7777 == 0o777


def test_more_bytes_than_allowed_are_an_error_before_they_are_written(tmp_path: Path) -> None:
    info = tarfile.TarInfo("huge")
    info.size = 1 << 50

    with pytest.raises(LimitError):
        unpack(info.tobuf(tarfile.PAX_FORMAT), tmp_path / "t", bytes_max=1 << 20)


def test_more_entries_than_allowed_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LimitError):
        unpack(b"".join(member(f"f{n}") for n in range(20)) + END, tmp_path / "t", entries=10)


def test_a_huge_extended_header_is_refused_unread(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40

    with pytest.raises(ProtocolError):
        unpack(info.tobuf(tarfile.USTAR_FORMAT if info.size < 1 << 33 else tarfile.GNU_FORMAT), tmp_path / "t")


@pytest.mark.parametrize("data", [b"x" * 512, member("a", data=b"1" * 600)[:700], b"", member("a")])
def test_what_is_no_whole_archive_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data, tmp_path / "t")


@pytest.mark.parametrize(
    "record", [b"99 path=x\n", b"x path=a\n", b"9 path=a", b"0 path=a\n", b"-5 a=b\n", b"11 size=-1\n"]
)
def test_malformed_extended_headers_are_an_error(tmp_path: Path, record: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    head = info.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512)

    with pytest.raises(ProtocolError):
        unpack(head + member("a") + END, tmp_path / "t")


def test_any_damage_gives_a_typed_error_or_stays_inside(tmp_path: Path, rng: random.Random) -> None:
    (tmp_path / "victim").write_text("precious")
    good = b"".join(
        [
            member("d/", tarfile.DIRTYPE),
            member("d/f", data=b"1" * 700),
            member("d/l", tarfile.SYMTYPE, link="f"),
            member("é" * 120, data=b"2"),
            member("d/h", tarfile.LNKTYPE, link="d/f"),
        ]
    )
    for n in range(400):
        damaged = bytearray(good + END)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(DsecError):
            unpack(bytes(damaged), tmp_path / f"t{n}", step=rng.randrange(1, 2_000), bytes_max=1 << 20)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not [p for p in tmp_path.iterdir() if p.name != "victim" and not p.name.startswith("t")]
