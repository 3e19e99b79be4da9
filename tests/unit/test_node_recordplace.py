"""Directories of records that are made ahead."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from dsec.node.recordplace import RecordPlace


def place_in(directory: Path) -> RecordPlace:
    records = directory / "records"
    records.mkdir()
    return RecordPlace(records, bytes_max=0, has_room=lambda: True)


async def filled(ahead: Path, count: int) -> list[Path]:
    until = time.monotonic() + 30.0
    while len(found := list(ahead.iterdir())) < count:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    return found


async def test_a_directory_made_ahead_becomes_the_next_one_and_another_is_made(tmp_path: Path) -> None:
    place, ahead = place_in(tmp_path), tmp_path / "ahead"
    place.start(ahead)
    inodes = {path.stat().st_ino for path in await filled(ahead, 4)}

    place.make(place.directory / "a")

    made = (place.directory / "a").stat()
    assert made.st_ino in inodes
    assert made.st_mode & 0o777 == 0o700
    await filled(ahead, 4)
    place.close()
    assert list(ahead.iterdir()) == []


async def test_directories_beyond_those_made_ahead_are_made_at_once(tmp_path: Path) -> None:
    place, ahead = place_in(tmp_path), tmp_path / "ahead"
    place.start(ahead)
    await filled(ahead, 4)

    for number in range(10):
        place.make(place.directory / str(number))

    assert len(list(place.directory.iterdir())) == 10
    place.close()


async def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    place, ahead = place_in(tmp_path), tmp_path / "ahead"
    place.start(ahead)
    await filled(ahead, 4)
    there = place.directory / "a"
    there.mkdir()
    (there / "execs.log").write_bytes(b"said")

    place.make(there)

    assert (there / "execs.log").read_bytes() == b"said"
    place.close()
    assert list(ahead.iterdir()) == []


async def test_what_a_killed_node_has_left_is_gone_at_the_next_start(tmp_path: Path) -> None:
    first, ahead = place_in(tmp_path), tmp_path / "ahead"
    first.start(ahead)
    await filled(ahead, 4)

    RecordPlace(first.directory, bytes_max=0, has_room=lambda: True).start(ahead)

    assert list(ahead.iterdir()) == []


async def test_without_room_for_them_none_is_made_ahead(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    place.start(tmp_path / "nowhere" / "ahead")

    place.make(place.directory / "a")

    assert (place.directory / "a").is_dir()
