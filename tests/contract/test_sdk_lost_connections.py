"""Connections that break at any point lose nothing, double nothing and run nothing twice."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec import errors
from tests.contract.sdk_service import CuttingProxy, RunningService


@pytest.fixture
async def client(proxy: CuttingProxy) -> AsyncIterator[dsec.AsyncClient]:
    async with dsec.AsyncClient(proxy.url) as found:
        yield found


@pytest.fixture
async def sb(service: RunningService, client: dsec.AsyncClient) -> AsyncIterator[dsec.AsyncSandbox]:
    async with dsec.AsyncClient(service.url) as safe, await safe.create("base", backend="fake") as made:
        yield await client.connect(made.id)


async def test_output_is_whole_however_often_the_connection_breaks(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, rng: random.Random
) -> None:
    proxy.answer_bytes, proxy.cuts_left = rng.randrange(300_000, 400_000), 12
    heard: list[str] = []

    result = await sb.exec("seq 1 400000", on_stdout=heard.append)

    assert proxy.cuts >= 5
    assert result.stdout == "".join(heard) == "".join(f"{n}\n" for n in range(1, 400_001))
    assert result.gaps == []


async def test_characters_stay_whole_over_a_break_within_one(sb: dsec.AsyncSandbox, proxy: CuttingProxy) -> None:
    text = "漢🎈é" * 20_000
    await sb.files.write("/f", text)
    proxy.answer_bytes, proxy.cuts_left = 50_001, 4
    heard: list[str] = []

    await sb.exec(["cat", "/f"], on_stdout=heard.append)

    assert proxy.cuts == 4
    assert "".join(heard) == text


async def test_a_command_whose_answer_was_lost_does_not_run_twice(sb: dsec.AsyncSandbox, proxy: CuttingProxy) -> None:
    proxy.before_answer.append(b"POST /v1/sandboxes/" + sb.id.encode() + b"/execs")

    result = await sb.exec("echo x >> /log; echo done")

    assert proxy.cuts == 1
    assert result.stdout == "done\n"
    assert await sb.files.read("/log") == "x\n"
    assert len(await sb.execs()) == 1


async def test_a_create_whose_answer_was_lost_gives_one_sandbox(client: dsec.AsyncClient, proxy: CuttingProxy) -> None:
    proxy.before_answer.append(b"POST /v1/sandboxes ")

    made = await client.create("base", backend="fake", labels={"lost": "1"})

    assert proxy.cuts == 1
    assert [s.id for s in await client.list(labels={"lost": "1"})] == [made.id]
    await made.destroy()


async def test_a_batch_that_breaks_off_gives_each_sandbox_once(client: dsec.AsyncClient, proxy: CuttingProxy) -> None:
    proxy.answer_bytes, proxy.cuts_left = 4_000, 3

    made = await client.create_many(30, "base", backend="fake", labels={"batch": "1"})

    assert proxy.cuts == 3
    ids = {item.id for item in made if isinstance(item, dsec.AsyncSandbox)}
    assert len(ids) == 30
    assert {s.id for s in await client.list(labels={"batch": "1"})} == ids
    await asyncio.gather(*(s.destroy() for s in await client.list(labels={"batch": "1"})))


async def test_stdin_arrives_once(sb: dsec.AsyncSandbox, proxy: CuttingProxy) -> None:
    data = os.urandom(2 << 20)
    process = await sb.start("cat > /copy", stdin=True)
    proxy.request_bytes, proxy.cuts_left = 300_000, 5

    await process.write(data)
    await process.close_stdin()
    result = await process.wait()

    assert proxy.cuts == 5
    assert result.exit_code == 0
    assert await sb.files.read_bytes("/copy") == data


async def test_stdin_whose_answer_was_lost_arrives_once(sb: dsec.AsyncSandbox, proxy: CuttingProxy) -> None:
    process = await sb.start("cat", stdin=True)
    proxy.before_answer += [b"POST /v1/sandboxes/" + sb.id.encode() + b"/execs/" + process.id.encode() + b"/stdin"] * 2

    await process.write("once ")
    await process.write("only")
    await process.close_stdin()

    assert (await process.wait()).stdout == "once only"
    assert proxy.cuts == 2


async def test_a_download_goes_on_where_it_broke(sb: dsec.AsyncSandbox, proxy: CuttingProxy, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    await sb.files.write("/f", data)
    proxy.answer_bytes, proxy.cuts_left = 500_000, 6

    await sb.download("/f", tmp_path / "f")

    assert proxy.cuts >= 5
    assert (tmp_path / "f").read_bytes() == data


async def test_a_download_of_a_file_that_changed_meanwhile_is_an_error_and_leaves_nothing(
    service: RunningService, sb: dsec.AsyncSandbox, proxy: CuttingProxy, tmp_path: Path
) -> None:
    await sb.files.write("/f", bytes(2 << 20))
    proxy.answer_bytes, proxy.cuts_left = 500_000, 1
    first = sb.files.stream("/f")
    await anext(first)
    async with dsec.AsyncClient(service.url) as other:
        await (await other.connect(sb.id)).files.write("/f", bytes((2 << 20) + 1))

    with pytest.raises(errors.ConflictError):
        async for _ in first:
            pass

    assert list(tmp_path.iterdir()) == []


async def test_an_upload_goes_on_where_it_broke_and_leaves_no_part(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, tmp_path: Path
) -> None:
    data = os.urandom(10 << 20)
    (tmp_path / "f").write_bytes(data)
    proxy.request_bytes, proxy.cuts_left = 3 << 20, 3

    await sb.upload(tmp_path / "f", "/up/f")

    assert proxy.cuts == 3
    assert await sb.files.read_bytes("/up/f") == data
    assert [e.name for e in await sb.files.list("/up")] == ["f"]


async def test_an_upload_that_fails_for_good_leaves_no_part(
    service: RunningService, sb: dsec.AsyncSandbox, proxy: CuttingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.sdk.transfer._PROGRESS_STALLS_MAX", 2)
    (tmp_path / "f").write_bytes(bytes(10 << 20))
    proxy.request_bytes = 3_000  # never enough for the head of the file, always for anything else

    with pytest.raises(errors.UnavailableError):
        await sb.upload(tmp_path / "f", "/up/f")

    async with dsec.AsyncClient(service.url) as other:
        there = await other.connect(sb.id)
        assert not await there.files.exists("/up") or await there.files.list("/up") == []


async def test_a_tree_goes_up_and_comes_down_over_breaks(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy, tmp_path: Path
) -> None:
    (tmp_path / "in/d").mkdir(parents=True)
    for n in range(20):
        (tmp_path / f"in/d/f{n}").write_bytes(os.urandom(100_000))
    proxy.request_bytes, proxy.cuts_left = 900_000, 2
    await sb.upload(tmp_path / "in", "/w")
    proxy.request_bytes, proxy.answer_bytes, proxy.cuts_left = None, 900_000, 2
    await sb.download("/w", tmp_path / "out")

    assert proxy.cuts == 4
    for n in range(20):
        assert (tmp_path / f"out/d/f{n}").read_bytes() == (tmp_path / f"in/d/f{n}").read_bytes()


async def test_what_cannot_be_repeated_is_not_and_its_outcome_is_said(
    sb: dsec.AsyncSandbox, proxy: CuttingProxy
) -> None:
    await sb.files.write("/a", "1")
    proxy.before_answer.append(b"POST /v1/sandboxes/" + sb.id.encode() + b"/files:move")

    with pytest.raises(errors.UnavailableError) as caught:
        await sb.files.move("/a", "/b")

    assert caught.value.outcome is errors.Outcome.UNKNOWN
    assert await sb.files.read("/b") == "1"


async def test_a_service_that_is_away_is_said_soon_and_nothing_happened(short_tmp: Path) -> None:
    async with asyncio.timeout(60), dsec.AsyncClient(f"unix://{short_tmp}/nobody.sock") as client:
        with pytest.raises(errors.UnavailableError) as caught:
            await client.create("base", backend="fake")

    assert caught.value.outcome is errors.Outcome.UNCHANGED
    assert caught.value.hint


async def test_a_service_that_comes_back_soon_is_waited_for(service: RunningService, short_tmp: Path) -> None:
    proxy = CuttingProxy(short_tmp / "late.sock")

    async def come_back() -> asyncio.Server:
        await asyncio.sleep(0.2)
        return await proxy.serve(service.socket)

    coming = asyncio.create_task(come_back())
    async with dsec.AsyncClient(proxy.url) as client:
        assert (await client.health()).pid > 0
    await proxy.close(await coming)


async def test_when_there_is_no_room_the_time_that_the_service_says_is_waited(short_tmp: Path) -> None:
    answers = [
        b'HTTP/1.1 429 No\r\nContent-Length: %d\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{"code":"no_capacity",'
        b'"message":"full","outcome":"unchanged","retry_after_s":0.3}',
        b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n{"version":"9","node":"n","started_at":1}',
    ]
    asked: list[float] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(time.monotonic())
        text = answers[min(len(asked), len(answers)) - 1]
        writer.write(text % len(text.partition(b"\r\n\r\n")[2]))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, short_tmp / "s.sock")
    async with server, dsec.AsyncClient(f"unix://{short_tmp}/s.sock") as client:
        assert (await client.health()).version == "9"

    assert len(asked) == 2
    assert asked[1] - asked[0] >= 0.3


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 5\r\nConnection: close\r\n\r\noops!", errors.UnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]", errors.ProtocolError),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope", errors.PlatformError),
        (b"\x00\x01garbage\r\n\r\n", errors.UnavailableError),
    ],
)
async def test_whatever_answers_the_error_is_typed(short_tmp: Path, answer: bytes, kind: type[Exception]) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(say, short_tmp / "s.sock")
    async with server, dsec.AsyncClient(f"unix://{short_tmp}/s.sock", request_timeout_s=3) as client:
        with pytest.raises(kind):
            await client.health()
