"""Clients that are slow, rude, enormous or gone: bounds hold, and nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dsec.api import connection as connection_module
from dsec.api import request as request_module
from dsec.api import server as server_module
from dsec.core import limits
from dsec.core.errors import ForbiddenError, HostError
from dsec.core.ids import new_exec_id
from dsec.wire.frames import DATA_BYTES_MAX, FrameDecoder, FrameType, encode_data, encode_frame
from dsec.wire.node import Method
from tests.contract.node_double import NODE, Held, NodeDouble, data_frame
from tests.contract.served import Served, serve, until

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


@contextlib.asynccontextmanager
async def raw(
    api: Served, *, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(api.socket))
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """Status and JSON body of an answer after which the server closes."""
    text = await asyncio.wait_for(reader.read(), 60)
    head, _, body = text.partition(b"\r\n\r\n")
    assert b"x-request-id" in head
    return int(head.split()[1]), json.loads(body)


# ---- too large -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * (limits.URL_BYTES_MAX + 1) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET / HTTP/1.1\r\na: " + b"b" * (limits.HEADERS_BYTES_MAX + 300_000),
        b"GET / HTTP/1.1\r\n" + b"n" * (limits.HEADERS_BYTES_MAX + 300_000),
    ],
)
async def test_a_head_without_bounds_is_refused(api: Served, sent: bytes) -> None:
    async with raw(api) as (reader, writer):
        writer.write(sent)
        status, body = await answer_of(reader)

    assert (status, body["code"]) == (413, "limit_exceeded")


async def test_trailers_without_bounds_end_the_connection(api: Served, node: NodeDouble) -> None:
    node.hold[Method.CREATE] = Held()
    async with raw(api) as (reader, writer):
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"b" * 65_536)
                await writer.drain()
            assert await asyncio.wait_for(reader.read(), 60) == b""
    await api.quiet()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET \xff HTTP/1.1\r\n\r\n",
        b"GET http://host/v1/health HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_a_typed_error_or_nothing(api: Served, sent: bytes) -> None:
    async with raw(api) as (reader, writer):
        writer.write(sent)
        status, body = await answer_of(reader)

    assert (status, body["code"]) == (400, "invalid_argument")
    await api.quiet()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_bound_is_refused(api: Served, announced: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(limits.BODY_BYTES_MAX // 65_536 + 1):
            yield bytes(65_536)

    headers = {"Content-Length": str(limits.BODY_BYTES_MAX + 65_536)} if announced else {}
    async with api.local.post("/v1/sandboxes", data=body(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["code"]) == (413, "limit_exceeded")


async def test_a_query_with_too_many_parameters_is_refused(api: Served) -> None:
    async with api.local.get("/v1/sandboxes?" + "&".join(["label=a%3Db"] * 200)) as answer:
        assert (answer.status, (await answer.json())["code"]) == (413, "limit_exceeded")


async def test_an_idempotency_key_has_a_bound(api: Served) -> None:
    for key, status in (("k" * 256, 413), ("ü", 400)):
        async with api.local.post("/v1/sandboxes", json={"spec": SPEC}, headers={"Idempotency-Key": key}) as answer:
            assert answer.status == status


# ---- too slow ------------------------------------------------------------------------------------


async def test_a_head_that_never_ends_is_given_up(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.5)
    async with raw(api) as (reader, writer):
        writer.write(b"GET /v1/health HTTP/1.1\r\nHo")
        status, body = await answer_of(reader)
    async with raw(api) as (reader, writer):  # and one that never begins
        assert await asyncio.wait_for(reader.read(), 60) == b""

    assert (status, body["code"]) == (400, "invalid_argument")


async def test_a_body_that_stands_still_is_given_up(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "BODY_IDLE_S", 0.5)
    monkeypatch.setattr(connection_module, "BODY_IDLE_S", 0.5)
    async with raw(api) as (reader, writer):
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
        status, body = await answer_of(reader)

    assert (status, body["code"]) == (504, "deadline_exceeded")


async def test_an_idle_connection_is_closed(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KEEP_ALIVE_S", 0.5)
    async with raw(api) as (reader, writer):
        writer.write(b"GET /v1/health HTTP/1.1\r\n\r\n")
        text = await asyncio.wait_for(reader.read(), 60)

    assert text.startswith(b"HTTP/1.1 200")


async def test_too_many_connections_are_refused(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CONNECTIONS_MAX", 2)
    async with raw(api), raw(api), raw(api) as (reader, _):
        status, body = await answer_of(reader)

    assert (status, body["code"]) == (503, "unavailable")


async def test_a_client_that_does_not_read_holds_back_the_node(api: Served, node: NodeDouble) -> None:
    """100 MiB of output for a reader that takes nothing: what is on its way stays within a few windows."""
    sandbox = node.add()
    node.output = [data_frame(bytes(DATA_BYTES_MAX))] * 400
    async with raw(api, receive_bytes=4_096) as (_, writer):
        path = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/output"
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await until(lambda: node.frames_sent > 0)
        before = -1
        while before != node.frames_sent:  # until nothing moves any more
            before = node.frames_sent
            await asyncio.sleep(0.2)

        assert node.frames_sent * DATA_BYTES_MAX < 4 * limits.MIB

    await api.quiet()
    assert node.streams_live == 0


async def test_a_node_that_does_not_read_holds_back_the_upload(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.hold[Method.FILE_WRITE] = held = Held()
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(800):
            sent += 65_536
            yield bytes(65_536)

    upload = asyncio.create_task(_put(api, f"/v1/sandboxes/{sandbox.id}/files?path=/f", body()))
    await held.entered.wait()
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.2)

    assert sent < 8 * limits.STREAM_QUEUE_BYTES_MAX  # with what sockets hold
    held.go.set()
    assert await upload == 200
    assert len(node.files[b"/f"]) == 800 * 65_536


async def _put(api: Served, path: str, body: AsyncIterator[bytes]) -> int:
    async with api.local.put(path, data=body) as answer:
        await answer.read()
        return answer.status


# ---- gone ----------------------------------------------------------------------------------------


async def test_a_client_that_goes_away_ends_its_wait(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.hold[Method.EXEC_GET] = held = Held()
    async with raw(api) as (_, writer):
        path = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}?wait_s=60"
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await held.entered.wait()

    await api.quiet()
    assert (held.cancelled, held.done) == (1, 0)


async def test_a_create_with_a_key_outlives_its_caller(api: Served, node: NodeDouble) -> None:
    node.hold[Method.CREATE] = held = Held()
    body = json.dumps({"spec": SPEC}).encode()
    head = f"POST /v1/sandboxes HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: {len(body)}\r\n\r\n"
    async with raw(api) as (_, writer):
        writer.write(head.encode() + body)
        await held.entered.wait()
    await until(lambda: not api.server.state.tasks)
    held.go.set()
    await api.quiet()

    async with api.local.post("/v1/sandboxes", data=body, headers={"Idempotency-Key": "k"}) as answer:
        assert (await answer.json())["id"] in node.sandboxes
    assert (held.cancelled, len(node.sandboxes)) == (0, 1)


async def test_a_create_without_a_key_ends_with_its_caller(api: Served, node: NodeDouble) -> None:
    node.hold[Method.CREATE] = held = Held()
    body = json.dumps({"spec": SPEC}).encode()
    async with raw(api) as (_, writer):
        writer.write(f"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await held.entered.wait()

    await api.quiet()
    assert held.cancelled == 1


async def test_a_preferred_wait_is_kept_and_the_create_goes_on(api: Served, node: NodeDouble) -> None:
    node.hold[Method.CREATE] = held = Held()
    headers = {"Prefer": "respond-async, wait=0.05", "Idempotency-Key": "k"}

    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}, headers=headers) as answer:
        assert (answer.status, (await answer.json())["outcome"]) == (504, "unknown")
    held.go.set()
    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}, headers=headers) as answer:
        assert answer.status == 201
    assert len(node.sandboxes) == 1


async def test_an_upload_that_is_cut_leaves_no_file(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with raw(api) as (_, writer):
        head = f"PUT /v1/sandboxes/{sandbox.id}/files?path=/f HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head.encode() + bytes(500_000))
        await until(lambda: node.streams_live)

    await api.quiet()
    assert (node.files, node.streams_live) == ({}, 0)


async def test_a_follower_that_goes_away_ends_its_stream(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.output = [data_frame(b"x")]
    node.hold[Method.EXEC_OUTPUT] = held = Held()
    async with raw(api) as (reader, writer):
        path = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/output"
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await held.entered.wait()
        await reader.readuntil(b"\r\n\r\n")

    await api.quiet()
    assert node.streams_live == 0


async def test_a_batch_that_is_left_stops_beginning_new_ones(api: Served, node: NodeDouble) -> None:
    node.hold[Method.CREATE] = held = Held()
    body = json.dumps({"spec": SPEC, "count": 1_000}).encode()
    head = f"POST /v1/sandboxes:batch HTTP/1.1\r\nIdempotency-Key: b\r\nContent-Length: {len(body)}\r\n\r\n"
    async with raw(api) as (_, writer):
        writer.write(head.encode() + body)
        await held.entered.wait()
    await until(lambda: not api.server.state.tasks)
    held.go.set()
    await api.quiet()

    assert 0 < len(node.sandboxes) <= limits.BATCH_CONCURRENCY


async def test_a_server_that_stops_tells_who_waits(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.hold[Method.EXEC_GET] = held = Held()
    async with raw(api) as (reader, writer):
        path = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}?wait_s=60"
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await held.entered.wait()
        await api.server.close(grace_s=0)
        status, body = await answer_of(reader)

    assert (status, body["code"]) == (503, "unavailable")
    assert not api.socket.exists()


# ---- WebSockets ----------------------------------------------------------------------------------


async def test_attach_carries_frames_both_ways(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with api.local.ws_connect(f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/attach?out=0") as socket:
        first = await _frame(socket)
        await socket.send_bytes(encode_data(0, 0, 0, 0, b"abc"))
        second = await _frame(socket)
        await socket.send_bytes(encode_frame(FrameType.END, 0, b""))
        last = await _frame(socket)
        end = await socket.receive()

    assert (first[17:], second[17:]) == (b"hello\n", b"ABC")
    assert last
    assert (end.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1000)
    await api.quiet()


async def _frame(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    (frame,) = FrameDecoder().feed(await socket.receive_bytes())
    return frame.body


@pytest.mark.parametrize(
    "message",
    [
        "text",
        b"",
        b"nonsense",
        encode_data(0, 1, 0, 0, b"output"),
        encode_frame(FrameType.REQ, 0, b""),
        encode_frame(FrameType.END, 0, b"") * 2,
    ],
)
async def test_a_bad_message_is_told_and_closes_with_4000(api: Served, node: NodeDouble, message: str | bytes) -> None:
    sandbox = node.add()
    async with api.local.ws_connect(f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/attach") as socket:
        await socket.receive_bytes()
        if isinstance(message, str):
            await socket.send_str(message)
        else:
            await socket.send_bytes(message)
        told = json.loads(await socket.receive_str())
        await socket.receive()

    assert (told["error"]["code"], socket.close_code) == ("invalid_argument", 4000)
    await api.quiet()


async def test_connect_carries_bytes_and_ends_of_file(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with api.local.ws_connect(f"/v1/sandboxes/{sandbox.id}/connect?port=80") as socket:
        assert await socket.receive_str() == "{}"
        await socket.send_bytes(b"abc")
        assert await socket.receive_bytes() == b"cba"
        await socket.send_bytes(b"")
        assert await socket.receive_bytes() == b""
        await socket.receive()

    assert socket.close_code == 1000
    await api.quiet()


async def test_watch_begins_with_an_empty_text(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with api.local.ws_connect(f"/v1/sandboxes/{sandbox.id}/watch?path=/d&recursive=1") as socket:
        assert await socket.receive_str() == "{}"
        assert json.loads(await socket.receive_str())["kind"] == "created"

    await api.quiet()
    assert node.streams_live == 0


@pytest.mark.parametrize("query", ["", "port=0", "port=65536", "port=1&path=/s", "port=1&host=example.org", "path=s"])
async def test_a_bad_address_is_refused_before_the_upgrade(api: Served, node: NodeDouble, query: str) -> None:
    sandbox = node.add()
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await api.local.ws_connect(f"/v1/sandboxes/{sandbox.id}/connect?{query}")

    assert refused.value.status in (400, 413)


async def test_a_message_above_the_bound_closes_with_1009(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with raw(api) as (reader, writer):
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        path = f"/v1/sandboxes/{sandbox.id}/connect?port=80"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n{upgrade}{key}\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        # Only its head is sent: masked, binary, one byte too long.
        writer.write(b"\x82\xff" + (limits.WEBSOCKET_MESSAGE_BYTES_MAX + 1).to_bytes(8, "big") + bytes(4))
        text = await asyncio.wait_for(reader.read(), 60)

    assert b"\x03\xf1" in text  # 1009
    await api.quiet()


async def test_a_websocket_that_vanishes_ends_its_stream(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(api.socket))) as client:
        socket = await client.ws_connect(f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/attach")
        await socket.receive_bytes()
        assert node.streams_live == 1
        assert socket._response.connection is not None
        socket._response.connection.transport.abort()

    await api.quiet()
    assert node.streams_live == 0


# ---- listening -----------------------------------------------------------------------------------


async def test_the_local_socket_is_its_owners_only(api: Served) -> None:
    assert api.socket.stat().st_mode & 0o777 == 0o600


async def test_a_stale_socket_is_replaced_and_anything_else_is_not(api: Served, short_tmp: Path) -> None:
    stale = short_tmp / "stale.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(stale))
    (short_tmp / "file.sock").write_text("precious")

    await api.server.listen_unix(stale)
    with pytest.raises(HostError, match="is not a socket"):
        await api.server.listen_unix(short_tmp / "file.sock")

    assert (short_tmp / "file.sock").read_text() == "precious"


async def test_tcp_beyond_loopback_needs_tls_or_a_word(api: Served) -> None:
    with pytest.raises(ForbiddenError, match="unencrypted"):
        await api.server.listen_tcp(server_module.TcpAddress("0.0.0.0", 0))

    assert await api.server.listen_tcp(server_module.TcpAddress("0.0.0.0", 0), insecure=True)
