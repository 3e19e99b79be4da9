"""Requests that chance has damaged: whatever comes, the service goes on and keeps nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.core.ids import new_exec_id
from dsec.wire.frames import encode_data
from tests.contract.node_double import NODE, NodeDouble, data_frame
from tests.contract.served import Served, serve

ROUNDS = 400


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


def requests(sandbox: str) -> list[bytes]:
    base = f"/v1/sandboxes/{sandbox}"
    run = json.dumps({"id": new_exec_id(), "argv": ["true"], "wait_s": 1}).encode()
    heads = [
        (f"GET {base}", b""),
        (f"GET {base}/files?path=%2Ff&user=root", b""),
        (f"PUT {base}/files?path=/f&mode=644", b"x" * 100),
        (f"POST {base}/execs", run),
        (f"GET {base}/execs/{new_exec_id()}/output?out=0&err=0&follow=true", b""),
        ("POST /v1/sandboxes", b'{"spec":{"environment":{"base":"b"},"substrate":"fake"}}'),
        ("GET /v1/sandboxes?label=a%3Db&limit=3", b""),
    ]
    plain = [
        f"{head} HTTP/1.1\r\nHost: d\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body for head, body in heads
    ]
    chunked = f"PUT {base}/archive?path=/d HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    attach = f"GET {base}/execs/{new_exec_id()}/attach HTTP/1.1\r\nHost: d\r\n{upgrade}{key}".encode()
    frame = encode_data(0, 0, 0, 0, b"in")
    message = b"\x82" + bytes([0x80 | len(frame)]) + bytes(4) + frame
    return [*plain, chunked + b"5\r\nhello\r\n0\r\n\r\n", attach + message, plain[0] * 5]


def damaged(text: bytes, rng: random.Random) -> bytes:
    out = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(5):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randint(1, 20)]
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                out[at:at] = out[: rng.randrange(len(out))]
            case 4:
                del out[at:]
        if not out:
            return b"\0"
    return bytes(out)


async def test_damaged_requests_do_no_harm(api: Served, node: NodeDouble, rng: random.Random) -> None:
    sandbox = node.add()
    node.files[b"/f"] = bytes(1_000)
    node.output = [data_frame(b"x" * 1_000)] * 3
    whole = requests(sandbox.id)

    async def one() -> None:
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        try:
            text = damaged(rng.choice(whole), rng)
            cut = rng.randrange(len(text) + 1)
            writer.write(text[:cut])
            await asyncio.sleep(0)
            writer.write(text[cut:])
            with contextlib.suppress(TimeoutError, ConnectionError):
                answer = await asyncio.wait_for(reader.read(1 << 16), 0.05)
                assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:100]
                assert not answer.startswith(b"HTTP/1.1 500"), (text, answer)
        finally:
            writer.transport.abort()

    for _ in range(ROUNDS // 20):
        await asyncio.gather(*(one() for _ in range(20)))

    await api.quiet()
    assert node.streams_live == 0
    async with api.local.get(f"/v1/sandboxes/{sandbox.id}") as answer:
        assert answer.status == 200
