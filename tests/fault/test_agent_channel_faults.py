"""A channel that breaks at any request: the caller learns of it, the agent keeps what it promised to keep."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dsec.agent.client import AgentClient
from dsec.backends.fake.backend import FakeBackend
from dsec.core.errors import SandboxFaultError, UnavailableError
from dsec.core.ids import new_exec_id
from dsec.testing.faults import Faults, each_nth_failure
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.leaks import no_leaks_async
from dsec.wire import agent
from tests.contract.agents_under_test import collect


async def work(client: AgentClient, id: str) -> None:
    await client.write(agent.WriteArgs(path=b"/tmp/f"), b"new")
    stream = await client.exec(agent.Exec(id=id, shell=b"echo x >> /tmp/log; cat /tmp/f"))
    result = await collect(stream)
    await client.ack(id, out=len(result.out), err=0)
    await client.exit_ack(id)


async def test_work_that_is_taken_up_after_a_break_runs_each_command_once() -> None:
    hits = []
    async for faults in each_nth_failure("fake.agent."):
        backend, id = FakeBackend(), new_exec_id()
        async with no_leaks_async():
            instance = await backend.create(instance_spec(), intend=Intents(), deadline_s=60)
            client = await AgentClient.connect(instance.connect, sandbox=instance.id)
            with faults, suppress(UnavailableError):
                await work(client, id)
            again = await AgentClient.connect(instance.connect, sandbox=instance.id)
            if any(state.id == id for state in again.hello.execs) or faults.hit in (
                "fake.agent.write",
                "fake.agent.exec",
            ):
                await work(again, id)

            async with await again.read(agent.ReadArgs(path=b"/tmp/log")) as download:
                assert b"".join([piece async for piece in download]) == b"x\n"
            assert await again.execs() == []
            client.close()
            again.close()
            await instance.destroy()
        hits.append(faults.hit)
        assert backend.host.leftovers() == []

    assert hits == [*(f"fake.agent.{op}" for op in ("write", "exec", "ack", "exit_ack")), None]


async def test_an_agent_that_cannot_be_reached_is_a_fault_of_the_sandbox() -> None:
    instance = await FakeBackend().create(instance_spec(), intend=Intents(), deadline_s=60)

    with Faults(1, prefix="fake.connect"), pytest.raises(SandboxFaultError):
        await AgentClient.connect(instance.connect, sandbox=instance.id)

    client = await AgentClient.connect(instance.connect, sandbox=instance.id)
    client.close()
    await instance.destroy()
