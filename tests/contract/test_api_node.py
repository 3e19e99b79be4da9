"""API and node together, on the fake backend: what a caller can do over HTTP, as SDK and curl do it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.core.errors import CapacityError
from dsec.core.ids import new_exec_id
from dsec.wire.frames import FrameDecoder, FrameType, data_of, encode_data, encode_frame
from tests.contract.served import Served, serve_fake, until

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}


@pytest.fixture
async def api(short_tmp: Path) -> AsyncIterator[Served]:
    backend = FakeBackend()
    async with serve_fake(short_tmp, backend) as served:
        yield served
        for sandbox in (await call(served, "GET", "/v1/sandboxes"))["sandboxes"]:
            await call(served, "DELETE", f"/v1/sandboxes/{sandbox['id']}")
        await served.quiet()
        assert backend.host.leftovers() == []


async def call(
    api: Served, method: str, path: str, body: Any = None, *, status: int = 200, **more: Any
) -> dict[str, Any]:
    async with api.local.request(method, path, json=body, **more) as answer:
        assert answer.status == status, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def created(api: Served, **spec: Any) -> str:
    sandbox = await call(api, "POST", "/v1/sandboxes", {"spec": {**SPEC, **spec}}, status=201)
    return f"/v1/sandboxes/{sandbox['id']}"


async def started(api: Served, base: str, shell: str, **more: Any) -> dict[str, Any]:
    return await call(api, "POST", f"{base}/execs", {"id": new_exec_id(), "shell": shell, **more})


async def test_a_create_waits_for_room_as_long_as_its_caller(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.node.creation.refusal", lambda *_: CapacityError("the node is full"))
    body, headers = {"spec": SPEC, "queue_s": 60}, {"Idempotency-Key": "k"}
    refused = await call(api, "POST", "/v1/sandboxes", {**body, "queue_s": 0.05}, status=429, headers=headers)
    assert (refused["code"], refused["retry_after_s"]) == ("no_capacity", 1.0)
    await call(api, "POST", "/v1/sandboxes", {**body, "queue_s": 1e9}, status=413)

    async with asyncio.timeout(60):
        waiting = asyncio.create_task(call(api, "POST", "/v1/sandboxes", body, status=201, headers=headers))
        await until(lambda: len(api.fleet._queue) == 1)
        waiting.cancel()  # the connection is closed with it
        await until(lambda: not len(api.fleet._queue) and not len(api.keeper))

        waiting = asyncio.create_task(call(api, "POST", "/v1/sandboxes", body, status=201, headers=headers))
        await until(lambda: len(api.fleet._queue) == 1)
        monkeypatch.undo()
        api.fleet._try_more(1)
        made = await waiting
    assert (await call(api, "POST", "/v1/sandboxes", body, status=201, headers=headers))["id"] == made["id"]


async def test_a_command_runs_and_its_output_can_be_fetched_again(api: Served) -> None:
    base = await created(api)

    answer = await started(api, base, "echo out; echo err >&2; exit 3", wait_s=20)
    again = await call(api, "GET", f"{base}/execs/{answer['exec']['id']}")
    async with api.local.get(f"{base}/execs/{answer['exec']['id']}/output?out=1") as output:
        frames = list(FrameDecoder().feed(await output.read()))

    assert (answer["exec"]["exit_code"], base64.b64decode(answer["out"])) == (3, b"out\n")
    assert again["exit_code"] == 3
    data = [data_of(frame) for frame in frames if frame.type == FrameType.DATA]
    assert {(piece.channel, piece.offset, piece.payload) for piece in data} == {(1, 1, b"ut\n"), (2, 0, b"err\n")}
    assert frames[-1].type == FrameType.END


async def test_the_same_exec_id_runs_once(api: Served) -> None:
    base = await created(api)
    request = {"id": new_exec_id(), "shell": "echo x", "wait_s": 20}

    first = await call(api, "POST", f"{base}/execs", request)
    second = await call(api, "POST", f"{base}/execs", request)
    other = await call(api, "POST", f"{base}/execs", {**request, "shell": "echo y"}, status=409)

    assert (first["existing"], second["existing"]) == (False, True)
    assert other["code"] in ("idempotency_mismatch", "conflict")


async def test_stdin_is_attached_over_a_websocket(api: Served) -> None:
    base = await created(api)
    exec = (await started(api, base, "cat", stdin=True))["exec"]["id"]

    received = b""
    async with api.local.ws_connect(f"{base}/execs/{exec}/attach") as socket:
        await socket.send_bytes(encode_data(0, 0, 0, 0, b"hello"))
        await socket.send_bytes(encode_frame(FrameType.END, 0, b""))
        async for message in socket:
            (frame,) = FrameDecoder().feed(message.data)
            if frame.type == FrameType.DATA:
                received += data_of(frame).payload

    assert received == b"hello"
    assert socket.close_code == 1000
    assert (await call(api, "GET", f"{base}/execs/{exec}?wait_s=20"))["exit_code"] == 0


async def test_a_list_has_the_figures_of_all_when_they_are_asked_for(api: Served) -> None:
    for _ in range(3):
        await created(api)

    plain = (await call(api, "GET", "/v1/sandboxes"))["sandboxes"]
    told = (await call(api, "GET", "/v1/sandboxes?metrics=true"))["sandboxes"]

    assert [one["id"] for one in told] == [one["id"] for one in plain]
    assert {one["metrics"] for one in plain} == {None}
    one = await call(api, "GET", f"/v1/sandboxes/{plain[0]['id']}/metrics")
    assert all(listed["metrics"].keys() == one.keys() for listed in told)
    assert all(listed["metrics"]["at"] > 0 for listed in told)


async def test_a_wait_ends_with_its_exec(api: Served) -> None:
    base = await created(api)
    exec = (await started(api, base, "sleep 600"))["exec"]["id"]

    waiting = asyncio.create_task(call(api, "GET", f"{base}/execs/{exec}?wait_s=60"))
    still = await call(api, "GET", f"{base}/execs/{exec}?wait_s=0.05")
    await call(api, "POST", f"{base}/execs/{exec}/kill")

    assert still["state"] == "running"
    assert (await asyncio.wait_for(waiting, 60))["cause"] == "killed"


async def test_files_and_archives_go_in_and_out(api: Served) -> None:
    base = await created(api)
    data = bytes(range(256)) * 8_000

    async with api.local.put(f"{base}/files?path=/tmp/a/b&mode=640", data=io.BytesIO(data)) as answer:
        assert answer.status == 200, await answer.text()
    async with api.local.get(f"{base}/files?path=/tmp/a/b", headers={"Range": "bytes=255-257"}) as answer:
        assert (answer.status, await answer.read()) == (206, b"\xff\x00\x01")
        assert json.loads(answer.headers["X-Dsec-File"])["mode"] == 0o640
    async with api.local.get(f"{base}/archive?path=/tmp/a") as answer:
        archive = await answer.read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert [member.size for member in tar if member.isfile()] == [len(data)]
    async with api.local.put(f"{base}/archive?path=/tmp/c", data=io.BytesIO(archive)) as answer:
        assert answer.status == 200, await answer.text()
    listing = await call(api, "GET", f"{base}/files:list?path=/tmp/c")

    assert [(entry["name"], entry["size"]) for entry in listing["entries"]] == [("b", len(data))]


async def test_errors_of_files_are_typed(api: Served) -> None:
    base = await created(api)

    missing = await call(api, "GET", f"{base}/files:stat?path=/nowhere", status=404)
    await call(api, "POST", f"{base}/files:mkdir?path=/d/e")
    full = await call(api, "POST", f"{base}/files:remove?path=/d", status=409)
    directory = await call(api, "GET", f"{base}/files?path=/d", status=409)

    assert missing["code"] == "path_not_found"
    assert (full["code"], full["detail"]["errno"]) == ("file_error", "ENOTEMPTY")
    assert directory["code"] == "file_error"


async def test_an_ended_sandbox_stays_readable_and_refuses_the_rest(api: Served) -> None:
    base = await created(api)
    await call(api, "DELETE", base)

    again = await call(api, "DELETE", base)
    seen = await call(api, "GET", base)
    refused = await call(api, "POST", f"{base}/execs", {"id": new_exec_id(), "shell": "true"}, status=410)

    assert (again["state"], seen["cause"], refused["code"]) == ("gone", "destroyed", "gone")
    assert refused["outcome"] == "gone"


async def test_commands_of_an_ended_sandbox_stay_on_record(api: Served) -> None:
    base = await created(api)
    id = new_exec_id()
    await call(api, "POST", f"{base}/execs", {"id": id, "shell": "echo said; exit 3", "wait_s": 10})
    await call(api, "DELETE", base)

    (listed,) = (await call(api, "GET", f"{base}/execs"))["execs"]
    info = await call(api, "GET", f"{base}/execs/{id}")
    killed = await call(api, "POST", f"{base}/execs/{id}/kill", status=410)

    assert listed == info
    assert (info["exit_code"], info["out_bytes"], killed["code"]) == (3, 5, "gone")


async def test_names_labels_and_ttl_are_kept(api: Served) -> None:
    base = await created(api, name="web", labels={"team": "a"}, ttl_idle_s=60)

    found = await call(api, "GET", "/v1/sandboxes?label=team%3Da&name=web")
    none = await call(api, "GET", "/v1/sandboxes?label=team%3Db")
    taken = await call(api, "POST", "/v1/sandboxes", {"spec": {**SPEC, "name": "web"}}, status=409)
    changed = await call(api, "PUT", f"{base}/ttl", {"ttl_running_s": 100})

    assert [x["name"] for x in found["sandboxes"]] == ["web"]
    assert none["sandboxes"] == []
    assert taken["code"] == "conflict"
    assert (changed["ttl_running_s"], changed["ttl_idle_s"]) == (100, None)


async def test_two_projects_do_not_meet(api: Served) -> None:
    ours, theirs = await api.token("/ours", "use"), await api.token("/theirs", "use")
    async with api.remote.post("/v1/sandboxes", json={"spec": {**SPEC, "name": "a"}}, headers=ours) as answer:
        sandbox = await answer.json()
    async with api.remote.post("/v1/sandboxes", json={"spec": {**SPEC, "name": "a"}}, headers=theirs) as answer:
        assert answer.status == 201  # names are of a project

    base = f"/v1/sandboxes/{sandbox['id']}"
    assert sandbox["project"] == "/ours"
    attempts = [
        ("GET", base, None),
        ("DELETE", base, None),
        ("PUT", f"{base}/ttl", {}),
        ("POST", f"{base}/pause", None),
        ("POST", f"{base}/resume", None),
        ("GET", f"{base}/metrics", None),
        ("POST", f"{base}/execs", {"id": new_exec_id(), "shell": "true"}),
        ("GET", f"{base}/execs", None),
        ("GET", f"{base}/execs/{new_exec_id()}", None),
        ("GET", f"{base}/execs/{new_exec_id()}/output", None),
        ("POST", f"{base}/execs/{new_exec_id()}/kill", None),
        ("POST", f"{base}/execs/{new_exec_id()}/stdin", None),
        ("POST", f"{base}/execs/{new_exec_id()}/signal", {}),
        ("POST", f"{base}/execs/{new_exec_id()}/resize", {}),
        ("POST", f"{base}/sessions", {"name": "s"}),
        ("GET", f"{base}/sessions", None),
        ("DELETE", f"{base}/sessions/s", None),
        ("GET", f"{base}/files?path=/etc", None),
        ("PUT", f"{base}/files?path=/x", None),
        ("GET", f"{base}/files:stat?path=/", None),
        ("GET", f"{base}/files:list?path=/", None),
        ("POST", f"{base}/files:mkdir?path=/d", None),
        ("POST", f"{base}/files:move?path=/f&target=/g", None),
        ("POST", f"{base}/files:remove?path=/f", None),
        ("POST", f"{base}/files:chmod?path=/f&mode=600", None),
        ("POST", f"{base}/files:chown?path=/f&owner=0", None),
        ("POST", f"{base}/files:symlink?path=/l&target=f", None),
        ("GET", f"{base}/archive?path=/", None),
        ("PUT", f"{base}/archive?path=/", None),
    ]
    for method, path, body in attempts:
        async with api.remote.request(method, path, json=body, headers=theirs) as answer:
            assert (answer.status, (await answer.json())["code"]) == (404, "sandbox_not_found"), (method, path)
    async with api.remote.get("/v1/sandboxes", headers=theirs) as answer:
        assert sandbox["id"] not in await answer.text()
    async with api.remote.get(base, headers=ours) as answer:
        assert (await answer.json())["state"] == "running"


async def test_a_batch_is_made_once(api: Served) -> None:
    request = {"spec": {**SPEC, "memory_bytes": 16 << 20}, "count": 100}
    batches = []
    for _ in range(2):
        async with api.local.post("/v1/sandboxes:batch", json=request, headers={"Idempotency-Key": "b"}) as answer:
            items = [json.loads(line) for line in (await answer.read()).splitlines()]
        batches.append({item["index"]: item["sandbox"]["id"] for item in items})

    assert batches[0] == batches[1]
    assert len(set(batches[0].values())) == 100


async def test_a_flood_that_nobody_reads_is_bounded_and_told(api: Served) -> None:
    base = await created(api)

    answer = await started(api, base, "yes | head -c 3000000", record_bytes_max=100_000, wait_s=30)
    async with api.local.get(
        f"{base}/execs/{answer['exec']['id']}/output", headers={"Accept": "application/x-ndjson"}
    ) as output:
        lines = [json.loads(line) for line in (await output.read()).splitlines()]

    recorded = sum(len(base64.b64decode(line["data"])) for line in lines if "data" in line)
    gaps = sum(line["gap"]["end"] - line["gap"]["start"] for line in lines if "gap" in line)
    assert recorded <= 110_000
    assert recorded + gaps == lines[-1]["exec"]["out_bytes"] == 3_000_000


async def test_a_follower_that_vanishes_leaves_the_exec_running(api: Served) -> None:
    base = await created(api)
    exec = (await started(api, base, "echo x; sleep 600"))["exec"]["id"]

    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(api.socket))) as client:
        async with client.get(f"{base}/execs/{exec}/output") as output:
            await output.content.readany()
    await api.quiet()

    assert (await call(api, "GET", f"{base}/execs/{exec}"))["state"] == "running"


async def test_bad_ids_and_unknown_things_have_their_codes(api: Served) -> None:
    base = await created(api)

    for path, status, code in (
        (f"{base}/execs/{new_exec_id()}", 404, "exec_not_found"),
        (base[:-1] + ("a" if base[-1] != "a" else "b"), 404, "sandbox_not_found"),
        (base.replace("sbx_", "sbx_bbbbbbbb")[:31] + base[-16:], 400, "invalid_argument"),
    ):
        assert (await call(api, "GET", path, status=status))["code"] == code
    with contextlib.suppress(aiohttp.WSServerHandshakeError):
        async with api.local.ws_connect(f"{base}/connect?port=1") as socket:
            assert "error" in await socket.receive_str()
