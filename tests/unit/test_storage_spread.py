"""Directories of sandboxes lie apart from each other where the file system can do so, and nothing fails where not."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.storage.spread import spread_children


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mkfs.ext4", path="/usr/sbin:/sbin") is None:
        pytest.skip("there is no mkfs.ext4 here")
    image, place = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    place.mkdir()
    environment = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-G", "1", str(image)], check=True, env=environment)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(place)], env=environment, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, env=environment)


def inodes(directory: Path, count: int = 24) -> set[int]:
    for number in range(count):
        (directory / str(number)).mkdir()
    return {(directory / str(number)).stat().st_ino for number in range(count)}


@pytest.mark.root
def test_directories_of_a_spread_one_lie_in_several_groups(ext4: Path) -> None:
    together, apart = ext4 / "together", ext4 / "apart"
    together.mkdir()
    apart.mkdir()

    spread_children(apart)
    spread_children(apart)

    groups = os.statvfs(ext4).f_files // 4  # of this size there are four
    assert len({inode // groups for inode in inodes(together)}) == 1
    assert len({inode // groups for inode in inodes(apart)}) > 1


@pytest.mark.root
def test_other_flags_of_the_directory_stay(ext4: Path) -> None:
    subprocess.run(["chattr", "+A", str(ext4)], check=True)

    spread_children(ext4)

    fd = os.open(ext4, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("i", fcntl.ioctl(fd, 0x80086601, bytes(4)))
    finally:
        os.close(fd)
    assert flags & 0x20080 == 0x20080


def test_a_file_system_without_such_a_thing_is_left_as_it_is(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    spread_children(shared if shared.is_dir() else tmp_path)
