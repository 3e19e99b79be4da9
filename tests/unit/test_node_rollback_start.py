"""A sandbox that was created with its environment's program has it again after a rollback. On the fake backend."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import InvalidArgumentError, LaunchError
from dsec.core.spec import ReadyProbe
from dsec.node import startup
from dsec.node.rows import ImageRow
from dsec.testing.nodes import NodeClient, crash, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import Method
from tests.node_calls import create, get, start
from tests.unit.test_node_forks import roll_back
from tests.unit.test_node_snapshots import make_file, read, take
from tests.unit.test_node_start import BUSY, main_of, shell


async def test_the_program_runs_again_as_main_and_other_records_stay(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True)
        other = await start(client, sandbox.id, "echo", "x")
        await make_file(client, sandbox.id, "one")
        await take(client, sandbox.id, "snap")
        before = await main_of(client, sandbox)

        for _ in range(2):
            after = await roll_back(client, sandbox.id, "snap")

        main = await main_of(client, sandbox)
        assert (main.name, main.state, main.command) == ("main", "running", before.command)
        assert main.started_at > before.started_at
        assert after.execs_live == 1
        assert await read(client, sandbox.id) == b"one\n"
        query = records.ExecQuery(sandbox=sandbox.id, exec=other.exec.id)
        assert (await client.call(Method.EXEC_GET, query, records.ExecInfo)).exit_code == 0


async def test_one_that_had_ended_runs_again_too(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell("echo told; exit 3")) as client:
        sandbox = await create(client, start=True)
        await take(client, sandbox.id, "snap")
        supervisor = client.node.find(sandbox.id, project=None)
        await eventually(lambda: supervisor.execs.live_count == 0)
        first = await main_of(client, sandbox)

        await roll_back(client, sandbox.id, "snap")

        await eventually(lambda: supervisor.execs.live_count == 0)
        second = await main_of(client, sandbox)
        assert (first.exit_code, second.exit_code, second.out_bytes) == (3, 3, 5)
        assert second.started_at > first.started_at


async def test_a_sandbox_without_start_has_no_main_after_a_rollback(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client)
        await take(client, sandbox.id, "snap")

        assert (await roll_back(client, sandbox.id, "snap")).execs_live == 0


async def test_it_is_waited_for_until_it_is_ready(tmp_path: Path) -> None:
    ready = ReadyProbe(shell="test -e /tmp/up", interval_s=0.01, timeout_s=30.0)
    program = "rm -f /tmp/up; sleep 0.2; echo x > /tmp/up; sleep infinity"
    async with fake_node(tmp_path, environments=shell(program)) as client:
        sandbox = await create(client, start=True, ready=ready)
        await take(client, sandbox.id, "snap")

        await roll_back(client, sandbox.id, "snap")

        assert (await start(client, sandbox.id, "cat", "/tmp/up")).out == b"x\n"


async def test_a_snapshot_that_names_no_program_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True)
        await take(client, sandbox.id, "snap")
        real = client.node.snapshots.origin
        monkeypatch.setattr(client.node.snapshots, "origin", lambda *a, **k: replace(real(*a, **k), image=ImageRow()))

        with pytest.raises(InvalidArgumentError, match="names no program"):
            await roll_back(client, sandbox.id, "snap")

        assert (await get(client, sandbox.id)).incarnation == 1
        assert (await main_of(client, sandbox)).state == "running"


async def test_when_it_cannot_be_started_the_sandbox_has_gone_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True)
        await make_file(client, sandbox.id, "one")
        await take(client, sandbox.id, "snap")
        supervisor = client.node.find(sandbox.id, project=None)

        async def fail(_: object) -> None:
            raise InvalidArgumentError("no such program")

        monkeypatch.setattr(supervisor, "start_main", fail)
        with pytest.raises(LaunchError, match="was rolled back, and its program") as refusal:
            await roll_back(client, sandbox.id, "snap")

        assert refusal.value.step == "start"
        assert (await get(client, sandbox.id)).incarnation == 2
        assert await read(client, sandbox.id) == b"one\n"
        assert supervisor.row.main_due_at is None


@pytest.mark.parametrize("started", [False, True])
async def test_a_node_that_dies_after_the_rollback_leaves_the_start_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    host = FakeHost()
    node = make_fake_node(tmp_path, host=host, environments=shell(BUSY))
    await node.start()
    client = NodeClient(node)
    sandbox = await create(client, start=True)
    await take(client, sandbox.id, "snap")
    reached = asyncio.Event()
    real = startup._started_again

    async def killed(*arguments: Any) -> Any:
        supervisor, journal = arguments
        if started:  # and not noted any more
            with monkeypatch.context() as patch:
                patch.setattr(journal, "put", hang)
                await real(supervisor, journal)
        await hang()

    async def hang(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(startup, "_started_again", killed)
        rolling = asyncio.create_task(roll_back(client, sandbox.id, "snap"))
        await reached.wait()
        of_before = await main_of(client, sandbox)
        await crash(node)
        await asyncio.gather(rolling, return_exceptions=True)

    async with fake_node(tmp_path, host=host, environments=shell(BUSY)) as client:
        supervisor = client.node.find(sandbox.id, project=None)
        await eventually(lambda: supervisor.row.main_due_at is None)
        await eventually(lambda: supervisor.execs.live_count == 1)
        main = await main_of(client, sandbox)
        assert main.state == "running"
        assert (main.started_at == of_before.started_at) is started
        assert [box.execs_live for box in host.sandboxes.values()] == [1]
