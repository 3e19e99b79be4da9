"""What every backend promises: something running and reachable, or nothing at all."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dsec.agent.client import AgentClient
from dsec.backends.base import Instance, Keeps
from dsec.backends.machines import KeepsMachines
from dsec.core.errors import DsecError, GoneError, SandboxFaultError, UnavailableError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import new_exec_id
from dsec.core.spec import NetworkMode, Substrate
from dsec.testing.faults import each_nth_failure
from dsec.testing.leaks import leaks_between, no_leaks_async, take_snapshot
from dsec.testing.waiting import eventually
from dsec.wire import agent
from tests.contract.agents_under_test import collect
from tests.contract.backends_under_test import BackendUnderTest, layer_of


async def open_client(instance: Instance) -> AgentClient:
    return await AgentClient.connect(instance.connect, sandbox=instance.id)


async def test_an_instance_runs_and_its_agent_answers(backend: BackendUnderTest) -> None:
    instance = await backend.create()

    client = await open_client(instance)

    assert client.hello.execs == []
    assert (await client.usage()).execs == 0
    client.close()


async def test_the_record_is_written_before_the_instance_exists(backend: BackendUnderTest) -> None:
    seen: list[bytes] = []

    async def intend(record: bytes) -> None:
        seen.append(record)
        raise OSError("the journal's disk is full")

    with pytest.raises((OSError, DsecError)):
        await backend.backend.create(backend.spec(), intend=intend, deadline_s=300)

    assert len(seen) == 1
    assert backend.leftovers() == []


async def test_a_destroyed_instance_leaves_nothing_and_may_be_destroyed_again(backend: BackendUnderTest) -> None:
    # What a backend needs only once (its launcher, its directories) is there after the first.
    await (await backend.create()).destroy()

    async with no_leaks_async(backend.watched):
        instance = await backend.create()
        client = await open_client(instance)
        await client.usage()
        await instance.destroy()
        await instance.destroy()
        client.close()

    assert backend.leftovers() == []


async def test_a_channel_ends_with_its_instance(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    client = await open_client(instance)

    await instance.destroy()

    async with asyncio.timeout(60):
        assert isinstance(await client.channel.closed(), UnavailableError)
    with pytest.raises(DsecError):
        await client.usage()
    with pytest.raises(SandboxFaultError):
        await open_client(instance)


async def test_everyone_who_waits_learns_of_the_end(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    waiting = [asyncio.create_task(instance.wait()) for _ in range(3)]
    await asyncio.sleep(0)

    await instance.destroy()

    async with asyncio.timeout(60):
        assert len(await asyncio.gather(*waiting)) == 3
        await instance.wait()


async def test_the_agent_s_exit_is_noticed(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    client = await open_client(instance)

    await client.shutdown()

    async with asyncio.timeout(60):
        await instance.wait()
    with pytest.raises(SandboxFaultError):
        await open_client(instance)
    await instance.destroy()
    client.close()


async def test_a_newer_channel_supersedes_the_older(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    first = await open_client(instance)

    second = await open_client(instance)

    async with asyncio.timeout(60):
        await first.channel.closed()
    assert (await second.usage()).execs == 0
    second.close()


async def test_instances_are_apart(backend: BackendUnderTest) -> None:
    one, two = await backend.create(), await backend.create()
    first, second = await open_client(one), await open_client(two)
    await first.session_open(agent.SessionOpen(name="s")) if backend.name == "fake" else None

    assert first.hello.boot_id != second.hello.boot_id
    assert await second.sessions() == []
    first.close()
    second.close()


async def test_an_instance_survives_its_node_s_restart(backend: BackendUnderTest) -> None:
    if not backend.backend.capabilities.survives_node:
        pytest.skip(f"{backend.name} instances end with the node, and its capabilities say so")
    instance = await backend.create()
    client = await open_client(instance)
    boot_id = client.hello.boot_id
    client.close()

    again = await backend.restart()
    adopted = await again.adopt(instance.id, instance.record)

    client = await open_client(adopted)
    assert client.hello.boot_id == boot_id
    client.close()
    await adopted.destroy()
    assert backend.leftovers() == []


async def test_output_of_an_exec_is_complete_after_a_restart(backend: BackendUnderTest, programs: Path) -> None:
    if backend.substrate is not Substrate.FAKE and backend.backend.capabilities.layers:
        backend.layers = (layer_of(programs),)
    instance = await backend.create()
    client = await open_client(instance)
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"echo before; cat; echo after", stdin=True))
    assert await stream.receive()

    adopted = await (await backend.restart()).adopt(instance.id, instance.record)
    client = await open_client(adopted)
    again = await client.attach(stream.started.id)
    await again.send_stdin(b"between\n")
    again.close_stdin()

    assert (await collect(again)).out == b"before\nbetween\nafter\n"


async def test_what_ended_while_the_node_was_away_is_gone(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    await instance.destroy()

    again = await backend.restart()

    with pytest.raises(GoneError):
        await again.adopt(instance.id, instance.record)


async def test_discard_removes_what_a_record_names_and_may_be_repeated(backend: BackendUnderTest) -> None:
    warm = await backend.create()
    await warm.destroy()
    before = take_snapshot(backend.watched)
    instance = await backend.create()

    again = await backend.restart()
    await again.discard(instance.id, instance.record)
    await again.discard(instance.id, instance.record)

    with pytest.raises(GoneError):
        await again.adopt(instance.id, instance.record)
    assert backend.leftovers() == []
    files = [leak for leak in leaks_between(before, take_snapshot(backend.watched)) if leak.startswith("files:")]
    assert files == []


async def test_discard_works_from_the_intent_alone(backend: BackendUnderTest) -> None:
    """The node died between its journal entry and the first step, or anywhere later."""
    spec = backend.spec()
    await backend.create(spec)

    again = await backend.restart()
    await again.discard(spec.id, backend.intents.last())
    await again.discard(spec.id, backend.intents.last())

    assert backend.leftovers() == []


async def test_pause_stops_everything_or_is_unsupported(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    if not backend.backend.capabilities.pause:
        with pytest.raises(UnsupportedError):
            await instance.pause(deadline_s=300)
        with pytest.raises(UnsupportedError):
            await instance.resume()
        return
    client = await open_client(instance)

    await instance.pause(deadline_s=300)
    answer = asyncio.create_task(client.usage())
    done, _ = await asyncio.wait([answer], timeout=0.2)
    assert not done

    await instance.resume()
    async with asyncio.timeout(60):
        await answer
    client.close()


async def test_a_paused_instance_can_be_destroyed(backend: BackendUnderTest) -> None:
    if not backend.backend.capabilities.pause:
        pytest.skip(f"{backend.name} cannot pause here, and its capabilities say so")
    instance = await backend.create()
    await instance.pause(deadline_s=300)

    async with asyncio.timeout(60):
        await instance.destroy()

    assert backend.leftovers() == []


async def test_a_snapshot_is_taken_or_is_unsupported(backend: BackendUnderTest) -> None:
    instance = await backend.create()

    if backend.backend.capabilities.snapshot is Keeps.NOTHING:
        with pytest.raises(UnsupportedError):
            await instance.snapshot()
        return
    capture = await instance.snapshot()
    try:
        await capture.look()
        await instance.pause(deadline_s=300)
        await capture.take(within_s=30)
        await instance.resume()
        layer = await capture.keep()
    finally:
        await capture.close()
        await capture.close()

    if backend.backend.capabilities.snapshot is Keeps.DISK_MEMORY:
        assert layer.machine
    else:
        assert len(layer.digest) == 64
        assert layer.entries >= 1
    client = await open_client(instance)
    assert (await client.usage()).execs == 0
    client.close()


async def test_what_is_made_from_a_snapshot_with_memory_is_another_one(backend: BackendUnderTest) -> None:
    if backend.backend.capabilities.snapshot is not Keeps.DISK_MEMORY:
        pytest.skip(f"{backend.name} instances have no snapshots of memory, and its capabilities say so")
    instance = await backend.create()
    client = await open_client(instance)
    capture = await instance.snapshot()
    try:
        await client.freeze_prepare()
        await instance.pause(deadline_s=300)
        await capture.take(within_s=30)
        await instance.resume()
        await client.clock(paused_s=0.0)
        kept = await capture.keep()
        other = await backend.create(replace(backend.spec(), machine=kept.machine))
    finally:
        await capture.close()
    theirs = await open_client(other)

    assert theirs.hello.boot_id != client.hello.boot_id
    assert (await theirs.usage()).execs == (await client.usage()).execs == 0
    theirs.close()
    client.close()
    await instance.destroy()
    await other.destroy()
    await keep_no_machines(backend)
    assert backend.leftovers() == []


async def keep_no_machines(backend: BackendUnderTest) -> None:
    assert isinstance(backend.backend, KeepsMachines)
    await backend.backend.keep_machines((), ())


async def test_a_snapshot_that_is_given_up_leaves_nothing(backend: BackendUnderTest) -> None:
    if backend.backend.capabilities.snapshot is Keeps.NOTHING:
        pytest.skip(f"{backend.name} instances have no snapshots, and its capabilities say so")
    instance = await backend.create()
    before = take_snapshot(backend.watched)

    capture = await instance.snapshot()
    await capture.look()
    await capture.close()

    def left() -> list[str]:
        found = leaks_between(before, take_snapshot(backend.watched))
        return [leak for leak in found if not leak.endswith(("/layers", "/staging", "/locks", "/saved"))]

    await eventually(lambda: not left())


async def test_an_instance_that_has_ended_gives_no_snapshot(backend: BackendUnderTest) -> None:
    if backend.backend.capabilities.snapshot is Keeps.NOTHING:
        pytest.skip(f"{backend.name} instances have no snapshots, and its capabilities say so")
    instance = await backend.create()
    await instance.destroy()

    with pytest.raises(DsecError):
        await instance.snapshot()


@pytest.mark.parametrize("network", list(NetworkMode))
async def test_a_network_is_given_as_named_or_is_unsupported(backend: BackendUnderTest, network: NetworkMode) -> None:
    spec = backend.spec()
    spec = replace(spec, spec=msgspec.structs.replace(spec.spec, network=network))

    if network in backend.backend.capabilities.networks:
        await (await backend.create(spec)).destroy()
    else:
        with pytest.raises(UnsupportedError):
            await backend.create(spec)

    assert backend.leftovers() == []


async def test_the_node_listens_inside_or_that_is_unsupported(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    if not backend.backend.capabilities.links:
        with pytest.raises(UnsupportedError):
            await instance.listen("127.77.0.1", 5432)
        return

    with await instance.listen("127.77.0.1", 5432) as listening, await instance.listen("127.77.0.2", 5432) as other:
        assert {one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in (listening, other)} == {1}
        assert not listening.getblocking()

    await instance.destroy()
    with pytest.raises(OSError, match="ended"):
        await instance.listen("127.77.0.1", 5432)


async def test_usage_can_be_asked_at_any_time(backend: BackendUnderTest) -> None:
    instance = await backend.create()
    capabilities = backend.backend.capabilities

    usage = await instance.usage()
    assert usage.pids is None or usage.pids >= 1
    if capabilities.memory_limit:
        assert usage.memory_bytes is not None

    await instance.destroy()
    await instance.usage()


async def test_a_create_that_is_out_of_time_leaves_nothing(backend: BackendUnderTest) -> None:
    await (await backend.create()).destroy()

    async with no_leaks_async(backend.watched):
        # So short that a real backend cannot make it; the fake one has no time to lose.
        with suppress(DsecError):
            await backend.create(deadline_s=0.0001)
        for instance in backend.created:
            await instance.destroy()

    assert backend.leftovers() == []


async def test_a_create_that_is_cancelled_leaves_nothing(backend: BackendUnderTest) -> None:
    await (await backend.create()).destroy()

    async with no_leaks_async(backend.watched):
        task = asyncio.create_task(backend.create())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        for instance in backend.created:
            await instance.destroy()

    assert backend.leftovers() == []


async def test_a_create_that_fails_at_any_step_leaves_nothing(backend: BackendUnderTest) -> None:
    if backend.fault_prefix is None:
        pytest.skip(f"{backend.name} has its steps in another process; tests/fault makes those fail")
    hits = []
    async for faults in each_nth_failure(backend.fault_prefix):
        with faults, suppress(DsecError):
            await (await backend.create()).destroy()
        hits.append(faults.hit)
        assert backend.leftovers() == []

    assert len(hits) > 3
    fault_point("nothing is installed any more")


async def test_many_instances_come_and_go_at_once(backend: BackendUnderTest) -> None:
    await (await backend.create()).destroy()

    async with no_leaks_async(backend.watched):
        instances = await asyncio.gather(*(backend.create() for _ in range(8)))
        assert len({instance.id for instance in instances}) == 8
        await asyncio.gather(*(instance.destroy() for instance in instances))

    assert backend.leftovers() == []
