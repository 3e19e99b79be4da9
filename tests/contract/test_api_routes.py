"""Every route over a real socket: good input, bad input, whose it is."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl

from dsec.core.errors import CapacityError, StorageError
from dsec.core.ids import NodeId, new_exec_id, new_sandbox_id
from dsec.wire.codec import unpack
from dsec.wire.errors import ErrorBody
from dsec.wire.frames import FrameDecoder, FrameType, decode_data
from dsec.wire.node import Method
from dsec.wire.records import ExecInfo
from tests.contract.node_double import NODE, NodeDouble, data_frame, gap_frame
from tests.contract.served import Served, serve

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


async def test_a_sandbox_is_created_found_and_destroyed(api: Served) -> None:
    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
        assert answer.status == 201
        assert answer.headers["X-Request-Id"]
        sandbox = await answer.json()

    async with api.local.get(f"/v1/sandboxes/{sandbox['id']}") as answer:
        assert (await answer.json())["id"] == sandbox["id"]
    async with api.local.delete(f"/v1/sandboxes/{sandbox['id']}") as answer:
        assert (answer.status, (await answer.json())["state"]) == (200, "gone")


async def test_the_same_key_gives_the_same_sandbox(api: Served) -> None:
    ids = []
    for _ in range(2):
        async with api.local.post("/v1/sandboxes", json={"spec": SPEC}, headers={"Idempotency-Key": "k"}) as answer:
            ids.append((await answer.json())["id"])
    async with api.local.post(
        "/v1/sandboxes", json={"spec": {**SPEC, "name": "b"}}, headers={"Idempotency-Key": "k"}
    ) as answer:
        assert (answer.status, (await answer.json())["code"]) == (409, "idempotency_mismatch")

    assert ids[0] == ids[1]


async def test_a_list_passes_labels_states_and_bounds_on(api: Served, node: NodeDouble) -> None:
    node.add(labels={"k": "v=w"})
    node.add()

    async with api.local.get("/v1/sandboxes?label=k%3Dv%3Dw&state=running&state=paused&limit=7&cursor=c") as answer:
        page = await answer.json()

    query = node.args[-1][1]
    assert len(page["sandboxes"]) == 1
    assert (query.labels, query.states, query.limit, query.cursor) == ({"k": "v=w"}, ["running", "paused"], 7, "c")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/sandboxes/", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("PATCH", "/v1/sandboxes", 405, "invalid_argument"),
        ("GET", "/v1/sandboxes/nonsense", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/%FF", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?limit=0x10", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?limit=1001", 413, "limit_exceeded"),
        ("GET", "/v1/sandboxes?limit=1&limit=2", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?colour=red", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?label=novalue", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?state=asleep", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?name=%ff", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?name=%zz", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/files", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/files?path=relative", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/files?path=/a%00b", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/files?path=/missing", 404, "path_not_found"),
        ("PUT", "/v1/sandboxes/{id}/files?path=/a&mode=888", 400, "invalid_argument"),
        ("PUT", "/v1/sandboxes/{id}/files?path=/a&append=1&offset=3", 400, "invalid_argument"),
        ("POST", "/v1/sandboxes/{id}/files:chown?path=/a", 400, "invalid_argument"),
        ("POST", "/v1/sandboxes/{id}/files:nothing?path=/a", 404, "not_found"),
        ("GET", "/v1/sandboxes/{id}/execs/nonsense", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa?wait_s=61", 413, "limit_exceeded"),
        ("GET", "/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa?wait_s=-1", 400, "invalid_argument"),
        ("GET", "/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa/attach", 400, "invalid_argument"),
        ("POST", "/v1/sandboxes/{id}/pause", 501, "unsupported"),
        ("DELETE", "/v1/sandboxes/{id}/sessions/-bad-", 400, "invalid_argument"),
        ("DELETE", "/v1/tokens/tok_unknown", 404, "not_found"),
    ],
)
async def test_bad_requests_get_a_typed_error(
    api: Served, node: NodeDouble, method: str, path: str, status: int, code: str
) -> None:
    sandbox = node.add()

    url = yarl.URL(path.replace("{id}", sandbox.id), encoded=True)
    async with api.local.request(method, url) as answer:
        body = await answer.json()

    assert (answer.status, body["code"]) == (status, code)
    assert body["message"]
    assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/sandboxes", b"", 400, "invalid_argument"),
        ("/v1/sandboxes", b"{", 400, "invalid_argument"),
        ("/v1/sandboxes", b"[]", 400, "invalid_argument"),
        ("/v1/sandboxes", b"\xff", 400, "invalid_argument"),
        ("/v1/sandboxes", b"[" * 100_000, 400, "invalid_argument"),
        ("/v1/sandboxes", b'{"spec":{"environment":{"base":"b"}},"more":1}', 400, "invalid_argument"),
        ("/v1/sandboxes", b'{"spec":{"environment":{"base":"b"},"cpu":0}}', 413, "limit_exceeded"),
        ("/v1/sandboxes", b'{"spec":{"environment":{"base":"../b"}}}', 400, "invalid_argument"),
        ("/v1/sandboxes:batch", b'{"spec":{"environment":{"base":"b"}},"count":0}', 413, "limit_exceeded"),
        ("/v1/sandboxes:batch", b'{"spec":{"environment":{"base":"b"},"name":"n"},"count":2}', 400, "invalid_argument"),
        ("/v1/sandboxes/{id}/execs", b'{"id":"exe_aaaaaaaaaaaaaaaa"}', 400, "invalid_argument"),
        ("/v1/sandboxes/{id}/execs", b'{"id":"x","shell":"true"}', 400, "invalid_argument"),
        ("/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa/signal", b'{"signal":99}', 400, "invalid_argument"),
        ("/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa/resize", b'{"cols":0}', 400, "invalid_argument"),
        ("/v1/sandboxes/{id}/sessions", b'{"name":"/"}', 400, "invalid_argument"),
        ("/v1/environments", b'{"name":"a","source":{"kind":"magic"}}', 400, "invalid_argument"),
        ("/v1/tokens", b'{"principal":"p","project":"team"}', 400, "invalid_argument"),
        ("/v1/tokens", b'{"principal":"p","project":"/t","rights":["root"]}', 400, "invalid_argument"),
    ],
)
async def test_bad_bodies_get_a_typed_error(
    api: Served, node: NodeDouble, path: str, body: bytes, status: int, code: str
) -> None:
    sandbox = node.add()

    async with api.local.post(path.replace("{id}", sandbox.id), data=body) as answer:
        told = await answer.json()

    assert (answer.status, told["code"], told["outcome"]) == (status, code, "unchanged")


async def test_a_sandbox_of_another_node_is_gone(api: Served) -> None:
    async with api.local.get(f"/v1/sandboxes/{new_sandbox_id(NodeId('bbbbbbbb'))}") as answer:
        assert (answer.status, (await answer.json())["code"]) == (410, "node_retired")


async def test_an_error_of_the_node_keeps_its_fields(api: Served, node: NodeDouble) -> None:
    node.fail[Method.CREATE] = CapacityError("full", hint="later", retry_after_s=1.5, detail={"what": "memory"})

    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
        body = await answer.json()

    assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
    assert body == {
        "code": "no_capacity",
        "message": "full",
        "outcome": "unchanged",
        "hint": "later",
        "retry_after_s": 1.5,
        "detail": {"what": "memory"},
    }


async def test_an_error_that_is_not_ours_is_told_without_its_text(api: Served, node: NodeDouble) -> None:
    node.fail[Method.CREATE] = RuntimeError("the secret is 42")

    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
        text = await answer.text()

    assert answer.status == 500
    assert json.loads(text)["code"] == "internal"
    assert "42" not in text


# ---- who asks ------------------------------------------------------------------------------------


async def test_tcp_needs_a_token_but_for_the_version(api: Served) -> None:
    async with api.remote.get("/v1/sandboxes") as answer:
        assert (answer.status, (await answer.json())["code"]) == (401, "unauthenticated")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    async with api.remote.get("/v1/health") as answer:
        assert await answer.json() == {
            "version": "9",
            "node": "",
            "started_at": 0.0,
            "sandboxes": 0,
            "pid": 0,
            "load": None,
        }
    async with api.local.get("/v1/health") as answer:
        assert (await answer.json())["pid"] == 7


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer dsec_wrong", "Basic abc", "Bearer \x80\xff", "Bearer " + "d" * 9000]
)
async def test_bad_credentials_are_refused(api: Served, header: str) -> None:
    async with api.remote.get("/v1/sandboxes", headers={"Authorization": header}) as answer:
        assert (answer.status, (await answer.json())["code"]) == (401, "unauthenticated")


async def test_a_token_may_be_the_password_of_a_url(api: Served) -> None:
    """For clients that can be told nothing else. Who it is for says the token, not the name."""
    token = (await api.token("/", "use"))["Authorization"].removeprefix("Bearer ")
    for text, status in ((f"anybody:{token}", 200), (f":{token}", 200), (token, 401), (f"{token}:", 401)):
        header = "Basic " + base64.b64encode(text.encode()).decode()
        async with api.remote.get("/v1/sandboxes", headers={"Authorization": header}) as answer:
            assert answer.status == status, text


@pytest.mark.root
async def test_another_user_is_refused_even_where_the_socket_lets_them_in(api: Served) -> None:
    api.socket.parent.chmod(0o711)
    api.socket.chmod(0o666)
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1]);"
        "link.sendall(b'GET /v1/sandboxes HTTP/1.1\\r\\nConnection: close\\r\\n\\r\\n');"
        "print(link.makefile().read())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(api.socket), stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 60)

    assert answer.startswith(b"HTTP/1.1 403")
    assert b'"forbidden"' in answer


async def test_a_token_decides_also_on_the_local_socket(api: Served) -> None:
    reader = await api.token("/team", "read")

    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}, headers=reader) as answer:
        assert (answer.status, (await answer.json())["code"]) == (403, "forbidden")


async def test_a_project_does_not_reach_another_ones_sandbox_by_any_route(api: Served, node: NodeDouble) -> None:
    theirs = node.add("/theirs")
    node.files[b"/f"] = b"x"
    ours = await api.token("/ours", "use")
    exec = new_exec_id()
    base = f"/v1/sandboxes/{theirs.id}"
    attempts = [
        ("GET", base, None),
        ("DELETE", base, None),
        ("PUT", f"{base}/ttl", b"{}"),
        ("POST", f"{base}/pause", None),
        ("POST", f"{base}/resume", None),
        ("GET", f"{base}/metrics", None),
        ("POST", f"{base}/execs", json.dumps({"id": exec, "shell": "true"}).encode()),
        ("GET", f"{base}/execs", None),
        ("GET", f"{base}/execs/{exec}", None),
        ("GET", f"{base}/execs/{exec}/output", None),
        ("POST", f"{base}/execs/{exec}/stdin", b"x"),
        ("POST", f"{base}/execs/{exec}/signal", b"{}"),
        ("POST", f"{base}/execs/{exec}/kill", None),
        ("POST", f"{base}/execs/{exec}/resize", b"{}"),
        ("POST", f"{base}/sessions", b'{"name":"s"}'),
        ("GET", f"{base}/sessions", None),
        ("DELETE", f"{base}/sessions/s", None),
        ("GET", f"{base}/files?path=/f", None),
        ("PUT", f"{base}/files?path=/f", b"x"),
        ("GET", f"{base}/files:stat?path=/f", None),
        ("GET", f"{base}/files:list?path=/", None),
        ("POST", f"{base}/files:mkdir?path=/d", None),
        ("POST", f"{base}/files:move?path=/f&target=/g", None),
        ("POST", f"{base}/files:remove?path=/f", None),
        ("POST", f"{base}/files:chmod?path=/f&mode=600", None),
        ("POST", f"{base}/files:chown?path=/f&owner=0", None),
        ("POST", f"{base}/files:symlink?path=/l&target=f", None),
        ("GET", f"{base}/archive?path=/f", None),
        ("PUT", f"{base}/archive?path=/f", b"x"),
    ]

    for method, path, body in attempts:
        async with api.remote.request(method, path, data=body, headers=ours) as answer:
            assert (answer.status, (await answer.json())["code"]) == (404, "sandbox_not_found"), (method, path)
    for path in ("attach", "connect", "watch"):
        url = (
            f"{base}/execs/{exec}/attach"
            if path == "attach"
            else f"{base}/{path}?" + ("port=80" if path == "connect" else "path=/")
        )
        if path == "attach":
            async with api.remote.ws_connect(url, headers=ours) as socket:
                assert json.loads(await socket.receive_str())["error"]["code"] == "sandbox_not_found"
        else:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await api.remote.ws_connect(url, headers=ours)
            assert refused.value.status == 404
    async with api.remote.get("/v1/sandboxes", headers=ours) as answer:
        assert (await answer.json())["sandboxes"] == []


async def test_tokens_are_made_listed_and_revoked(api: Served) -> None:
    request = {"principal": "ci", "project": "/team", "rights": ["use"], "ttl_s": 60}
    async with api.local.post("/v1/tokens", json=request) as answer:
        assert answer.status == 201
        made = await answer.json()
    bearer = {"Authorization": f"Bearer {made['token']}"}

    async with api.remote.get("/v1/sandboxes", headers=bearer) as answer:
        assert answer.status == 200
    async with api.remote.get("/metrics", headers=bearer) as answer:
        assert answer.status == 403
    async with api.local.get("/v1/tokens") as answer:
        listed = await answer.text()
    async with api.local.delete(f"/v1/tokens/{made['info']['id']}") as answer:
        assert (await answer.json())["revoked_at"] is not None
    async with api.remote.get("/v1/sandboxes", headers=bearer) as answer:
        assert (answer.status, (await answer.json())["message"]) == (401, "the token was revoked")
    assert made["token"] not in listed


# ---- execs ---------------------------------------------------------------------------------------


async def test_an_exec_answers_with_its_output(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    request = {"id": new_exec_id(), "argv": ["true"], "wait_s": 5, "stdin_data": base64.b64encode(b"\xff").decode()}

    async with api.local.post(f"/v1/sandboxes/{sandbox.id}/execs", json=request) as answer:
        body = await answer.json()

    assert base64.b64decode(body["out"]) == b"\xff\x00"
    assert node.args[-1][1].stdin_data == b"\xff"


async def test_output_comes_as_frames(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.output = [data_frame(b"one"), gap_frame(3, 9), data_frame(b"two", offset=9)]

    async with api.local.get(f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/output?out=0&follow=false") as answer:
        assert answer.headers["Content-Type"] == "application/vnd.dsec.frames"
        frames = list(FrameDecoder().feed(await answer.read()))

    assert [frame.type for frame in frames] == [FrameType.DATA, FrameType.EVENT, FrameType.DATA, FrameType.END]
    assert decode_data(frames[2].body).offset == 9
    assert unpack(frames[3].body, ExecInfo).exit_code == 0


async def test_output_comes_as_lines(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    node.output = [data_frame(b"one"), gap_frame(3, 9)]

    url = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/output"
    async with api.local.get(url, headers={"Accept": "application/x-ndjson"}) as answer:
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]

    assert lines[0] == {"channel": 1, "offset": 0, "data": base64.b64encode(b"one").decode()}
    assert lines[1] == {"gap": {"channel": 1, "start": 3, "end": 9}}
    assert lines[2]["exec"]["exit_code"] == 0


@pytest.mark.parametrize("accept", ["application/x-ndjson", "*/*"])
async def test_a_failure_in_the_middle_of_output_is_told_in_the_stream(
    api: Served, node: NodeDouble, accept: str
) -> None:
    sandbox = node.add()
    node.output = [data_frame(b"one")]
    node.fail[Method.EXEC_GET] = StorageError("the record is damaged")

    url = f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/output"
    async with api.local.get(url, headers={"Accept": accept}) as answer:
        body = await answer.read()

    if accept == "*/*":
        last = list(FrameDecoder().feed(body))[-1]
        assert (last.type, unpack(last.body, ErrorBody).code) == (FrameType.ERR, "storage")
    else:
        assert json.loads(body.splitlines()[-1])["error"]["code"] == "storage"


async def test_stdin_is_passed_on_in_pieces(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    data = bytes(600_000)

    async with api.local.post(
        f"/v1/sandboxes/{sandbox.id}/execs/{new_exec_id()}/stdin?offset=5&eof=true", data=data
    ) as answer:
        assert (await answer.json())["offset"] == 600_005

    writes = [args for method, args in node.args if method == Method.EXEC_STDIN]
    assert b"".join(write.data for write in writes) == data
    assert [write.eof for write in writes] == [False] * (len(writes) - 1) + [True]


# ---- the rest ------------------------------------------------------------------------------------


async def test_a_build_tells_its_story_and_its_end(api: Served, node: NodeDouble) -> None:
    request = {"name": "base", "source": {"kind": "directory", "path": "/x"}}

    async with api.local.post("/v1/environments", json=request) as answer:
        good = [json.loads(line) for line in (await answer.read()).splitlines()]
    node.fail[Method.ENVIRONMENT_GET] = StorageError("no mkfs")
    async with api.local.post("/v1/environments", json=request) as answer:
        bad = [json.loads(line) for line in (await answer.read()).splitlines()]

    assert [line["kind"] for line in good] == ["progress", "done"]
    assert good[-1]["environment"]["name"] == "base"
    assert (bad[-1]["kind"], bad[-1]["error"]["code"]) == ("error", "storage")


async def test_a_push_tells_its_story_and_takes_only_stores(api: Served, node: NodeDouble) -> None:
    async with api.local.post("/v1/environments/base:push", json={"store": "s3://layers/prod"}) as answer:
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]
    async with api.local.post("/v1/environments/base:push", json={"store": "s3://key:secret@layers"}) as answer:
        refused = answer.status

    assert [line["kind"] for line in lines] == ["progress", "done"]
    assert refused == 400
    assert [args.store for method, args in node.args if method == Method.ENVIRONMENT_PUSH] == ["s3://layers/prod"]


async def test_sessions_environments_doctor_and_metrics_answer(api: Served, node: NodeDouble) -> None:
    sandbox = node.add()
    for method, path, body in (
        ("POST", f"/v1/sandboxes/{sandbox.id}/sessions", {"name": "main"}),
        ("GET", f"/v1/sandboxes/{sandbox.id}/sessions", None),
        ("DELETE", f"/v1/sandboxes/{sandbox.id}/sessions/main", None),
        ("GET", f"/v1/sandboxes/{sandbox.id}/metrics", None),
        ("PUT", f"/v1/sandboxes/{sandbox.id}/ttl", {"ttl_idle_s": 5}),
        ("GET", f"/v1/sandboxes/{sandbox.id}/execs", None),
        ("GET", "/v1/environments", None),
        ("GET", "/v1/environments/base", None),
        ("GET", "/v1/environments/base/stats", None),
        ("POST", "/v1/environments/base:trace", None),
        ("DELETE", "/v1/environments/base", None),
        ("GET", "/v1/doctor", None),
    ):
        async with api.local.request(method, path, json=body) as answer:
            assert answer.status == 200, (method, path, await answer.text())
    async with api.local.get("/metrics") as answer:
        assert "dsec_api_requests_total" in await answer.text()


async def test_calls_carry_who_asks_and_the_key(api: Served, node: NodeDouble) -> None:
    bearer = await api.token("/team/run", "use")

    async with api.remote.post(
        "/v1/sandboxes", json={"spec": SPEC}, headers={**bearer, "Idempotency-Key": "the key"}
    ) as answer:
        assert answer.status == 201

    assert (node.callers[-1].project, node.callers[-1].principal) == ("/team/run", "test")
    assert node.callers[-1].rights == {"read", "use"}
    assert node.call_keys[-1] == "the key"


async def test_a_batch_tells_each_item_and_bounds_what_runs_at_once(api: Served, node: NodeDouble) -> None:
    request = {"spec": SPEC, "count": 300}

    async with api.local.post("/v1/sandboxes:batch", json=request, headers={"Idempotency-Key": "b"}) as answer:
        first = [json.loads(line) for line in (await answer.read()).splitlines()]
    async with api.local.post("/v1/sandboxes:batch", json=request, headers={"Idempotency-Key": "b"}) as answer:
        second = [json.loads(line) for line in (await answer.read()).splitlines()]

    assert sorted(item["index"] for item in first) == list(range(300))
    ids = {item["index"]: item["sandbox"]["id"] for item in first}
    assert {item["index"]: item["sandbox"]["id"] for item in second} == ids
    assert len(set(ids.values())) == 300
    assert ("/", "b/299") in node.keys
    assert 1 < node.creates_live_max <= 64


async def test_items_of_a_batch_fail_one_by_one(api: Served, node: NodeDouble) -> None:
    node.fail[Method.CREATE] = CapacityError("full")

    async with api.local.post("/v1/sandboxes:batch", json={"spec": SPEC, "count": 3}) as answer:
        assert answer.status == 200
        items = [json.loads(line) for line in (await answer.read()).splitlines()]

    assert [item["error"]["code"] for item in items] == ["no_capacity"] * 3
    await asyncio.wait_for(api.quiet(), 60)
