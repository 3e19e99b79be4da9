"""Pausing, resuming, times to live, and sandboxes that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.core.errors import (
    UnsupportedError,
)
from dsec.core.states import EndCause
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import NodeClient, fake_instance, fake_node
from dsec.testing.waiting import eventually
from dsec.wire import agent, records
from dsec.wire.node import (
    Method,
    OutputQuery,
    SetTtl,
)
from tests.node_calls import create, file, get, host_of, output_of, start


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


# ---- pause, resume, time to live ------------------------------------------------------------------


async def test_pause_stops_and_exec_resumes(client: NodeClient) -> None:
    sandbox = await create(client)
    paused = await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
    frozen = fake_instance(client.node, sandbox.id).frozen

    answer = await start(client, sandbox.id, "true")

    assert (paused.state, frozen) == ("paused", True)
    assert answer.exec.exit_code == 0
    assert (await get(client, sandbox.id)).state == "running"


async def test_what_only_looks_does_not_resume(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="echo x; sleep 60", wait_s=0.1)
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    await get(client, sandbox.id)
    await client.call(Method.LIST, records.ListQuery(), records.SandboxPage)
    await client.call(Method.METRICS, records.SandboxRef(sandbox.id), records.Metrics)
    await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
    query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id, follow=False)
    async with client.stream(Method.EXEC_OUTPUT, query) as stream:
        assert output_of(await stream.all())[1] == b"x\n"

    assert (await get(client, sandbox.id)).state == "paused"


async def test_many_that_need_a_paused_sandbox_resume_it_once(client: NodeClient) -> None:
    sandbox = await create(client)
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    answers = await asyncio.gather(*(start(client, sandbox.id, "true") for _ in range(20)))

    assert all(answer.exec.exit_code == 0 for answer in answers)


async def test_pause_and_execs_at_once_never_get_stuck(client: NodeClient) -> None:
    sandbox = await create(client)

    async def pause() -> None:
        for _ in range(10):
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    async def work() -> None:
        for _ in range(10):
            assert (await start(client, sandbox.id, "echo", "x")).out == b"x\n"

    async with asyncio.timeout(60):
        await asyncio.gather(pause(), work(), work())


async def test_the_idle_are_ended_and_the_busy_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        idle = await create(client, ttl_idle_s=60.0)
        busy = await create(client, ttl_idle_s=60.0)
        await start(client, busy.id, "sleep", "600", wait_s=None)
        await clock.wait_sleepers(1)

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 1)

        assert (await get(client, idle.id)).cause == "ttl_idle"
        assert (await get(client, busy.id)).state == "running"


async def test_use_puts_the_end_off(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_idle_s=60.0)
        for _ in range(4):
            await clock.advance(50)
            await file(client, Method.FILE_STAT, sandbox.id, agent.PathArgs(path=b"/"), records.FileInfo)
        assert (await get(client, sandbox.id)).state == "running"

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 0)

        assert (await get(client, sandbox.id)).cause == "ttl_idle"


async def test_the_time_to_live_ends_even_the_busy(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0)
        answer = await start(client, sandbox.id, "sleep", "600", wait_s=None)
        waiting = asyncio.create_task(
            client.call(
                Method.EXEC_GET,
                records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=30),
                records.ExecInfo,
            )
        )
        await clock.wait_sleepers(1)

        await clock.advance(61)
        info = await waiting
        await eventually(lambda: len(client.node.registry) == 0)

        assert (info.state, info.status) == ("ended", "unknown")
        assert (await get(client, sandbox.id)).cause == "ttl_running"


async def test_the_time_to_live_stands_still_while_paused(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0, ttl_idle_s=30.0)
        await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
        await clock.advance(10_000)
        assert (await get(client, sandbox.id)).state == "paused"
        await client.call(Method.RESUME, records.SandboxRef(sandbox.id), records.Sandbox)
        await clock.advance(20)
        view = await get(client, sandbox.id)
        assert view.state == "running"
        assert view.usage is not None
        assert view.usage.frozen_s == 10_000

        await clock.advance(11)
        await eventually(lambda: len(client.node.registry) == 0)


async def test_a_new_time_to_live_replaces_the_old(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0)
        changed = await client.call(
            Method.SET_TTL, SetTtl(sandbox.id, records.TtlRequest(ttl_running_s=600.0)), records.Sandbox
        )
        await clock.advance(500)
        assert (await get(client, sandbox.id)).state == "running"

        await clock.advance(101)
        await eventually(lambda: len(client.node.registry) == 0)

        assert changed.ttl_running_s == 600.0


async def test_background_processes_count_with_keepalive(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        kept = await create(client, ttl_idle_s=60.0, keepalive=True)
        bare = await create(client, ttl_idle_s=60.0, keepalive=True)
        await start(client, kept.id, shell="sleep 6000 &")

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 1)

        assert (await get(client, kept.id)).state == "running"
        assert (await get(client, bare.id)).cause == "ttl_idle"


async def test_a_backend_that_cannot_pause_says_so(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)
        found = client.node.registry.find(sandbox.id)
        assert found is not None
        found.backend = FakeBackend(host_of(client), pause=False)

        with pytest.raises(UnsupportedError):
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)


# ---- faults of a sandbox --------------------------------------------------------------------------


async def test_a_dead_agent_fails_the_sandbox_and_invents_no_exit(client: NodeClient) -> None:
    sandbox = await create(client)
    waiting = asyncio.create_task(start(client, sandbox.id, shell="echo begun; sleep 60"))

    async def has_begun() -> bool:
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
        return [exec.out_bytes for exec in page.execs] == [6]

    await eventually(has_begun)

    await fake_instance(client.node, sandbox.id).crash()
    answer = await waiting
    await eventually(lambda: len(client.node.registry) == 0)

    view = await get(client, sandbox.id)
    assert (answer.exec.status, answer.exec.cause, answer.exec.exit_code) == ("unknown", "agent_lost", None)
    assert (view.state, view.cause) == ("failed", "sandbox_fault")
    assert host_of(client).leftovers() == []


async def test_an_agent_that_breaks_the_protocol_costs_its_sandbox_and_no_other(client: NodeClient) -> None:
    broken, other = await create(client), await create(client)
    answer = await start(client, broken.id, "sleep", "60", wait_s=None)
    found = client.node.registry.find(broken.id)
    assert found is not None
    channel = (await found.client()).channel

    channel._received(b"\xff" * 64)  # a frame of an impossible length
    info = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=broken.id, exec=answer.exec.id, wait_s=10), records.ExecInfo
    )
    await eventually(lambda: len(client.node.registry) == 1)

    view = await get(client, broken.id)
    assert (info.status, info.cause) == ("unknown", "agent_lost")
    assert (view.state, view.cause) == ("failed", "sandbox_fault")
    assert view.cause_detail is not None
    assert "protocol" in view.cause_detail
    assert (await start(client, other.id, "true")).exec.exit_code == 0


async def test_an_agent_killed_for_memory_is_told_as_that(client: NodeClient) -> None:
    sandbox = await create(client)

    await fake_instance(client.node, sandbox.id).crash(EndCause.OOM, "killed for memory")
    await eventually(lambda: len(client.node.registry) == 0)

    assert (await get(client, sandbox.id)).cause == "oom"


async def test_a_lost_channel_is_opened_again_and_no_output_is_lost(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="seq 1 1000; sleep 0.3; seq 1001 2000", wait_s=0.1)
    found = client.node.registry.find(sandbox.id)
    assert found is not None
    assert found._link is not None
    agent_client = await found._link.client()

    agent_client.close()
    info = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=10), records.ExecInfo
    )

    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        output = output_of(await stream.all())[1]
    assert info.exit_code == 0
    assert output == b"".join(b"%d\n" % n for n in range(1, 2_001))
