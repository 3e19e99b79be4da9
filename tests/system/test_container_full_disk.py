"""A disk that is full: each operation says so, none leaves half a file, and all goes on when there is room again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import FileError
from dsec.core.limits import MIB
from dsec.sdk.sandbox import AsyncSandbox
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(small_store: Path) -> AsyncIterator[AsyncSandbox]:
    """With 20 MiB for files, of which all but 100 KiB are taken."""
    with private_place(small_store, settings={"container": {"disk": "tmpfs"}}) as place:
        async with served(place) as (_, client):
            async with await client.create(ENVIRONMENT, disk="20MiB", memory="256MiB") as sandbox:
                await sandbox.exec("mkdir /work; echo old > /work/kept")
                await sandbox.exec("head -c 60000000 /dev/zero > /big; head -c 100000 /dev/zero > /some; rm /some")
                yield sandbox


async def _content(sandbox: AsyncSandbox) -> list[str]:
    return sorted(entry.name for entry in await sandbox.files.list("/work"))


async def test_every_way_to_write_says_that_the_disk_is_full_and_leaves_nothing(
    sandbox: AsyncSandbox, tmp_path: Path
) -> None:
    large = os.urandom(10 * MIB)
    (tmp_path / "tree").mkdir()
    (tmp_path / "large").write_bytes(large)
    (tmp_path / "tree" / "large").write_bytes(large)

    with pytest.raises(FileError) as small:
        await sandbox.files.write("/work/kept", large[:MIB])
    with pytest.raises(FileError) as one:
        await sandbox.upload(tmp_path / "large", "/work/kept")
    with pytest.raises(FileError) as tree:
        await sandbox.upload(tmp_path / "tree", "/work/tree")

    assert [error.value.detail["errno"] for error in (small, one, tree)] == ["ENOSPC"] * 3
    assert "disk is full" in str(one.value)
    assert await sandbox.files.read("/work/kept") == "old\n"
    assert await _content(sandbox) == ["kept", "tree"]


async def test_commands_and_sessions_run_and_their_output_is_whole(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("seq 1 100000; echo more > /work/new; echo $?; cat /big > /work/copy")
    session = sandbox.session("s")
    said = await session.exec("x=5; echo $x; echo $x > /work/session")

    assert result.stdout.splitlines()[:-1] == [str(number) for number in range(1, 100_001)]
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert (said.stdout, said.exit_code) == ("5\n", 1)
    await sandbox.exec("rm /big /work/*")
    assert (await session.exec("echo $x > /work/session; cat /work/session")).stdout == "5\n"
    await sandbox.files.write("/work/after", b"x" * MIB)
