"""Copying a tree that goes on changing: what passes copy, what they do not believe, and what comes out."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core import limits
from dsec.core.errors import CapacityError, DeadlineError, LimitError, StorageError
from dsec.image.scan import tree_digest
from dsec.storage.mirror import Mapped, Mirror

OLD_NS = 1_500_000_000_000_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


@pytest.fixture
def mirror(source: Path, tmp_path: Path) -> Iterator[Mirror]:
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Mirror(fd, tmp_path / "place")
    finally:
        os.close(fd)


def digest(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return tree_digest(fd).digest
    finally:
        os.close(fd)


def settle() -> None:
    """Until what was written is older than the moment that copies are not believed in."""
    time.sleep(0.25)


def test_what_is_in_an_emptied_directory_is_left_out_and_hides_nothing(source: Path, tmp_path: Path) -> None:
    for name in ("run/lock", "etc/run"):
        (source / name).mkdir(parents=True)
        (source / name / "pid").write_text("1")
    os.link(source / "run/lock/pid", source / "other")
    (source / "run").chmod(0o1777)
    os.setxattr(source / "run", "user.note", b"1")
    if os.geteuid() == 0:
        os.setxattr(source / "run", "trusted.overlay.opaque", b"y")
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mirror = Mirror(fd, tmp_path / "place", emptied=(b"run",))
        mirror.look(Mapped())
        mirror.take(within_s=30)
        tree = mirror.build()
    finally:
        os.close(fd)

    assert list((tree / "run").iterdir()) == []
    assert (stat.S_IMODE((tree / "run").stat().st_mode), os.listxattr(tree / "run")) == (0o1777, ["user.note"])
    assert ((tree / "etc/run/pid").read_text(), (tree / "other").read_text()) == ("1", "1")


@pytest.mark.parametrize("make", ["link", "file"])
def test_what_is_no_directory_is_not_emptied(source: Path, tmp_path: Path, make: str) -> None:
    (source / "run").symlink_to("var/run") if make == "link" else (source / "run").write_text("x")
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mirror = Mirror(fd, tmp_path / "place", emptied=(b"run",))
        mirror.take(within_s=30)
        tree = mirror.build()
    finally:
        os.close(fd)

    assert digest(tree) == digest(source)


def test_a_tree_is_copied_as_it_is(mirror: Mirror, source: Path) -> None:
    (source / "a/b").mkdir(parents=True)
    (source / "a/file").write_bytes(b"x" * 100_000)
    (source / "a/file").chmod(0o4755)
    os.link(source / "a/file", source / "a/b/other")
    (source / "link").symlink_to("/nowhere")
    os.mkfifo(source / "pipe", 0o600)
    os.mknod(source / "socket", stat.S_IFSOCK | 0o640)
    os.setxattr(source / "a", "user.note", b"\0\1")
    os.utime(source / "a/file", ns=(OLD_NS + 1, OLD_NS + 1))

    mirror.take(within_s=60)
    tree = mirror.build()

    assert digest(tree) == digest(source)
    assert (tree / "a/file").stat().st_ino == (tree / "a/b/other").stat().st_ino
    assert sorted(path.name for path in (tree.parent / "pool").iterdir()) == []


def test_holes_stay_holes(mirror: Mirror, source: Path) -> None:
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
        file.truncate(2 << 30)
    (source / "empty").touch()
    with (source / "hole").open("wb") as file:
        file.truncate(1 << 20)

    mirror.take(within_s=60)
    tree = mirror.build()

    copy = (tree / "sparse").stat()
    assert copy.st_size == 2 << 30
    assert copy.st_blocks * 512 < 1 << 20
    with (tree / "sparse").open("rb") as file:
        file.seek(1 << 30)
        assert file.read(4) == b"end\0"
    assert (tree / "hole").read_bytes() == bytes(1 << 20)


def test_what_has_not_changed_is_not_copied_again(mirror: Mirror, source: Path) -> None:
    for i in range(10):
        (source / f"f{i}").write_bytes(b"x" * 1000)
    settle()
    first = mirror.look(Mapped())
    (source / "f3").write_bytes(b"y" * 1000)
    (source / "f4").chmod(0o600)
    (source / "f5").unlink()
    (source / "f6").rename(source / "renamed")

    last = mirror.take(within_s=60)

    assert (first.copied_files, last.copied_files, last.entries) == (10, 3, 10)
    assert digest(mirror.build()) == digest(source)


def test_what_is_just_being_written_is_copied_again(mirror: Mirror, source: Path) -> None:
    (source / "f").write_bytes(b"one")

    mirror.look(Mapped())

    assert mirror.take(within_s=60).copied_files == 1


def test_a_mapped_file_is_not_believed_to_be_as_it_was(mirror: Mirror, source: Path) -> None:
    """The first write to a mapped page sets the times of its file, and the next ones do not."""
    path = source / "mapped"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        mapped[0:1] = b"a"
        settle()
        mirror.look(Mapped([b"/mapped"]))
        mapped[0:1] = b"b"

        assert mirror.take(within_s=60).copied_files == 1

    assert (mirror.build() / "mapped").read_bytes()[:1] == b"b"


@pytest.mark.parametrize("mapped", [Mapped(sure=False), Mapped([b"/is/not/there"])])
def test_when_it_is_not_known_what_is_mapped_all_is_copied_again(mirror: Mirror, source: Path, mapped: Mapped) -> None:
    (source / "f").write_bytes(b"one")
    settle()

    mirror.look(mapped)

    assert mirror.take(within_s=60).copied_files == 1


def test_where_times_tell_nothing_a_look_copies_nothing(source: Path, tmp_path: Path) -> None:
    (source / "f").write_bytes(b"one")
    settle()
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    mirror = Mirror(fd, tmp_path / "place", trust_times=False)

    assert mirror.look(Mapped()).copied_files == 0
    assert mirror.take(within_s=60).copied_files == 1
    os.close(fd)


def test_after_a_step_of_the_clock_all_is_copied_again(
    mirror: Mirror, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "f").write_bytes(b"one")
    settle()
    mirror.look(Mapped())
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3_600_000_000_000)

    assert mirror.take(within_s=60).copied_files == 1


def test_a_file_of_the_same_inode_is_another_file(mirror: Mirror, source: Path) -> None:
    (source / "f").write_bytes(b"one")
    settle()
    mirror.look(Mapped())
    (source / "f").unlink()
    (source / "f").symlink_to("elsewhere")  # often of the inode that was freed

    mirror.take(within_s=60)

    assert str((mirror.build() / "f").readlink()) == "elsewhere"


def test_what_vanishes_during_a_look_is_left_to_the_next_pass(
    mirror: Mirror, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "a").write_bytes(b"one")
    os.link(source / "a", source / "b")

    def gone(*_: object) -> int:
        raise FileNotFoundError(2, "gone")

    with monkeypatch.context() as patch:
        patch.setattr("dsec.storage.mirror._open", gone)
        assert mirror.look(Mapped()).copied_files == 0
    with monkeypatch.context() as patch:
        patch.setattr("dsec.storage.mirror._open", gone)
        with pytest.raises(FileNotFoundError):
            mirror.take(within_s=60)
    assert mirror.take(within_s=60).copied_files == 1


def test_the_last_pass_has_a_deadline(mirror: Mirror, source: Path) -> None:
    (source / "f").write_bytes(b"x" * 1000)

    with pytest.raises(DeadlineError):
        mirror.take(within_s=-1.0)


def test_a_full_disk_is_told_before_it_is_full(mirror: Mirror, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "f").write_bytes(b"x" * 1000)
    monkeypatch.setattr("dsec.storage.mirror._SPACE_CHECK_BYTES", 100)
    monkeypatch.setattr("dsec.storage.space.free_bytes", lambda _: 0)

    with pytest.raises(CapacityError):
        mirror.take(within_s=60)


@pytest.mark.parametrize(("name", "bound"), [("IMAGE_ENTRIES_MAX", 3), ("IMAGE_BYTES_MAX", 10), ("IMAGE_DEPTH_MAX", 1)])
def test_what_is_too_much_is_refused(
    mirror: Mirror, source: Path, monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    (source / "a/b/c").mkdir(parents=True)
    (source / "a/f").write_bytes(b"x" * 100)
    monkeypatch.setattr(limits, name, bound)

    with pytest.raises(LimitError):
        mirror.take(within_s=60)


def test_a_pipe_that_takes_the_place_of_a_file_holds_nobody_up(mirror: Mirror, source: Path) -> None:
    os.mkfifo(source / "pipe")

    mirror.look(Mapped())
    mirror.take(within_s=60)

    assert stat.S_ISFIFO((mirror.build() / "pipe").lstat().st_mode)


@pytest.mark.root
def test_ids_that_no_sandbox_has_become_nobody_and_lose_their_rights(mirror: Mirror, source: Path) -> None:
    path = source / "agent"
    path.write_bytes(b"#!")
    os.chown(path, 65_535, 0)
    path.chmod(0o4755)

    mirror.take(within_s=60)
    copy = (mirror.build() / "agent").stat()

    assert (copy.st_uid, copy.st_gid, stat.S_IMODE(copy.st_mode)) == (65_534, 0, 0o755)
    assert "nobody" in str(mirror.dropped)


@pytest.mark.root
def test_marks_of_the_overlay_are_kept_only_where_they_are_part_of_a_layer(mirror: Mirror, source: Path) -> None:
    (source / "d").mkdir()
    os.mknod(source / "d/gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    os.mknod(source / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    for name in ("opaque", "impure", "origin", "nlink"):
        os.setxattr(source / "d", f"trusted.overlay.{name}", b"y")

    mirror.take(within_s=60)
    tree = mirror.build()

    assert os.listxattr(tree / "d") == ["trusted.overlay.opaque"]
    gone = (tree / "d/gone").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    assert not (tree / "device").exists()
    assert str(mirror.dropped) == "1 device nodes left out"


@pytest.mark.root
@pytest.mark.parametrize("mark", ["metacopy", "redirect"])
def test_a_layer_that_is_not_whole_is_refused(mirror: Mirror, source: Path, mark: str) -> None:
    (source / "f").write_bytes(b"")
    os.setxattr(source / "f", f"trusted.overlay.{mark}", b"/x")

    with pytest.raises(StorageError, match=mark):
        mirror.take(within_s=60)
