"""Spares: made for what is asked for, claimed once, never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.base import InstanceSpec, Layer
from dsec.backends.fake.host import FakeHost
from dsec.core.errors import InvalidArgumentError
from dsec.node.admission import Room
from dsec.node.config import WarmConfig
from dsec.node.warmpool import WarmPool
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import NodeClient, fake_node
from dsec.testing.waiting import eventually
from tests.node_calls import create, destroy, host_of, start

WARM = WarmConfig(spares_max=4, low=2, high=4)


@asynccontextmanager
async def warm_node(directory: Path, warm: WarmConfig = WARM, **settings: Any) -> AsyncIterator[NodeClient]:
    async with fake_node(directory, warm=warm, **settings) as client:
        yield client


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with warm_node(tmp_path) as client:
        yield client


async def fill(client: NodeClient, count: int = 2, **changes: object) -> None:
    """Asks twice, as a shape must be, and waits for its spares."""
    for _ in range(2):
        await destroy(client, (await create(client, **changes)).id)
    await eventually(lambda: len(client.node.warm) >= count)


def pids_of(client: NodeClient) -> set[int]:
    return {sandbox.serial for sandbox in host_of(client).sandboxes.values()}


async def test_without_a_setting_no_spare_is_made(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        for _ in range(4):
            await destroy(client, (await create(client)).id)

        assert len(client.node.warm) == 0
        assert host_of(client).leftovers() == []


async def test_a_create_gets_a_spare_with_its_own_name_variables_user_and_directory(client: NodeClient) -> None:
    await fill(client)
    before = pids_of(client)

    sandbox = await create(client, name="mine", env={"A": "b"}, workdir="/tmp")
    answer = await start(client, sandbox.id, shell="echo $A; pwd")

    (instance,) = (one for one in host_of(client).sandboxes.values() if one.spec.id == sandbox.id)
    assert instance.serial in before
    assert (answer.out, sandbox.state, sandbox.name) == (b"b\n/tmp\n", "running", "mine")


async def test_no_two_creates_get_the_same_spare(client: NodeClient) -> None:
    await fill(client)

    made = await asyncio.gather(*(create(client) for _ in range(6)))

    assert len({sandbox.id for sandbox in made}) == 6
    serials = [one.serial for one in host_of(client).sandboxes.values() if not one.spare]
    assert len(serials) == len(set(serials)) == 6


async def test_another_shape_is_made_anew_and_the_spares_stay(client: NodeClient) -> None:
    await fill(client)
    before = pids_of(client)

    sandbox = await create(client, privilege_gain=True)

    (instance,) = (one for one in host_of(client).sandboxes.values() if one.spec.id == sandbox.id)
    assert instance.serial not in before


async def test_a_claimed_spare_is_replaced_and_never_more_than_the_most(client: NodeClient) -> None:
    await fill(client)

    for _ in range(6):
        await create(client)
    await eventually(lambda: len(client.node.warm) == 4)

    assert len(client.node.warm) <= WARM.spares_max


async def test_a_spare_runs_nothing_before_it_is_claimed(client: NodeClient) -> None:
    await fill(client)
    shelf = next(iter(client.node.warm._shelves.values()))
    spare = shelf.spares[0].client

    with pytest.raises(InvalidArgumentError):
        await spare.execs()

    assert (await spare.usage()).execs == 0


async def test_a_spare_that_dies_is_replaced_and_handed_to_nobody(client: NodeClient) -> None:
    await fill(client)
    dead = [one for one in host_of(client).sandboxes.values() if one.spare]
    for one in dead:
        await one.crash()

    sandbox = await create(client)

    await eventually(lambda: len(client.node.warm) >= 2)
    assert (await start(client, sandbox.id, "true")).exec.exit_code == 0
    await eventually(lambda: not any(one.ended for one in host_of(client).sandboxes.values()))


async def test_spares_are_made_between_creates_and_not_beside_them(tmp_path: Path) -> None:
    gate = asyncio.Event()
    gate.set()

    async def sleep(seconds: float) -> None:
        await (gate.wait() if seconds == 7.0 else asyncio.sleep(seconds))

    host = FakeHost(sleep=sleep, delay_s=lambda step: 7.0 if step == "create.agent" else 0.0)
    async with warm_node(tmp_path, host=host) as client:
        for _ in range(2):
            await destroy(client, (await create(client)).id)
        await eventually(lambda: len(client.node.warm) == 2)
        for _ in range(2):
            await create(client)
        gate.clear()
        creating = asyncio.create_task(create(client, privilege_gain=True))
        await eventually(lambda: client.node.warm._creating == 1)
        known = len(host.sandboxes)
        for _ in range(20):
            await asyncio.sleep(0)

        assert len(host.sandboxes) <= known + 1

        gate.set()
        await creating
        await eventually(lambda: len(client.node.warm) >= 2)


async def test_whoever_got_a_spare_has_the_machine_for_a_moment_while_half_of_them_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.warmpool._QUIET_S", 1_000.0)
    clock = ManualClock()
    config = WarmConfig(spares_max=4, low=2, high=4, idle_s=1_000_000.0, age_s_max=1_000_000.0)
    async with warm_node(tmp_path, config, clock=clock, sleep=clock.sleep) as client:
        for _ in range(2):
            await create(client)
        await advance_until(clock, lambda: len(client.node.warm) == 2, step_s=10.0)

        await create(client)
        began = clock.monotonic_s()
        await advance_until(clock, lambda: len(client.node.warm) == 2, step_s=10.0)
        assert clock.monotonic_s() - began >= 1_000.0

        for _ in range(2):  # without any left nothing is waited for
            await create(client)
        began = clock.monotonic_s()
        await advance_until(clock, lambda: len(client.node.warm) == 1)
        assert clock.monotonic_s() - began < 1_000.0


async def test_closing_leaves_no_spare(tmp_path: Path) -> None:
    host = FakeHost()
    async with warm_node(tmp_path, host=host) as client:
        await fill(client)

    assert host.leftovers() == []


async def test_spares_go_with_the_layers_that_they_are_on(client: NodeClient) -> None:
    await fill(client)
    shelf = next(iter(client.node.warm._shelves.values()))
    shelf.pattern = replace(shelf.pattern, layers=(Layer("d", "directory", "/x"),))

    await client.node.warm.drop(["other"])
    assert len(client.node.warm) == 2
    await client.node.warm.drop(["d"])

    assert len(client.node.warm) == 0
    assert host_of(client).leftovers() == []


async def test_old_and_unwanted_spares_are_removed(tmp_path: Path) -> None:
    clock = ManualClock()
    config = WarmConfig(spares_max=4, low=2, high=4, age_s_max=100.0, idle_s=100_000.0)
    async with warm_node(tmp_path, config, clock=clock, sleep=clock.sleep) as client:
        for _ in range(2):
            await destroy(client, (await create(client)).id)
        await advance_until(clock, lambda: len(client.node.warm) == 2)
        first = pids_of(client)

        await advance_until(clock, lambda: len(client.node.warm) == 2 and not pids_of(client) & first, step_s=10)
        assert clock.monotonic_s() < 1_000 + config.idle_s

        await advance_until(
            clock, lambda: len(client.node.warm) == 0 and not host_of(client).leftovers(), step_s=50_000
        )


async def advance_until(clock: ManualClock, condition: Any, *, step_s: float = 0.01) -> None:
    """The journal has a thread, whose time is the real one."""

    async def advance() -> None:
        while True:
            await clock.advance(step_s)
            await asyncio.sleep(0.001)

    advancing = asyncio.create_task(advance())
    try:
        await eventually(condition)
    finally:
        advancing.cancel()


async def test_spares_give_way_when_memory_is_short(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(client)
    room = client.node.room()
    short = Room(**{name: getattr(room, name) for name in Room.__slots__} | {"memory_available_bytes": 1})
    monkeypatch.setattr(client.node.warm, "_room", lambda: short)

    await client.node.warm.relieve()

    assert len(client.node.warm) == 0
    assert host_of(client).leftovers() == []


async def test_shapes_that_come_once_each_do_not_add_up(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.core.limits.WARM_SHAPES_MAX", 2)
    warm: WarmPool = client.node.warm
    backend = client.node.backends[next(iter(client.node.backends))]
    shapes = iter(range(100))

    async def shape(instance: InstanceSpec) -> bytes:
        return b"%d" % next(shapes)

    monkeypatch.setattr(backend, "shape", shape)

    for _ in range(10):
        await destroy(client, (await create(client)).id)

    assert len(warm._shelves) == 2


@pytest.mark.parametrize(
    "wrong", [{"spares_max": -1}, {"spares_max": 97}, {"low": 0}, {"low": 3, "high": 2}, {"age_s_max": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        WarmConfig(**wrong)
