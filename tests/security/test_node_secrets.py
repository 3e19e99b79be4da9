"""A secret of an exec is in that exec's environment and nowhere else (ruling 25)."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import DsecError
from dsec.core.ids import new_exec_id
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, fake_node, make_fake_node
from dsec.wire import records
from dsec.wire.codec import pack
from dsec.wire.errors import body_of
from dsec.wire.node import ExecStart, Method

CANARY = "canary-7f3a9c51e2"


async def start(client: NodeClient, sandbox: str, **fields: object) -> records.ExecAnswer:
    request = records.ExecRequest(
        **{"id": new_exec_id(), "wait_s": 10.0, "secrets": {"TOKEN": CANARY}, **fields}  # type: ignore[arg-type]
    )
    return await client.call(Method.EXEC_START, ExecStart(sandbox, request), records.ExecAnswer)


def files_that_hold(canary: str, directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]


async def test_a_secret_is_written_nowhere(tmp_path: Path, logs: io.StringIO) -> None:
    host = FakeHost()
    told: list[bytes] = []
    async with fake_node(tmp_path, host=host) as client:
        create = records.CreateRequest(spec=FAKE_SPEC)
        sandbox = await client.call(Method.CREATE, create, records.Sandbox, key="k")
        id = new_exec_id()
        told.append(pack(await start(client, sandbox.id, id=id, shell="test -n $TOKEN && echo has it")))
        told.append(pack(await start(client, sandbox.id, id=id, shell="test -n $TOKEN && echo has it")))
        told.append(pack(await start(client, sandbox.id, shell=f"true {CANARY}")))  # also where the caller repeats it
        told.append(pack(await start(client, sandbox.id, shell="sleep 60", wait_s=None)))
        for fields in (
            {"argv": ["no-such-program"]},
            {"id": id, "shell": "another"},
            {"shell": "x", "cwd": "/nowhere"},
        ):
            with pytest.raises(DsecError) as refused:
                await start(client, sandbox.id, **fields)
            told.append(pack(body_of(refused.value)))
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
        told.append(pack(page))
        await crash(client.node)
    again = make_fake_node(tmp_path, host=host)
    await again.start()
    await NodeClient(again).call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
    await again.close()

    assert b"has it" in told[0]
    assert all(CANARY.encode() not in piece for piece in told)
    assert files_that_hold("has it", tmp_path / "state" / "ended") != [], "what ended sandboxes said is kept"
    assert files_that_hold(CANARY, tmp_path) == []
    assert CANARY not in logs.getvalue()
    assert "sandbox created" in logs.getvalue(), "the log was not looked at"


async def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)

        await start(client, sandbox.id, shell="echo $TOKEN")  # the command itself says it: that is its output

        assert files_that_hold(CANARY, tmp_path) != []


async def test_an_exec_without_secrets_does_not_see_those_of_another(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
        await start(client, sandbox.id, shell="true")

        answer = await start(client, sandbox.id, shell="echo [$TOKEN]", secrets={})

        assert answer.out == b"[]\n"


async def test_the_hash_of_a_request_says_nothing_of_a_secret(tmp_path: Path) -> None:
    from dsec.node.execs import request_hash

    id = new_exec_id()
    one = records.ExecRequest(id=id, shell="x", secrets={"TOKEN": "guess-1"})
    two = records.ExecRequest(id=id, shell="x", secrets={"TOKEN": "guess-2"})
    other = records.ExecRequest(id=id, shell="x", secrets={"OTHER": "guess-1"})

    assert request_hash(one) == request_hash(two)
    assert request_hash(one) != request_hash(other)
