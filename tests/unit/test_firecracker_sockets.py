"""What comes by a monitor's sockets is bounded, and believed in its form only."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.backends.vm.firecracker_api import FaultError, FirecrackerApi
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.vsock import AgentVsock
from dsec.core.errors import DeadlineError
from dsec.testing.waiting import eventually

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(path: Path, serve: Serve) -> AsyncIterator[None]:
    open_now: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        with contextlib.suppress(OSError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_unix_server(handle, path)
    try:
        yield
    finally:
        for _ in range(5):
            await asyncio.sleep(0)  # what was taken has its handler then
        server.close()
        await asyncio.gather(*open_now)


def saying(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)
        await writer.drain()

    return serve


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s \r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.fixture
def api(short_tmp: Path) -> FirecrackerApi:
    return FirecrackerApi(short_tmp / "api", owner=os.geteuid())


async def test_a_request_is_whole_and_its_answer_is_read(api: FirecrackerApi, short_tmp: Path) -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        heard.append(await reader.readexactly(7))
        writer.write(http("200", b'{"a":[1]}'))
        await writer.drain()

    async with listening(short_tmp / "api", serve):
        await api.put("/x", {"y": 1})

    assert heard[0].startswith(b"PUT /x HTTP/1.1\r\n")
    assert b"Content-Length: 7\r\n" in heard[0]
    assert heard[1] == b'{"y":1}'


@pytest.mark.parametrize("method", ["put", "patch"])
async def test_a_refusal_has_the_monitor_s_words_and_no_more_of_them(
    api: FirecrackerApi, short_tmp: Path, method: str
) -> None:
    async with listening(short_tmp / "api", saying(http("400", b'{"fault_message":"%s"}' % (b"no " * 1000)))):
        with pytest.raises(FaultError) as error:
            await getattr(api, method)("/x", {})

    assert error.value.status == 400
    assert error.value.fault_message.startswith("no no")
    assert len(error.value.fault_message) <= 300


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 \r\n",
        b"no protocol at all\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\n{}",
        b"HTTP/1.1 200 \r\nContent-Length: 999999999\r\n\r\n{}",
        http("200", b"[1]"),
        http("200", b"{"),
        http("500", b"\xff\xfe"),
        b"HTTP/1.1 200 \r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    ],
    ids=[
        "nothing",
        "half a head",
        "no http",
        "half a body",
        "a huge body",
        "no object",
        "no json",
        "no text",
        "a head",
    ],
)
async def test_strange_answers_are_errors_of_the_monitor(api: FirecrackerApi, short_tmp: Path, answer: bytes) -> None:
    async with listening(short_tmp / "api", saying(answer)):
        with pytest.raises(MonitorError):
            await api.get("/")


async def test_an_answer_that_does_not_come_is_not_waited_for(api: FirecrackerApi, short_tmp: Path) -> None:
    async with listening(short_tmp / "api", never):
        with pytest.raises(DeadlineError, match="GET /vm"):
            await api.get("/vm", timeout_s=0.05)


async def test_a_monitor_that_is_gone_is_told(api: FirecrackerApi) -> None:
    with pytest.raises(MonitorError):
        await api.get("/")


async def test_what_is_no_socket_of_the_monitor_is_not_used(short_tmp: Path) -> None:
    async with listening(short_tmp / "real", saying(http("200", b"{}"))):
        (short_tmp / "api").symlink_to(short_tmp / "real")
        with pytest.raises(MonitorError):
            await FirecrackerApi(short_tmp / "api", owner=os.geteuid()).get("/")
        with pytest.raises(MonitorError, match="another's"):
            await FirecrackerApi(short_tmp / "real", owner=os.geteuid() + 1).get("/")


# ---- vsock ---------------------------------------------------------------------------------------


def vsock(directory: Path) -> AgentVsock:
    return AgentVsock(directory / "vsock", 1024, owner=os.geteuid())


class Hears(asyncio.Protocol):
    def __init__(self) -> None:
        self.heard = b""

    def data_received(self, data: bytes) -> None:
        self.heard += data


async def test_what_follows_the_monitor_s_line_is_the_agent_s(short_tmp: Path) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"OK 1073741824\nhello\n")
        await reader.read(1)

    async with listening(short_tmp / "vsock", serve):
        hears = Hears()
        channel = vsock(short_tmp)
        await channel.connect(lambda: hears, timeout_s=30)
        await eventually(lambda: hears.heard == b"hello\n")
        channel.close()

    assert asked == [b"CONNECT 1024\n"]


async def test_a_guest_that_comes_up_later_is_waited_for(short_tmp: Path) -> None:
    """Until it listens the monitor ends each connection at once."""
    tries: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        tries.append(1)
        if len(tries) > 3:
            writer.write(b"OK 5\n")
            await reader.read(1)

    async with listening(short_tmp / "vsock", serve):
        channel = vsock(short_tmp)
        await channel.connect(asyncio.Protocol, timeout_s=30)
        channel.close()

    assert len(tries) == 4


@pytest.mark.parametrize("answer", [b"", b"NO\n", b"OK x\n", b"OK 1" + b"0" * 100, b"\n"])
async def test_a_strange_answer_is_no_connection(short_tmp: Path, answer: bytes) -> None:
    async with listening(short_tmp / "vsock", saying(answer)):
        with pytest.raises(MonitorError, match=r"did not answer within 0\.1 s"):
            await vsock(short_tmp).connect(asyncio.Protocol, timeout_s=0.1)


async def test_a_guest_that_does_not_run_is_given_up(short_tmp: Path) -> None:
    async with listening(short_tmp / "vsock", never):
        with pytest.raises(MonitorError, match="did not answer"):
            await vsock(short_tmp).connect(asyncio.Protocol, timeout_s=0.1)


async def test_a_monitor_that_has_ended_is_told_at_once(short_tmp: Path) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(MonitorError, match="is not there"):
            await vsock(short_tmp).connect(asyncio.Protocol, timeout_s=3600)
