"""The SDK's HTTP client against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dsec.sdk.connections import ConnectError, HttpPool
from dsec.sdk.endpoint import Endpoint
from dsec.sdk.http import HEAD_BYTES_MAX, QUEUED_BYTES_HIGH, LostError, Response

HEAD = b"GET / HTTP/1.1\r\nHost: dsec\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


class Server:
    """Runs `serve(reader, writer, n)` for the n-th connection and closes it afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.serve: Serve
        self.tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            await self.serve(reader, writer, self.connections)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away: what some tests do
        finally:
            writer.transport.abort()
            self.tasks.discard(task)


@pytest.fixture
async def server(short_tmp: Path) -> AsyncIterator[Server]:
    found = Server(short_tmp / "http.sock")
    listening = await asyncio.start_unix_server(found.accept, found.path)
    yield found
    listening.close()
    for task in list(found.tasks):
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)


@pytest.fixture
async def pool(server: Server) -> AsyncIterator[HttpPool]:
    found = HttpPool(Endpoint(socket=str(server.path)), 2)
    yield found
    found.close()
    await asyncio.sleep(0)


def saying(*pieces: bytes, requests: int = 1) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        for _ in range(requests):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return serve


async def get(pool: HttpPool, *, again: bool = False) -> tuple[Response, bytes]:
    async with asyncio.timeout(30), pool.request(HEAD, None, again=again) as response:
        return response, await response.read()


async def test_a_connection_is_used_again(server: Server, pool: HttpPool) -> None:
    server.serve = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nhi", requests=3)

    for _ in range(3):
        response, body = await get(pool)

    assert (response.status, response.headers["x-a"], body) == (200, "b", b"hi")
    assert server.connections == 1


async def test_a_body_in_any_pieces_is_whole(server: Server, pool: HttpPool) -> None:
    content = bytes(range(256)) * 64
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (content[:5], content[5:9000], content[9000:]))
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    for answer in (sized, chunked):
        for size in (1 << 20, 1_000, 37):
            server.serve = saying(*(answer[at : at + size] for at in range(0, len(answer), size)))
            assert (await get(pool, again=True))[1] == content


async def test_a_kept_connection_that_was_closed_is_replaced_once(server: Server, pool: HttpPool) -> None:
    server.serve = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    for _ in range(3):
        await get(pool, again=True)

    assert server.connections == 3


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nwithout an end",
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX: %s\r\n\r\nx" % (b"y" * (HEAD_BYTES_MAX + 1)),
    ],
)
async def test_an_answer_that_is_cut_or_no_http_is_a_lost_connection(
    server: Server, pool: HttpPool, answer: bytes
) -> None:
    server.serve = saying(answer)

    with pytest.raises(LostError):
        await get(pool)


async def test_bytes_after_an_answer_are_not_taken_for_the_next(server: Server, pool: HttpPool) -> None:
    answer, forged = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"HTTP/1.1 200 OK\r\nX: forged\r\n\r\n"
    server.serve = saying(answer + forged, requests=5)

    for _ in range(5):
        response, body = await get(pool)
        assert ("x" in response.headers, body) == (False, b"x")

    assert server.connections == 5


async def test_an_error_that_ends_with_its_connection_is_shown(server: Server, pool: HttpPool) -> None:
    server.serve = saying(b"HTTP/1.0 502 Bad Gateway\r\n\r\nthe proxy says no")

    response, body = await get(pool)

    assert (response.status, response.reason, body) == (502, "Bad Gateway", b"the proxy says no")


async def test_an_answer_in_the_middle_of_a_body_ends_the_sending(server: Server, pool: HttpPool) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield bytes(65_536)

    server.serve = saying(b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\nno")

    async with asyncio.timeout(30), pool.request(HEAD, body(), chunked=True) as response:
        assert (response.status, await response.read()) == (409, b"no")

    assert sent < 64 << 20
    assert not pool._idle  # what is left of the body must not reach another request


async def test_an_answer_that_nobody_reads_is_not_taken_in(server: Server, pool: HttpPool) -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(bytes(65_536))
            written += 65_536
            await writer.drain()

    server.serve = serve
    async with asyncio.timeout(30), pool.request(HEAD, None) as response:
        before = -1
        while before != written:
            before = written
            for _ in range(200):
                await asyncio.sleep(0)
        first = [piece async for piece in _some(response, 3)]

    assert all(first)
    assert written < QUEUED_BYTES_HIGH + (8 << 20)


async def _some(response: Response, count: int) -> AsyncIterator[bytes]:
    async for piece in response.pieces():
        yield piece
        count -= 1
        if not count:
            return


async def test_one_that_finds_no_room_waits(server: Server, pool: HttpPool) -> None:
    server.serve = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", requests=100)
    async with pool.request(HEAD, None), pool.request(HEAD, None):
        third = asyncio.create_task(get(pool))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not third.done()

    assert (await third)[0].status == 200
    assert server.connections == 2


async def test_nobody_there_is_told_apart_from_a_lost_connection(short_tmp: Path) -> None:
    pool = HttpPool(Endpoint(socket=str(short_tmp / "none")), 1)

    with pytest.raises(ConnectError):
        await get(pool)
