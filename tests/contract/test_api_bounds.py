"""What one project, and all requests together, may take of the API; and streams that outlive their token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dsec.api import bodies, openstreams
from dsec.api.routes import ROUTES
from dsec.api.routing import WEBSOCKET, Route
from dsec.core import limits
from dsec.core.ids import new_sandbox_id
from dsec.wire.frames import FrameDecoder, FrameType
from dsec.wire.node import Method
from tests.contract.node_double import NODE, Held, NodeDouble, data_frame
from tests.contract.served import ADMIN, Served, serve, until
from tests.contract.test_api_abuse import raw


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openstreams, "CHECK_S", 0.05)


async def _sandbox(api: Served, headers: dict[str, str]) -> str:
    async with api.remote.post(
        "/v1/sandboxes", json={"spec": {"environment": {"base": "base"}}}, headers=headers
    ) as answer:
        return str((await answer.json())["id"])


async def test_streams_of_one_project_are_bounded_and_others_go_on(
    api: Served, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openstreams, "PROJECT_STREAMS_MAX", 2)
    node.hold[Method.FILE_WATCH] = Held()
    mine, theirs = await api.token("/mine", "use"), await api.token("/theirs", "use")
    first, other = await _sandbox(api, mine), await _sandbox(api, theirs)
    watches = [await api.remote.ws_connect(f"/v1/sandboxes/{first}/watch?path=/a", headers=mine) for _ in range(2)]

    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await api.remote.ws_connect(f"/v1/sandboxes/{first}/watch?path=/a", headers=mine)
    allowed = await api.remote.ws_connect(f"/v1/sandboxes/{other}/watch?path=/a", headers=theirs)

    assert refused.value.status == 429
    assert refused.value.headers is not None
    assert refused.value.headers["Retry-After"] == "1"
    for socket in (*watches, allowed):
        await socket.close()
    await api.quiet()


async def test_a_stream_that_has_ended_makes_room(
    api: Served, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openstreams, "PROJECT_STREAMS_MAX", 1)
    headers = await api.token("/mine", "use")
    sandbox = await _sandbox(api, headers)
    url = f"/v1/sandboxes/{sandbox}/files?path=/a"

    for _ in range(5):
        async with api.remote.put(url, data=b"x", headers=headers) as answer:
            assert answer.status == 200, await answer.text()


async def test_bodies_of_requests_under_way_are_bounded_together(
    api: Served, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = node.hold[Method.EXEC_START] = Held()
    headers = await api.token("/mine", "use")
    sandbox = await _sandbox(api, headers)
    monkeypatch.setattr(bodies, "BODIES_BYTES_MAX", 100_000)
    url = f"/v1/sandboxes/{sandbox}/execs"

    def body(number: int) -> dict[str, str]:
        return {"id": f"exe_{number:016d}".replace("0", "a").replace("1", "b"), "shell": "x" * 60_000}

    first = asyncio.create_task(api.remote.post(url, json=body(1), headers=headers).__aenter__())
    await asyncio.wait_for(held.entered.wait(), 30)
    async with api.remote.post(url, json=body(11), headers=headers) as answer:
        refused = answer.status, await answer.json()
    held.go.set()
    (await first).close()
    await api.quiet()
    async with api.remote.post(url, json=body(111), headers=headers) as answer:
        after = answer.status

    assert refused[0] == 429
    assert refused[1]["retry_after_s"] == 1.0
    assert after == 200


async def test_a_followed_output_ends_when_its_token_is_revoked(api: Served, node: NodeDouble) -> None:
    node.hold[Method.EXEC_OUTPUT] = Held()
    node.output = [data_frame(b"begun")]
    headers = await api.token("/mine", "use")
    sandbox = await _sandbox(api, headers)
    (token,) = api.iam.tokens.list(by=ADMIN)
    url = f"/v1/sandboxes/{sandbox}/execs/exe_aaaaaaaaaaaaaaaa/output"

    async with api.remote.get(url, headers={**headers, "Accept": "application/x-dsec-frames"}) as answer:
        await api.iam.tokens.revoke(token.id, by=ADMIN)
        async with asyncio.timeout(30):
            frames = list(FrameDecoder().feed(await answer.read()))

    assert frames[-1].type == FrameType.ERR
    assert b"revoked" in frames[-1].body
    await until(lambda: not api.rpc.streams_open)


async def test_a_watch_ends_when_its_token_is_revoked(api: Served, node: NodeDouble) -> None:
    node.hold[Method.FILE_WATCH] = Held()
    headers = await api.token("/mine", "use")
    sandbox = await _sandbox(api, headers)
    (token,) = api.iam.tokens.list(by=ADMIN)
    socket = await api.remote.ws_connect(f"/v1/sandboxes/{sandbox}/watch?path=/a", headers=headers)

    await api.iam.tokens.revoke(token.id, by=ADMIN)
    async with asyncio.timeout(30):
        messages = [message.data async for message in socket]

    assert any("revoked" in str(message) for message in messages)
    assert socket.close_code == 4000
    await api.quiet()


async def test_an_upload_that_stands_still_ends_with_its_token(
    api: Served, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openstreams, "_GRACE_S", 0.05)
    headers = await api.token("/mine", "use")
    sandbox = await _sandbox(api, headers)
    (token,) = api.iam.tokens.list(by=ADMIN)
    never = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        await never.wait()

    sending = asyncio.create_task(
        api.remote.put(f"/v1/sandboxes/{sandbox}/files?path=/a", data=pieces(), headers=headers).__aenter__()
    )
    await until(lambda: api.rpc.streams_open)
    await api.iam.tokens.revoke(token.id, by=ADMIN)

    await until(lambda: not api.rpc.streams_open, deadline_s=30)
    with pytest.raises(aiohttp.ClientError):
        await asyncio.wait_for(sending, 30)
    assert b"/a" not in node.files


# ---- every route ---------------------------------------------------------------------------------


def _path(path: str, **values: str) -> str:
    known = {
        "id": new_sandbox_id(NODE),
        "exec": "exe_aaaaaaaaaaaaaaaa",
        "name": "n",
        "token": "t",
        "grant": "g",
    } | values
    return path.format_map(known)


# Those of the others are streamed: nothing but a window of them is ever held.
RECORDS = [route for route in ROUTES if route.body is not None and not isinstance(route.body, dict)]


@pytest.mark.parametrize("route", RECORDS, ids=lambda route: route.name)
async def test_a_record_above_the_bound_is_refused_before_it_has_come(api: Served, route: Route) -> None:
    async with raw(api) as (reader, writer):
        query = "&".join(f"{param.name}=%2Fx" for param in route.params if param.required)
        target = f"{_path(route.path)}?{query}"
        head = f"{route.method} {target} HTTP/1.1\r\nContent-Length: {limits.BODY_BYTES_MAX + 1}\r\n\r\n"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)

    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if "{" in route.path and route.method != WEBSOCKET and route not in RECORDS],
    ids=lambda route: route.name,
)
async def test_an_id_or_name_without_bounds_reaches_no_node(api: Served, node: NodeDouble, route: Route) -> None:
    usual = {"port": "1", "mode": "700", "owner": "root", "group": "root"}
    query = {param.name: usual.get(param.name, "/a") for param in route.params if param.required}
    for name in re.findall(r"{(\w+)}", route.path):
        path = _path(route.path, **{name: "a" * 5_000})
        async with api.local.request(route.method, path, params=query) as answer:
            assert 400 <= answer.status < 500, await answer.text()
    assert node.args == []
