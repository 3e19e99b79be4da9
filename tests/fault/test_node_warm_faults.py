"""Spares when things fail, and when the node is killed in the middle: one owner, or none and nothing left."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from dsec.backends.base import Instance, InstanceSpec
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.core.errors import DsecError
from dsec.core.spec import Substrate
from dsec.node.config import WarmConfig
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import NodeClient, crash, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import Method
from tests.node_calls import create, destroy, start

WARM = WarmConfig(spares_max=2, low=2, high=2)


async def soon(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.001))


async def fill(client: NodeClient) -> None:
    for _ in range(2):
        await destroy(client, (await create(client)).id)
    await eventually(lambda: len(client.node.warm) == 2)


async def only_spares_are_left(client: NodeClient, host: FakeHost) -> None:
    def settled() -> bool:
        return len(host.sandboxes) == len(client.node.warm) == len(client.node.journal.spares()) == 2

    await eventually(settled)
    assert {one.spec.id for one in host.sandboxes.values()} == {row.id for row in client.node.journal.spares()}
    assert {leftover.split()[-1] for leftover in host.leftovers()} == set(host.sandboxes)


@pytest.mark.parametrize("prefix", ["fake.claim", "fake.agent.claim", "node.journal.write"])
async def test_a_claim_that_fails_gives_another_sandbox_or_none(tmp_path: Path, prefix: str) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host, warm=WARM, sleep=soon) as client:
        await fill(client)
        async for faults in each_nth_failure(prefix):
            made = None
            with faults, suppress(DsecError):
                made = await create(client)
            if made is not None:
                assert (await start(client, made.id, "true")).exec.exit_code == 0
                await destroy(client, made.id)
            for shelf in client.node.warm._shelves.values():
                shelf.failed_until = 0.0
            client.node.warm._changed.set()
            await only_spares_are_left(client, host)


async def test_a_spare_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    for prefix in ("fake.create.", "fake.connect"):
        host = FakeHost()
        async with fake_node(tmp_path / prefix, host=host, warm=WARM, sleep=soon) as client:
            for _ in range(2):
                await destroy(client, (await create(client)).id)
            await eventually(lambda: len(client.node.warm) == 2)
            async for faults in each_nth_failure(prefix):
                (shelf,) = client.node.warm._shelves.values()
                while shelf.spares:
                    await client.node.warm._remove_for_sure(shelf.spares.popleft())
                with faults:
                    client.node.warm._changed.set()
                    await eventually(lambda: faults.hit is not None or len(client.node.warm) == 2)  # noqa: B023
                shelf.failed_until = 0.0
                client.node.warm._changed.set()
                await only_spares_are_left(client, host)


async def test_spares_of_a_killed_node_are_removed_by_the_next(tmp_path: Path) -> None:
    host = FakeHost()
    first = make_fake_node(tmp_path, host=host, warm=WARM)
    await first.start()
    await fill(NodeClient(first))
    await crash(first)
    assert len(host.sandboxes) == 2

    async with fake_node(tmp_path, host=host) as client:
        await eventually(lambda: not host.leftovers())
        await eventually(lambda: client.node.journal.spares() == [])


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_node_killed_before_the_claim_is_written_leaves_neither_spare_nor_sandbox(
    tmp_path: Path, moment: str
) -> None:
    host = FakeHost()
    first = make_fake_node(tmp_path, host=host, warm=WARM)
    await first.start()
    client = NodeClient(first)
    await fill(client)
    reached, backend = asyncio.Event(), first.backends[Substrate.FAKE]
    assert isinstance(backend, FakeBackend)
    claim = backend.claim

    async def stuck(spare: Instance, instance: InstanceSpec) -> Instance:
        if moment == "after":
            await claim(spare, instance)
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    backend.claim = stuck  # type: ignore[method-assign]
    creating = asyncio.create_task(create(client, key="k"))
    await reached.wait()
    await crash(first)
    with suppress(DsecError, asyncio.CancelledError):
        await creating

    async with fake_node(tmp_path, host=host) as again:
        await eventually(lambda: not host.leftovers())
        assert again.node.journal.sandboxes() == []
        made = await create(again, key="k")
        assert made.state == "running"


async def test_a_claimed_sandbox_outlives_its_node(tmp_path: Path) -> None:
    host = FakeHost()
    first = make_fake_node(tmp_path, host=host, warm=WARM)
    await first.start()
    client = NodeClient(first)
    await fill(client)
    sandbox = await create(client, key="k", env={"A": "b"})
    await crash(first)

    async with fake_node(tmp_path, host=host) as again:
        await eventually(lambda: len(host.sandboxes) == 1)
        assert (await create(again, key="k", env={"A": "b"})).id == sandbox.id
        answer = await start(again, sandbox.id, shell="echo $A")
        assert answer.out == b"b\n"
        gone = await again.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)

    assert gone.state == "gone"
    assert host.leftovers() == []
