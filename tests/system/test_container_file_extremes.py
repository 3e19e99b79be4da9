"""Files of a container at their extremes: odd names, holes, trees that change under the reader, huge directories."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError, InvalidArgumentError, LimitError
from dsec.core.limits import GIB, MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from tests.system.container_place import ENVIRONMENT

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NAMES = [
    b"line\nbreak",
    b"\xff\xfe not text",
    b"-rf",
    b" ",
    b"\\",
    b"*",
    b"x" * 255,
    "\U0001f600".encode() * 63,
    b"\x1b[2J",
]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await client.create(ENVIRONMENT) as sandbox:
        yield sandbox


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Beside the directory that is downloaded to: must stay as it is."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "canary").write_text("alive")
    yield directory
    assert [(path.name, path.read_text()) for path in directory.iterdir()] == [("canary", "alive")]


async def test_names_of_any_bytes_pass_everywhere(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "plain").write_bytes(b"plain")
    await sandbox.files.mkdir("/w")
    watch = await sandbox.files.watch("/w")
    for name in NAMES:
        await sandbox.files.write(b"/w/" + name, name)
        (source / os.fsdecode(name)).write_bytes(name)
    seen: set[bytes] = set()
    async with watch, asyncio.timeout(60):
        async for notice in watch:
            # A file that is written whole gets its name at the end, and nobody is told of the one before.
            assert notice.kind == "created"
            seen.add(notice.path_bytes or notice.path.encode())
            if seen >= set(NAMES):
                break

    listed = await sandbox.files.list("/w")
    assert sorted(entry.name_bytes or entry.name.encode() for entry in listed) == sorted(NAMES)
    for name in NAMES:
        assert await sandbox.files.read_bytes(b"/w/" + name) == name
    await sandbox.upload(source, "/up")
    await sandbox.download("/up", tmp_path / "back")
    compare = 'cd /w; for f in *; do test "$(cat -- "$f")" = "$(cat "/up/$f")" || exit 1; echo; done'
    assert (await sandbox.exec(compare, check=True)).stdout == "\n" * len(NAMES)
    back = {os.fsencode(path.name): path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert back == {name: name for name in [*NAMES, b"plain"]}
    for name in NAMES:
        await sandbox.files.move(b"/w/" + name, b"/w/" + name[::-1])
        await sandbox.files.remove(b"/w/" + name[::-1])


_SPARSE = """
import os
os.makedirs("/sparse/tree")
for name, size in (("/sparse/huge", 1 << 40), ("/sparse/tree/huge", 1 << 40), ("/sparse/some", 40 << 20)):
    with open(name, "wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"middle")
"""


async def test_files_with_holes_stay_small_or_are_refused(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    assert (await sandbox.exec(["python3", "-c", _SPARSE])).exit_code == 0
    (tmp_path / "back").mkdir()

    with pytest.raises(LimitError):
        await sandbox.download("/sparse/huge", tmp_path / "back")
    with pytest.raises(LimitError):
        await sandbox.download("/sparse/tree", tmp_path / "tree")
    with pytest.raises(LimitError):
        await sandbox.files.read_bytes("/sparse/huge", max_bytes=MIB)
    assert await sandbox.files.read_bytes("/sparse/huge", offset=1 << 39, length=6) == b"middle"
    await sandbox.download("/sparse/some", tmp_path / "back")

    (found,) = (tmp_path / "back").iterdir()
    assert found.stat().st_size == 40 * MIB
    assert found.stat().st_blocks * 512 <= MIB
    assert found.read_bytes()[20 * MIB : 20 * MIB + 6] == b"middle"
    assert not any(path.is_file() for path in (tmp_path / "tree").iterdir())


async def test_times_and_modes_are_kept(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tree" / "sub" / "tool").chmod(0o751)
    os.utime(tmp_path / "tree" / "sub" / "tool", ns=(1_234_567_890_123_456_789,) * 2)
    os.utime(tmp_path / "tree" / "sub", ns=(987_654_321_000_000_001,) * 2)

    await sandbox.upload(tmp_path / "tree", "/kept")
    await sandbox.download("/kept", tmp_path / "back")
    await sandbox.download("/kept/sub/tool", tmp_path / "one")

    for path in (tmp_path / "back" / "sub" / "tool", tmp_path / "one"):
        assert (path.stat().st_mode & 0o7777, path.stat().st_mtime_ns) == (0o751, 1_234_567_890_123_456_789)
    assert (tmp_path / "back" / "sub").stat().st_mtime_ns == 987_654_321_000_000_001


async def test_files_of_the_kernel_are_read_to_their_end(sandbox: AsyncSandbox) -> None:
    listed = await sandbox.exec("cd /sys; for f in kernel/*; do test -r $f -a -f $f && echo $f; done | head -5")
    for name in ["/proc/cpuinfo", "/proc/self/status", *(f"/sys/{name}" for name in listed.stdout.split())]:
        with contextlib.suppress(DsecError):  # not readable, although it seems so
            content = await sandbox.files.read_bytes(name)
            assert len(content) < 64 * 1024 * 16
    seqnum = await sandbox.files.read("/sys/kernel/uevent_seqnum")
    assert seqnum.strip().isdigit()


_SWAP = """
import os, sys, threading
os.makedirs("/swap/real/inner", exist_ok=True)
open("/swap/real/inner/canary", "w").write("inside")
open("/swap/real/canary", "w").write("inside")
target = sys.argv[1]
def put(kind):
    new = "/swap/.new"
    try:
        if kind == 0: open(new, "w").write("file")
        elif kind == 1: os.symlink(target, new)
        elif kind == 2: os.mkdir(new); open(new + "/canary", "w").write("inside")
        elif kind == 3: os.symlink("../" * 30 + target.lstrip("/"), new)
        elif kind == 4: os.symlink("/proc/self/root" + target, new)
        elif kind == 5: os.mkfifo(new)
        else: os.symlink("loop", new)
        try: os.unlink("/swap/t")
        except IsADirectoryError: os.system("rm -rf /swap/t")
        except OSError: pass
        os.rename(new, "/swap/t")
    except OSError:
        os.system("rm -rf /swap/.new /swap/t")
print("swapping", flush=True)
number = 0
while True:
    put(number % 7)
    number += 1
"""


async def test_what_is_swapped_without_end_leads_nobody_astray_and_holds_nobody_up(
    sandbox: AsyncSandbox, outside: Path, tmp_path: Path
) -> None:
    """File, directory, FIFO and links to a directory of ours take turns under one name, in all that the host does."""
    swapping = await sandbox.start(["python3", "-c", _SWAP, str(outside)])
    chunks = swapping.output()
    assert (await anext(chunks)).text == "swapping\n"
    await chunks.aclose()
    (tmp_path / "tree" / "t").mkdir(parents=True)
    (tmp_path / "tree" / "t" / "canary").write_text("uploaded")
    (tmp_path / "down").mkdir()
    work = [
        lambda: sandbox.files.read_bytes("/swap/t/canary"),
        lambda: sandbox.files.read_bytes("/swap/t"),
        lambda: sandbox.files.write("/swap/t/canary", b"dead"),
        lambda: sandbox.files.write("/swap/t/canary", b"dead", append=True),
        lambda: sandbox.files.write("/swap/t", b"dead", offset=0),
        lambda: sandbox.files.list("/swap/t"),
        lambda: sandbox.files.remove("/swap/t", recursive=True, missing_ok=True),
        lambda: sandbox.files.chmod("/swap/t/canary", 0o777),
        lambda: sandbox.upload(tmp_path / "tree", "/swap"),
        lambda: sandbox.upload(tmp_path / "tree" / "t" / "canary", "/swap/t/canary"),
        lambda: sandbox.download("/swap", tmp_path / "down"),
        lambda: sandbox.download("/swap/t", tmp_path / "down" / "t"),
    ]
    done = 0
    async with asyncio.timeout(200):
        for _ in range(12):
            for found in await asyncio.gather(*(one() for one in work), return_exceptions=True):
                assert not isinstance(found, BaseException) or isinstance(found, DsecError), repr(found)
                if isinstance(found, bytes):
                    assert b"alive" not in found
                done += not isinstance(found, BaseException)
    assert done > 0
    for path in (tmp_path / "down").rglob("*"):
        # Nothing that was brought leads out.
        assert path.resolve().is_relative_to(tmp_path / "down")
    await swapping.kill()
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_a_large_directory_is_listed_while_commands_run(sandbox: AsyncSandbox) -> None:
    names = "import os; os.mkdir('/many'); [open(f'/many/f{n:06}', 'w').close() for n in range(10_000)]"
    made = await sandbox.exec(["python3", "-c", names])
    assert made.exit_code == 0
    listing = asyncio.create_task(sandbox.files.list("/many"))

    results = [await sandbox.exec("echo x") for _ in range(5)]

    assert [result.stdout for result in results] == ["x\n"] * 5
    assert [entry.name for entry in await listing] == [f"f{number:06}" for number in range(10_000)]
    with pytest.raises(LimitError):
        await sandbox.files.list("/many", max_entries=1_000)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_two_gigabytes_go_up_and_come_down_in_constant_memory(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    digest = await asyncio.to_thread(_make_large, tmp_path / "large")
    await sandbox.exec("echo warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    up = await sandbox.upload(tmp_path / "large", "/large")
    down = await sandbox.download("/large", tmp_path / "back")

    assert up.bytes == down.bytes == 2 * GIB
    # Of client, API and node together, which are all in this process.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 * 1024
    assert await asyncio.to_thread(_digest, tmp_path / "back") == digest


def _make_large(path: Path) -> bytes:
    block = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for number in range(128):
            file.write(number.to_bytes(8) + block[8:])
    return _digest(path)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


async def test_only_files_and_directories_are_downloaded(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('/odd/socket')"
    assert (await sandbox.exec(f'mkfifo /fifo; mkdir /odd; mkfifo /odd/fifo; python3 -c "{bind}"')).exit_code == 0

    with pytest.raises(InvalidArgumentError, match="fifo"):
        await sandbox.download("/fifo", tmp_path)
    with pytest.raises(InvalidArgumentError, match="char"):
        await sandbox.download("/dev/null", tmp_path)
    done = await sandbox.download("/odd", tmp_path / "odd")

    assert list((tmp_path / "odd").iterdir()) == []
    assert [line.split(":")[0] for line in done.skipped] == ["fifo"]
