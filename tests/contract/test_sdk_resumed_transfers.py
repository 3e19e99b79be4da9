"""Uploads and downloads that were interrupted go on where they were, and notice what has changed in between."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec import errors
from dsec.testing.waiting import eventually
from tests.contract.sdk_service import CuttingProxy, RunningService

SIZE = 24 << 20
PROGRAM = (
    "import dsec, sys; sb = dsec.Sandbox.connect(sys.argv[1]); getattr(sb, sys.argv[2])(*sys.argv[3:5], resume=True)"
)


@pytest.fixture
async def sb(service: RunningService) -> AsyncIterator[dsec.AsyncSandbox]:
    async with dsec.AsyncClient(service.url) as client, await client.create("base", backend="fake") as made:
        yield made


@pytest.fixture
def source(short_tmp: Path, rng: random.Random) -> Path:
    path = short_tmp / "source"
    path.write_bytes(rng.randbytes(SIZE))
    return path


async def killed_in_the_middle(proxy: CuttingProxy, sb: dsec.AsyncSandbox, *arguments: str | Path) -> None:
    """A process whose connection stands still after a third of the file, and which is then killed."""
    environment = {**os.environ, "DSEC_URL": proxy.url}
    command = [sys.executable, "-c", PROGRAM, sb.id, *map(str, arguments)]
    process = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    try:
        await eventually(lambda: proxy.stalled or process.poll() is not None, deadline_s=60)
        assert process.poll() is None
    finally:
        process.kill()
        await asyncio.to_thread(process.wait, 30)


async def test_an_upload_of_a_killed_client_goes_on_where_it_was(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path
) -> None:
    proxy.stall_request_bytes = SIZE // 3
    await killed_in_the_middle(proxy, sb, "upload", source, "/data/big")
    (part,) = await sb.files.list("/data")
    had = part.size
    proxy.stall_request_bytes, proxy.request_bytes_seen = None, 0

    async with dsec.AsyncClient(proxy.url) as client:
        again = await client.connect(sb.id)
        done = await again.upload(source, "/data/big", resume=True)

    assert 0 < had < SIZE // 2
    assert done.bytes == SIZE
    assert proxy.request_bytes_seen < SIZE - had + (1 << 20)
    assert [entry.name for entry in await sb.files.list("/data")] == ["big"]
    assert await sb.files.read_bytes("/data/big") == source.read_bytes()


async def test_what_is_wrong_in_the_part_of_an_upload_is_sent_again(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path
) -> None:
    proxy.stall_request_bytes = SIZE // 2
    await killed_in_the_middle(proxy, sb, "upload", source, "/wrong/big")
    proxy.stall_request_bytes = None
    (part,) = await sb.files.list("/wrong")
    await sb.files.write(f"/wrong/{part.name}", b"not these", offset=part.size // 2)

    await sb.upload(source, "/wrong/big", resume=True)

    assert await sb.files.read_bytes("/wrong/big") == source.read_bytes()


async def test_another_file_of_the_same_name_does_not_go_on_with_the_part_of_the_first(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path, rng: random.Random
) -> None:
    proxy.stall_request_bytes = SIZE // 3
    await killed_in_the_middle(proxy, sb, "upload", source, "/other/big")
    proxy.stall_request_bytes = None
    source.write_bytes(rng.randbytes(SIZE))

    await sb.upload(source, "/other/big", resume=True)

    assert await sb.files.read_bytes("/other/big") == source.read_bytes()


async def test_a_file_that_is_changed_while_it_is_sent_is_a_conflict(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path
) -> None:
    proxy.stall_request_bytes = SIZE // 3
    async with dsec.AsyncClient(proxy.url) as client:
        sending = asyncio.create_task((await client.connect(sb.id)).upload(source, "/grown/big"))
        await eventually(lambda: proxy.stalled, deadline_s=60)
        with source.open("ab") as file:
            file.write(b"more")
        proxy.go_on()

        with pytest.raises(errors.ConflictError, match="was changed while it was being uploaded"):
            await sending

    assert await sb.files.list("/grown") == []


async def test_a_download_of_a_killed_client_goes_on_where_it_was(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path, short_tmp: Path
) -> None:
    await sb.upload(source, "/down/big")
    target = short_tmp / "to" / "big"
    target.parent.mkdir()
    proxy.stall_answer_bytes = SIZE // 3
    await killed_in_the_middle(proxy, sb, "download", "/down/big", target)
    (part,) = target.parent.iterdir()
    had = part.stat().st_size
    proxy.stall_answer_bytes, proxy.answer_bytes_seen = None, 0

    async with dsec.AsyncClient(proxy.url) as client:
        again = await client.connect(sb.id)
        done = await again.download("/down/big", target, resume=True)

    assert 0 < had < SIZE // 2
    assert done.bytes == SIZE
    assert proxy.answer_bytes_seen < SIZE - had + (1 << 20)
    assert list(target.parent.iterdir()) == [target]
    assert target.read_bytes() == source.read_bytes()


async def test_a_file_that_was_changed_since_its_download_began_is_a_conflict_and_then_comes_anew(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path, short_tmp: Path
) -> None:
    await sb.upload(source, "/changed/big")
    target = short_tmp / "to" / "big"
    target.parent.mkdir()
    proxy.stall_answer_bytes = SIZE // 3
    await killed_in_the_middle(proxy, sb, "download", "/changed/big", target)
    await sb.files.write("/changed/big", b"x", offset=0)

    with pytest.raises(errors.ConflictError, match="was changed since its download began"):
        await sb.download("/changed/big", target, resume=True)
    left = list(target.parent.iterdir())
    await sb.download("/changed/big", target, resume=True)

    assert left == []
    assert target.read_bytes() == b"x" + source.read_bytes()[1:]


async def test_two_downloads_do_not_write_one_part(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, source: Path, short_tmp: Path
) -> None:
    await sb.upload(source, "/twice/big")
    target = short_tmp / "twice"
    proxy.stall_answer_bytes = SIZE // 3
    async with dsec.AsyncClient(proxy.url) as client:
        first = asyncio.create_task((await client.connect(sb.id)).download("/twice/big", target, resume=True))
        await eventually(lambda: proxy.stalled, deadline_s=60)

        with pytest.raises(errors.ConflictError, match="by another download"):
            await sb.download("/twice/big", target, resume=True)

        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
