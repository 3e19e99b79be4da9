"""A run directory that is full or cannot be written: said in words, with its name, and nothing half made stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, DsecError, LaunchError, StorageError
from dsec.testing.waiting import eventually
from dsec.wire.environments import DirectorySource
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root


@pytest.fixture
def small(short_tmp: Path) -> Iterator[Path]:
    """A file system of a few pages."""
    directory = short_tmp / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory], check=True, timeout=60)
    yield directory
    subprocess.run(["umount", "-l", directory], check=True, timeout=60)


def fill(directory: Path) -> None:
    try:
        with (directory / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4_096)
    except OSError:
        return


def up(run: Path, state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsec.serve", "up", "--substrate", "fake"]
    return subprocess.run(
        [*command, "--run-dir", str(run), "--state-dir", str(state)], capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("which", ["run", "state"])
def test_a_full_directory_is_named(small: Path, short_tmp: Path, which: str) -> None:
    fill(small)
    other = short_tmp / "other"

    done = up(small, other) if which == "run" else up(other, small)

    assert done.returncode == 125
    assert str(small) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("which", ["run", "state"])
def test_a_directory_that_cannot_be_written_is_named(small: Path, short_tmp: Path, which: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True, timeout=60)
    other = short_tmp / "other"

    done = up(small, other) if which == "run" else up(other, small)

    assert done.returncode == 125
    assert str(small) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    """Its run directory is a small file system."""
    with private_place(small_store) as place:
        place.run.mkdir(mode=0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place.run], check=True, timeout=60)
        yield place
        subprocess.run(["umount", "-l", place.run], check=True, timeout=60)


async def test_creates_fail_while_the_run_directory_is_full_and_work_once_it_is_not(place: Place) -> None:
    async with served(place) as (service, client):
        fill(place.run)
        with pytest.raises(LaunchError) as refused:
            await client.create(ENVIRONMENT)
        (place.run / "fill").unlink()

        assert str(place.run) in refused.value.message
        await eventually(lambda: not list(service.node.registry))  # what could not be removed then is now
        async with await client.create(ENVIRONMENT) as sandbox:
            assert (await sandbox.exec("echo works")).stdout == "works\n"


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Another file system over it, of a few pages, for the time of the block."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True, timeout=60)


async def test_snapshots_and_builds_on_a_full_disk_say_so_and_leave_nothing(small_store: Path, tmp_path: Path) -> None:
    source = DirectorySource(path=str(tmp_path / "source"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(os.urandom(1 << 20))
    with private_place(small_store) as place:
        async with served(place) as (_, client), await client.create(ENVIRONMENT) as sandbox:
            await sandbox.files.write("/large", os.urandom(1 << 20))
            with full(place.state / "staging"):
                with pytest.raises(CapacityError, match="disk of the store is full"):
                    await client.environments.build("large", source)
                with pytest.raises(DsecError, match=r"full|No space left") as refused:
                    await sandbox.snapshot("large")
                assert isinstance(refused.value, (CapacityError, StorageError))
                assert list((place.state / "staging").iterdir()) == []

            assert await client.snapshots.list() == []
            assert [found.name for found in await client.environments.list()] == [ENVIRONMENT]
            assert (await sandbox.exec("stat -c %s /large")).stdout == f"{1 << 20}\n"
            async with await client.create(snapshot=await sandbox.snapshot("large")) as other:
                assert (await other.exec("stat -c %s /large")).stdout == f"{1 << 20}\n"
