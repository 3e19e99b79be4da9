"""Files of a container, with everything planted that could lead a careless reader or writer to the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError, FileError, NotFoundError
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from tests.system.container_place import ENVIRONMENT

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SECRET = b"only on the host"


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await client.create(ENVIRONMENT) as sandbox:
        yield sandbox


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host, whose content must stay as it is and where it is."""
    directory = tmp_path / "host"
    directory.mkdir()
    (directory / "secret").write_bytes(SECRET)
    yield directory
    assert sorted(path.name for path in directory.iterdir()) == ["secret"]
    assert (directory / "secret").read_bytes() == SECRET


def ways_to(target: Path) -> dict[str, str]:
    """Links that lead to a path of the host, if they are followed by somebody outside."""
    return {
        "absolute": str(target),
        "parents": "../" * 40 + str(target).lstrip("/"),
        "proc_self_root": f"/proc/self/root{target}",
        "proc_1_root": f"/proc/1/root{target}",
        "proc_1_cwd": f"/proc/1/cwd{target}",
        "proc_self_fd": f"/proc/self/fd/3/../../../../..{target}",
    }


async def plant(sandbox: AsyncSandbox, links: dict[str, str]) -> None:
    await sandbox.files.mkdir("/plant", parents=True)
    for name, target in links.items():
        await sandbox.files.symlink(f"/plant/{name}", target)


async def test_reading_through_planted_links_never_reads_the_host(sandbox: AsyncSandbox, host: Path) -> None:
    links = ways_to(host / "secret")
    await plant(sandbox, links)
    for name in links:
        with pytest.raises((NotFoundError, FileError)):
            await sandbox.files.read_bytes(f"/plant/{name}")

    # The same path, made inside, is what they lead to.
    await sandbox.files.mkdir(str(host), parents=True)
    await sandbox.files.write(str(host / "secret"), b"inside")
    assert await sandbox.files.read_bytes("/plant/absolute") == b"inside"
    assert await sandbox.files.read_bytes("/plant/parents") == b"inside"


async def test_writing_through_planted_links_never_writes_the_host(sandbox: AsyncSandbox, host: Path) -> None:
    links = {**ways_to(host / "new"), **{f"d_{name}": path for name, path in ways_to(host).items()}}
    await plant(sandbox, links)
    for name in links:
        path = f"/plant/{name}/new" if name.startswith("d_") else f"/plant/{name}"
        with contextlib.suppress(DsecError):
            await sandbox.files.write(path, b"written")
        with contextlib.suppress(DsecError):
            await sandbox.files.mkdir(f"{path}-made", parents=True)
        with contextlib.suppress(DsecError):
            await sandbox.files.chmod(path, 0o777)
        with contextlib.suppress(DsecError):
            await sandbox.files.move("/etc/passwd", f"{path}-moved")
        with contextlib.suppress(DsecError):
            await sandbox.files.remove(path, recursive=True)
    # What that did to the host is looked at by the fixture.
    assert (await sandbox.exec("true")).ok


