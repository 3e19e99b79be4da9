"""Files and archives over a real socket: whole, in parts, changed, refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl

from dsec.core.errors import HostError, StorageError
from dsec.wire.node import Method
from tests.contract.node_double import NODE, NodeDouble
from tests.contract.served import Served, serve


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


AWKWARD = "/a%20b/%ff%2B%3F%26"  # not UTF-8, and everything that has a meaning in a query


async def test_a_file_goes_up_and_comes_down_whole(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    data = bytes(range(256)) * 4_000
    url = yarl.URL(f"/v1/sandboxes/{sandbox.id}/files?path={AWKWARD}", encoded=True)

    async with api.local.put(url, data=data) as answer:
        assert await answer.json() == {"bytes": len(data), "entries": 1}
    async with api.local.get(url) as answer:
        info = json.loads(answer.headers["X-Dsec-File"])
        assert answer.headers["Content-Length"] == str(len(data))
        assert await answer.read() == data

    assert list(node.files) == [b"/a b/\xff+?&"]
    assert base64.b64decode(info["name_bytes"]) == b"\xff+?&"


@pytest.mark.parametrize(
    ("range", "status", "content", "shown"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=7-100", 206, b"789", "bytes 7-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-30", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=0-", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=0-0", 206, b"0", "bytes 0-0/10"),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=1-2,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=99999999999-", 416, None, "bytes */10"),
    ],
)
async def test_ranges_give_a_part(
    api: Served, node: NodeDouble, range: str, status: int, content: bytes | None, shown: str | None
) -> None:
    sandbox = node.add()
    node.files[b"/f"] = b"0123456789"

    async with api.local.get(f"/v1/sandboxes/{sandbox.id}/files?path=/f", headers={"Range": range}) as answer:
        body = await answer.read()

    assert (answer.status, answer.headers.get("Content-Range")) == (status, shown)
    assert body == content if content is not None else json.loads(body)["code"] == "invalid_argument"


async def test_a_file_of_unknown_size_comes_whole(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.files[b"/proc/version"] = b"Linux"

    async with api.local.get(f"/v1/sandboxes/{sandbox.id}/files?path=/proc/version") as answer:
        assert "Content-Length" not in answer.headers
        assert await answer.read() == b"Linux"


async def test_a_download_that_fails_half_way_is_cut_short(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.files[b"/proc/x"] = bytes(200_000)
    node.fail[Method.FILE_STAT] = HostError("the disk is gone")

    with pytest.raises(aiohttp.ClientPayloadError):
        async with api.local.get(f"/v1/sandboxes/{sandbox.id}/files?path=/proc/x") as answer:
            await answer.read()
    await api.quiet()


async def test_an_upload_that_the_node_refuses_tells_why(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.fail[Method.FILE_WRITE] = StorageError("no space")

    async with api.local.put(f"/v1/sandboxes/{sandbox.id}/files?path=/f", data=io.BytesIO(bytes(50_000_000))) as answer:
        assert (answer.status, (await answer.json())["code"]) == (500, "storage")


async def test_archives_go_both_ways(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.files[b"/d"] = b"a tar"

    async with api.local.get(f"/v1/sandboxes/{sandbox.id}/archive?path=/d") as answer:
        assert (answer.headers["Content-Type"], await answer.read()) == ("application/x-tar", b"a tar")
    async with api.local.put(f"/v1/sandboxes/{sandbox.id}/archive?path=/d", data=b"tar") as answer:
        assert await answer.json() == {"bytes": 3, "entries": 2}


@pytest.mark.parametrize(
    ("path", "method", "expected"),
    [
        ("mkdir?path=/d&mode=700&parents=false", Method.FILE_MKDIR, {"mode": 0o700, "parents": False}),
        ("move?path=/a&target=/b&replace=0", Method.FILE_MOVE, {"source": b"/a", "target": b"/b", "replace": False}),
        ("remove?path=/a&recursive=1&missing_ok", Method.FILE_REMOVE, {"recursive": True, "missing_ok": True}),
        ("chmod?path=/a&mode=0644&user=bob", Method.FILE_CHMOD, {"mode": 0o644, "user": "bob"}),
        ("chown?path=/a&owner=bob&follow=false", Method.FILE_CHOWN, {"owner": "bob", "group": None, "follow": False}),
        ("symlink?path=/a&target=../%ff", Method.FILE_SYMLINK, {"target": b"../\xff"}),
    ],
)
async def test_changes_to_files_reach_the_node_as_asked(
    api: Served, node: NodeDouble, path: str, method: Method, expected: dict[str, object]
) -> None:
    sandbox = node.add()

    url = yarl.URL(f"/v1/sandboxes/{sandbox.id}/files:{path}", encoded=True)
    async with api.local.post(url) as answer:
        assert (answer.status, await answer.json()) == (200, {})

    asked, args = node.args[-1]
    assert asked == method
    assert {name: getattr(args, name) for name in expected} == expected


async def test_a_listing_passes_its_cursor_on(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.files[b"/f"] = b"x"
    after = base64.urlsafe_b64encode(b"\xff\xfe?").decode().rstrip("=")

    async with api.local.get(f"/v1/sandboxes/{sandbox.id}/files:list?path=/&after={after}&limit=3") as answer:
        assert (await answer.json())["entries"][0]["name"] == "f"

    assert (node.args[-1][1].after, node.args[-1][1].limit) == (b"\xff\xfe?", 3)
