"""What the fake backend has besides the contract: small instances, owned time, rebooting hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc

import pytest
import uvloop

from dsec.agent.client import AgentClient
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.instance import FakeInstance
from dsec.core.errors import DeadlineError, GoneError, LaunchError, UnavailableError
from dsec.core.ids import new_exec_id, new_sandbox_id
from dsec.core.states import EndCause
from dsec.testing.clock import ManualClock
from dsec.testing.hosts import Intents, instance_spec
from dsec.wire import agent
from tests.contract.agents_under_test import collect, run

IDLE_BYTES_MAX = 1_000


async def create(backend: FakeBackend) -> FakeInstance:
    instance = await backend.create(instance_spec(), intend=Intents(), deadline_s=60)
    assert isinstance(instance, FakeInstance)
    return instance


async def test_an_idle_instance_is_small() -> None:
    backend, spec = FakeBackend(), instance_spec()

    async def intend(record: bytes) -> None:
        pass

    specs = [dataclasses.replace(spec, id=new_sandbox_id(spec.node)) for _ in range(2_000)]
    tracemalloc.start()
    try:
        kept = [await backend.create(one, intend=intend, deadline_s=60) for one in specs]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size / len(kept) < IDLE_BYTES_MAX


async def test_time_is_the_test_s_own() -> None:
    clock = ManualClock()
    instance = await create(FakeBackend(FakeHost(clock=clock, sleep=clock.sleep)))
    client = await AgentClient.connect(instance.connect, sandbox=instance.id)
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"3600"], timeout_s=1800.0))

    await clock.wait_sleepers(2)
    await clock.advance(1799)
    assert not stream.ended
    await clock.advance(1)

    result = await collect(stream)
    assert (result.end.cause, result.end.usage.wall_us) == ("timed_out", 1_800_000_000)
    client.close()
    await instance.destroy()


async def test_frozen_time_does_not_count() -> None:
    clock = ManualClock()
    instance = await create(FakeBackend(FakeHost(clock=clock, sleep=clock.sleep)))
    client = await AgentClient.connect(instance.connect, sandbox=instance.id)
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"3600"], timeout_s=100.0))
    await clock.wait_sleepers(2)

    await clock.advance(60)
    await instance.pause(deadline_s=1)
    await clock.advance(1_000)
    await instance.resume()
    await clock.advance(39)
    assert not stream.ended
    await clock.advance(1)

    assert (await collect(stream)).end.cause == "timed_out"
    assert (await instance.usage()).frozen_s == 1_000
    client.close()
    await instance.destroy()


async def test_a_step_that_takes_too_long_ends_the_create() -> None:
    host = FakeHost(delay_s=lambda step: 60.0 if step == "create.launch" else 0.0)

    with pytest.raises(DeadlineError) as error:
        await FakeBackend(host).create(instance_spec(), intend=Intents(), deadline_s=0.05)

    assert error.value.step == "launch"
    assert host.leftovers() == []


async def test_a_full_host_refuses_and_keeps_what_it_has() -> None:
    backend = FakeBackend(FakeHost(instances_max=1))
    instance = await create(backend)

    with pytest.raises(LaunchError, match="holds 1 instances"):
        await create(backend)

    await instance.destroy()
    await (await create(backend)).destroy()


async def test_the_same_id_twice_is_refused_and_the_first_lives() -> None:
    backend, spec = FakeBackend(), instance_spec()
    first = await backend.create(spec, intend=Intents(), deadline_s=60)

    with pytest.raises(LaunchError, match="already"):
        await backend.create(spec, intend=Intents(), deadline_s=60)

    client = await AgentClient.connect(first.connect, sandbox=spec.id)
    client.close()
    await first.destroy()
    assert backend.host.leftovers() == []


async def test_a_reboot_takes_every_instance() -> None:
    backend = FakeBackend()
    instance = await create(backend)
    client = await AgentClient.connect(instance.connect, sandbox=instance.id)

    await backend.host.reboot()

    assert isinstance(await client.channel.closed(), UnavailableError)
    with pytest.raises(GoneError):
        await backend.adopt(instance.id, instance.record)
    assert backend.host.leftovers() != []
    await backend.discard(instance.id, instance.record)
    assert backend.host.leftovers() == []


async def test_a_crash_ends_what_runs_and_says_why() -> None:
    instance = await create(FakeBackend())
    client = await AgentClient.connect(instance.connect, sandbox=instance.id)
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"60"]))

    await instance.sandbox.crash(EndCause.OOM, "killed for memory")

    with pytest.raises(UnavailableError):
        await stream.receive()
    assert (await instance.wait()).cause is EndCause.OOM
    await instance.destroy()
    assert (await instance.wait()).cause is EndCause.OOM


def test_all_of_it_works_on_uvloop() -> None:
    async def main() -> bytes:
        instance = await create(FakeBackend())
        client = await AgentClient.connect(instance.connect, sandbox=instance.id)
        result = await run(client, "seq 100000 | wc -l; yes | head -c 1000000")
        client.close()
        await instance.destroy()
        return result.out

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        out = runner.run(main())

    assert out.startswith(b"100000\ny\n")
    assert len(out) == 1_000_007