async def test_uploads_through_planted_directories_stay_inside(
    sandbox: AsyncSandbox, host: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").write_bytes(b"uploaded")
    links = ways_to(host)
    await plant(sandbox, links)
    for name in links:
        with contextlib.suppress(DsecError):
            await sandbox.upload(source, f"/plant/{name}")
        with contextlib.suppress(DsecError):
            await sandbox.upload(source / "below" / "file", f"/plant/{name}/file")
    # Also where the tree that is written into has a link where a directory is expected.
    await sandbox.files.mkdir("/target")
    await sandbox.files.symlink("/target/below", str(host))
    with contextlib.suppress(DsecError):
        await sandbox.upload(source, "/target")


async def test_a_downloaded_tree_brings_links_but_nothing_through_them(
    sandbox: AsyncSandbox, host: Path, tmp_path: Path
) -> None:
    await plant(sandbox, {**ways_to(host / "secret"), "directory": str(host)})
    await sandbox.exec("mkfifo /plant/fifo; mkdir '/plant/a\nb'; echo ok > '/plant/a\nb/file'; ln -s a /plant/a2")
    target = tmp_path / "target"

    async with asyncio.timeout(60):
        await sandbox.download("/plant", target)

    assert (target / "a\nb" / "file").read_text() == "ok\n"
    for path in target.rglob("*"):
        assert path.is_symlink() or path.is_dir() or path.read_bytes() != SECRET
        if path.is_symlink():
            assert path.resolve().is_relative_to(target.resolve()), f"{path} leads to {path.readlink()}"


async def test_a_fifo_or_device_holds_nobody_up(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("mkfifo /tmp/fifo")
    async with asyncio.timeout(60):
        for path in ("/tmp/fifo", "/dev/zero", "/dev/tty"):
            with pytest.raises(DsecError):
                await sandbox.files.read_bytes(path, max_bytes=100)
        assert (await sandbox.files.stat("/tmp/fifo")).kind == "fifo"
        assert (await sandbox.exec("echo works")).stdout == "works\n"


_SWAP = """
import os, sys
path, other = sys.argv[1], sys.argv[2]
print("on", flush=True)
while True:
    os.symlink(other, path + ".new"); os.rename(path + ".new", path)
    with open(path + ".new", "w") as file: file.write("inside")
    os.rename(path + ".new", path)
"""


async def test_a_file_that_is_swapped_for_a_link_while_it_is_read_gives_nothing_of_the_host(
    sandbox: AsyncSandbox, host: Path, tmp_path: Path
) -> None:
    await sandbox.files.mkdir("/swap")
    for name, target in (("file", host / "secret"), ("other", f"/proc/1/root{host}/secret")):
        await sandbox.start(["python3", "-c", _SWAP, f"/swap/{name}", str(target)])
    seen = set()
    for number in range(60):
        for name in ("file", "other"):
            with contextlib.suppress(DsecError):
                seen.add(await sandbox.files.read_bytes(f"/swap/{name}"))
            with contextlib.suppress(DsecError):
                await sandbox.files.write(f"/swap/{name}", b"written")
        if number % 20 == 0:
            with contextlib.suppress(DsecError):
                await sandbox.download("/swap", tmp_path / f"swap-{number}")
    found = {path.read_bytes() for path in tmp_path.glob("swap-*/*") if path.is_file()}

    assert (seen | found) <= {b"inside", b"written", b""}
    assert seen


async def test_a_directory_that_is_swapped_for_a_link_never_leads_out(
    sandbox: AsyncSandbox, host: Path, tmp_path: Path
) -> None:
    swap = """
import os, sys
print("on", flush=True)
while True:
    os.rename("/walk/d", "/walk/e"); os.symlink(sys.argv[1], "/walk/d")
    os.unlink("/walk/d"); os.rename("/walk/e", "/walk/d")
"""
    await sandbox.files.mkdir("/walk/d", parents=True)
    await sandbox.start(["python3", "-c", swap, str(host)])
    (tmp_path / "source" / "d").mkdir(parents=True)
    (tmp_path / "source" / "d" / "up").write_bytes(b"x")
    for number in range(40):
        with contextlib.suppress(DsecError):
            await sandbox.files.write("/walk/d/secret", b"written")
        with contextlib.suppress(DsecError):
            await sandbox.upload(tmp_path / "source", "/walk")
        with contextlib.suppress(DsecError):
            await sandbox.files.remove("/walk/d/secret")
        with contextlib.suppress(DsecError):
            assert SECRET not in await sandbox.files.read_bytes("/walk/d/secret")
        if number % 10 == 0:
            with contextlib.suppress(DsecError):
                await sandbox.download("/walk", tmp_path / f"walk-{number}")
    for path in tmp_path.glob("walk-*/**/*"):
        assert not path.is_file() or path.read_bytes() != SECRET


async def test_names_that_point_upwards_stay_inside(sandbox: AsyncSandbox, host: Path) -> None:
    paths = [f"/../../..{host}/secret", f"/tmp/../../../..{host}/secret", f"/proc/self/cwd/../..{host}/secret"]
    for path in paths:
        with pytest.raises((NotFoundError, FileError)):
            await sandbox.files.read_bytes(path)
    for path in paths:
        with contextlib.suppress(DsecError):
            await sandbox.files.write(path, b"written")


async def test_trees_of_every_shape_go_in_and_come_out_alike(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_bytes(os.urandom(300_000))
    (source / "empty").mkdir()
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/er/file")
    os.link(source / "run.sh", source / "hard.sh")
    (source / "name with\nnewline").write_text("x")
    (source / "sparse").touch()
    os.truncate(source / "sparse", 50 << 20)

    await sandbox.upload(source, "/work")
    assert (await sandbox.exec("/work/hard.sh; cat /work/link | wc -c")).stdout.split() == ["ran", "300000"]
    await sandbox.download("/work", tmp_path / "back")

    assert _shape(tmp_path / "back") == _shape(source)


def _shape(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in root.rglob("*")
    }
