"""A service that is not ours, or no longer: the SDK takes no more from it than fits, and says so with a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dsec.core.errors import DsecError
from dsec.core.limits import MIB
from dsec.sdk import http as http_module
from dsec.sdk import transport as transport_module
from dsec.sdk.client import AsyncClient

_ENDLESS_BYTES = 64 * MIB


@asynccontextmanager
async def hostile(first: bytes, piece: bytes) -> AsyncIterator[tuple[AsyncClient, list[int]]]:
    """A client of a service that answers each request with `first`, then with `piece` again and again; what it took."""
    taken: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        taken.append(0)
        at = len(taken) - 1
        try:
            writer.write(first)
            while piece and taken[at] < _ENDLESS_BYTES:
                writer.write(piece)
                await writer.drain()
                taken[at] += len(piece)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with AsyncClient(f"http://{host}:{port}", token="dsec_x", request_timeout_s=3) as client:
            yield client, taken


_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        pytest.param(_JSON + b"transfer-encoding: chunked\r\n\r\n", b"8000\r\n" + b" " * 0x8000 + b"\r\n", id="body"),
        pytest.param(_JSON + b"content-length: 999999999999\r\n\r\n", b" " * 0x8000, id="length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 0x8000, id="header"),
        pytest.param(b"HTTP/1.1 200 ", b"y" * 0x8000, id="reason"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 0x1000, id="headers"),
        pytest.param(b"HTTP/1.1 500 X\r\ncontent-length: 999999999999\r\n\r\n", b" " * 0x8000, id="error"),
        pytest.param(_JSON + b"transfer-encoding: chunked\r\n\r\n5;", b"x" * 0x8000, id="extension"),
        pytest.param(_JSON + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 0x1000, id="trailers"),
    ],
)
async def test_an_answer_without_end_is_given_up(first: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "ANSWER_BYTES_MAX", 4 * MIB)
    async with hostile(first, piece) as (client, taken):
        with pytest.raises(DsecError):
            await client.health()

        assert taken
        assert max(taken) < _ENDLESS_BYTES / 2, "it took all that there was"
    assert http_module.HEAD_BYTES_MAX < MIB


@pytest.mark.parametrize(
    "answer",
    [
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n[[[",
        b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n" + b"\x00" * 100,
        b'HTTP/1.1 500 X\r\ncontent-length: 52\r\n\r\n{"code":"internal","message":"\\u001b]0;x\\u0007\\n'
        + b'xx","a":1}',
        b"",
    ],
)
async def test_an_answer_that_is_none_is_a_typed_error(answer: bytes) -> None:
    async with hostile(answer, b"") as (client, _):
        with pytest.raises(DsecError):
            await client.health()
