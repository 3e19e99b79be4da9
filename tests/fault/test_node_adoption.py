"""A node that has been started again serves at once, and takes its sandboxes over beside that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.instance import FakeInstance
from dsec.core.errors import SandboxNotFoundError, UnavailableError
from dsec.core.ids import SandboxId, new_exec_id
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, crash, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import ExecStart, Method


class Gate:
    """Adoptions wait before it, and their order is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.open = asyncio.Event()
        adopt = FakeBackend.adopt

        async def slowly(backend: FakeBackend, id: SandboxId, record: bytes) -> FakeInstance:
            self.asked.append(id)
            await self.open.wait()
            return await adopt(backend, id, record)

        monkeypatch.setattr(FakeBackend, "adopt", slowly)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@asynccontextmanager
async def left_by_a_killed_node(
    state: Path, count: int, **settings: object
) -> AsyncIterator[tuple[NodeClient, list[str]]]:
    """The node after one that was killed with `count` sandboxes, as soon as it has started."""
    host = FakeHost()
    node = make_fake_node(state, host=host)
    await node.start()
    request = records.CreateRequest(spec=FAKE_SPEC)
    made = [await NodeClient(node).call(Method.CREATE, request, records.Sandbox) for _ in range(count)]
    await crash(node)
    again = make_fake_node(state, host=host, **settings)
    await again.start()
    try:
        yield NodeClient(again), [sandbox.id for sandbox in made]
    finally:
        await again.close()


async def echo(client: NodeClient, sandbox: str) -> bytes:
    request = records.ExecRequest(id=new_exec_id(), argv=["echo", sandbox], wait_s=30.0)
    return (await client.call(Method.EXEC_START, ExecStart(sandbox, request), records.ExecAnswer)).out or b""


async def listed(client: NodeClient) -> list[records.Sandbox]:
    return (await client.call(Method.LIST, records.ListQuery(limit=1_000), records.SandboxPage)).sandboxes


async def test_a_listing_shows_all_before_any_is_taken_over(tmp_path: Path, gate: Gate) -> None:
    async with left_by_a_killed_node(tmp_path, 5, adopts_at_once_max=2) as (client, ids):
        found = await listed(client)
        gate.open.set()

    assert [(one.id, one.state) for one in found] == [(id, "running") for id in ids]


async def test_others_are_made_and_used_meanwhile(tmp_path: Path, gate: Gate) -> None:
    async with left_by_a_killed_node(tmp_path, 3, adopts_at_once_max=1) as (client, _):
        fresh = await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
        answer = await echo(client, fresh.id)
        gate.open.set()

    assert answer.decode() == f"{fresh.id}\n"


async def test_the_one_that_is_asked_for_comes_next(tmp_path: Path, gate: Gate) -> None:
    async with left_by_a_killed_node(tmp_path, 6, adopts_at_once_max=1) as (client, _):
        await eventually(lambda: len(gate.asked) == 1)
        wanted = [one.id for one in await listed(client) if one.id not in gate.asked][-1]
        answer = asyncio.create_task(echo(client, wanted))
        await eventually(lambda: next(iter(client.node.adoption._left)) == wanted)
        assert not answer.done()
        gate.open.set()

        assert (await answer).decode() == f"{wanted}\n"
        assert gate.asked[1] == wanted


async def test_who_waits_for_one_when_the_node_stops_is_told(tmp_path: Path, gate: Gate) -> None:
    async with left_by_a_killed_node(tmp_path, 2, adopts_at_once_max=1) as (client, ids):
        waiting = asyncio.gather(*(echo(client, id) for id in ids), return_exceptions=True)
        await eventually(lambda: len(gate.asked) == 1)

    assert [type(error) for error in await waiting] == [UnavailableError, UnavailableError]


async def test_a_caller_of_another_project_neither_waits_nor_learns_of_it(tmp_path: Path, gate: Gate) -> None:
    async with left_by_a_killed_node(tmp_path, 1) as (client, ids):
        stranger = NodeClient(client.node, caller=caller_of("/other"))
        with pytest.raises(SandboxNotFoundError):
            await stranger.call(Method.GET, records.SandboxRef(ids[0]), records.Sandbox)
        gate.open.set()


async def test_all_answer_after_many_were_taken_over_few_at_a_time(tmp_path: Path) -> None:
    async with left_by_a_killed_node(tmp_path, 60, adopts_at_once_max=4) as (client, ids):
        answers = await asyncio.gather(*(echo(client, id) for id in ids))

    assert [answer.decode() for answer in answers] == [f"{id}\n" for id in ids]


async def test_after_a_reboot_nothing_is_said_to_run(tmp_path: Path) -> None:
    async with left_by_a_killed_node(tmp_path, 3, boot_id="another") as (client, ids):
        found = await listed(client)
        assert not [one for one in found if one.state == "running"]
        ended = [await client.call(Method.GET, records.SandboxRef(id), records.Sandbox) for id in ids]

    assert [(one.state, one.cause) for one in ended] == [("failed", "node_rebooted")] * 3
