"""The SDK with real containers behind it: what only a kernel and a restarted node can show."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import dsec
from dsec import errors
from tests.system.container_place import ENVIRONMENT, Place, container_store, private_place, served

pytestmark = pytest.mark.root


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, native_binaries: dict[str, Path]) -> Path:
    return container_store(tmp_path_factory.getbasetemp())


@pytest.fixture
def place(store: Path) -> Iterator[Place]:
    with private_place(store) as place:
        yield place


@pytest.fixture
async def sb(place: Place) -> AsyncIterator[dsec.AsyncSandbox]:
    async with served(place) as (_, client), await client.create(ENVIRONMENT, memory="256MiB") as found:
        yield found


async def test_a_terminal_has_a_login_shell_a_size_and_a_status(sb: dsec.AsyncSandbox) -> None:
    async with await sb.pty(cols=101, rows=31) as terminal:
        await terminal.write("stty size; echo $((40 + 2))\n")
        shown = await _until(terminal, b"\n42\r\n")
        await terminal.resize(55, 22)
        await terminal.write("stty size; exit 5\n")
        shown += await _until(terminal, b"22 55")
        result = await terminal.wait(60)

    assert b"31 101" in shown
    assert result.exit_code == 5


async def _until(terminal: dsec.AsyncPty, mark: bytes) -> bytes:
    shown = b""
    async with asyncio.timeout(60):
        while mark not in shown:
            piece = await terminal.read()
            assert piece, shown
            shown += piece
    return shown


async def test_ctrl_c_on_a_terminal_reaches_what_runs_there(sb: dsec.AsyncSandbox) -> None:
    async with await sb.pty(
        ["sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done"]
    ) as t:
        await _until(t, b"ready")
        await t.write(b"\x03")
        await _until(t, b"caught")
        assert (await t.wait(60)).exit_code == 7


async def test_a_timeout_ends_the_whole_tree(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec("setsid sleep 777 & sleep 778 & wait", timeout_s=0.5, grace_s=0.5)

    assert result.timed_out
    left = await sb.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "sleep 77" not in left.stdout


async def test_a_cancelled_exec_ends_the_whole_tree(sb: dsec.AsyncSandbox) -> None:
    started = asyncio.Event()
    running = asyncio.create_task(sb.exec("sleep 778 & echo on; wait", on_stdout=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 60)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async with asyncio.timeout(60):
        while "sleep 778" in (await sb.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")).stdout:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_more_output_than_the_pipes_hold_arrives_whole(sb: dsec.AsyncSandbox) -> None:
    heard = 0

    def out(text: str) -> None:
        nonlocal heard
        heard += len(text)

    result = await sb.exec("head -c 30000000 /dev/zero | tr '\\0' x", on_stdout=out, record_bytes_max=1 << 26)

    assert (heard, len(result.stdout_bytes), result.gaps) == (30_000_000, 30_000_000, [])


async def test_large_stdin_passes_through_a_slow_reader(sb: dsec.AsyncSandbox) -> None:
    data = os.urandom(5 << 20)

    result = await sb.exec("sleep 0.3; cat", stdin=data)

    assert result.stdout_bytes == data


async def test_a_server_inside_is_reached_without_any_network(sb: dsec.AsyncSandbox) -> None:
    server = await sb.start(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"])
    async with asyncio.timeout(60):
        while True:
            try:
                connection = await sb.connect_port(8000)
                break
            except errors.FileError:
                await asyncio.sleep(0.02)

    async with connection:
        await connection.write(b"GET / HTTP/1.0\r\n\r\n")
        await connection.write_eof()
        answer = b"".join([piece async for piece in connection])

    assert answer.startswith(b"HTTP/1.0 200")
    await server.kill()


async def test_what_a_sandbox_made_to_lead_astray_is_left_out(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    await sb.exec(
        "mkdir -p /w/d && cd /w && echo fine > d/f && ln -s /etc/passwd abs && ln -s ../../../etc up"
        " && ln -s d/f in && mkfifo fifo && cp /bin/true suid && chmod 6755 suid && ln d/f hard"
        " && ln -s . here && ln -s here/../.. via",
        check=True,
    )

    done = await sb.download("/w", tmp_path / "out")

    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert names == ["d", "d/f", "hard", "here", "in", "suid"]
    assert stat.S_IMODE((tmp_path / "out/suid").stat().st_mode) == 0o755
    assert {line.partition(":")[0].removeprefix("./") for line in done.skipped} >= {"abs", "up", "via"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


async def test_uploads_belong_to_whom_they_are_for(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/f").write_text("x")
    await sb.exec("mkdir /w && chmod 777 /w", check=True)

    await sb.upload(tmp_path / "t", "/w/tree", user="user")
    await sb.upload(tmp_path / "t/f", "/w/file", user="user")
    await sb.upload(tmp_path / "t", "/w/roots")

    shown = await sb.exec("stat -c %u:%g /w/tree/f /w/file /w/roots/f", check=True)
    assert shown.stdout.split() == ["1000:1000", "1000:1000", "0:0"]


async def test_a_node_that_is_killed_and_comes_back_costs_no_output_and_runs_nothing_twice(place: Place) -> None:
    place.start_process()
    async with dsec.AsyncClient(place.url) as client:
        await place.ready(client)
        sb = await client.create(ENVIRONMENT, memory="256MiB")
        heard: list[str] = []
        killed = asyncio.Event()

        def out(text: str) -> None:
            heard.append(text)
            if len("".join(heard)) > 1_000 and not killed.is_set():
                place.kill_node()
                place.start_process()
                killed.set()

        result = await sb.exec(
            "echo run >> /log; i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); sleep 0.001; done",
            on_stdout=out,
        )

        whole = "".join(f"line {n}\n" for n in range(2_000))
        assert killed.is_set()
        assert (result.stdout, "".join(heard), result.gaps) == (whole, whole, [])
        assert await sb.files.read("/log") == "run\n"
        await sb.destroy()


async def test_a_command_that_outlives_its_client_is_found_again(place: Place) -> None:
    async with served(place) as (_, client):
        sb = await client.create(ENVIRONMENT, memory="256MiB")
        process = await sb.start("echo before; cat", stdin=True)
        await client.close()

        async with dsec.AsyncClient(place.url) as other:
            again = await (await other.connect(sb.id)).attach(process.id)
            await again.write("after\n")
            await again.close_stdin()
            assert (await again.wait(60)).stdout == "before\nafter\n"
        await sb.destroy()
