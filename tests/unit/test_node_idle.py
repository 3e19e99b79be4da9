"""What nobody uses takes less of its node by and by, and is back when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, GoneError, InvalidArgumentError, ResumeNoMemoryError
from dsec.core.ids import SandboxId
from dsec.core.limits import MIB
from dsec.core.rungs import Rung
from dsec.core.spec import Substrate
from dsec.node.config import IdleConfig
from dsec.testing.clock import ManualClock, settle
from dsec.testing.nodes import NodeClient, crash, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import agent, records
from dsec.wire.codec import unpack
from dsec.wire.events import EventLine, EventQuery
from dsec.wire.node import Method
from tests.drowsy import DrowsyBackend
from tests.node_calls import create, file, get, start

LADDER = IdleConfig(pause_s=60.0, page_out_s=120.0, sleep_s=600.0)


@asynccontextmanager
async def drowsy_node(
    state: Path, clock: ManualClock, idle: IdleConfig = LADDER, backend: DrowsyBackend | None = None
) -> AsyncIterator[tuple[NodeClient, DrowsyBackend]]:
    backend = backend or DrowsyBackend()
    node = make_fake_node(state, clock=clock, sleep=clock.sleep, idle=idle)
    node._make_backends = lambda _: {Substrate.FAKE: backend}
    await node.start()
    try:
        yield NodeClient(node), backend
    finally:
        await node.close()


async def told(client: NodeClient, sandbox: str) -> list[str]:
    async with client.stream(Method.EVENTS, EventQuery(after="oldest", follow=False)) as stream:
        frames = await stream.all()
    events = [unpack(frame.body, EventLine).event for frame in frames[:-1]]
    found = [event for event in events if event is not None and event.sandbox == sandbox]
    return [f"{event.kind} {event.detail or ''}".strip() for event in found]


async def is_told(client: NodeClient, sandbox: str, kind: str) -> bool:
    return kind in await told(client, sandbox)


async def is_in(client: NodeClient, sandbox: str, state: str) -> bool:
    return (await get(client, sandbox)).state == state


async def rest(client: NodeClient, clock: ManualClock, sandbox: str, seconds: float, rung: Rung) -> None:
    await clock.advance(seconds)
    await eventually(lambda: is_told(client, sandbox, f"rested {rung}"))


async def pause(client: NodeClient, sandbox: str) -> None:
    await client.call(Method.PAUSE, records.SandboxRef(sandbox), records.Sandbox)


# ---- up the ladder and down --------------------------------------------------------------------------


async def test_what_nobody_uses_is_paused_then_goes_to_swap_then_to_the_disk_and_an_exec_brings_it_back(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock) as (client, backend):
        id = (await create(client)).id

        await rest(client, clock, id, 61, Rung.PAUSE)
        assert await is_in(client, id, "paused")
        assert not backend.given_back
        await rest(client, clock, id, 60, Rung.PAGE_OUT)
        assert backend.given_back == {id}
        await rest(client, clock, id, 480, Rung.SLEEP)
        assert backend.asleep == {id}
        assert (await get(client, id)).asleep
        await clock.advance(10_000)

        assert (await start(client, id, "echo", "back")).out == b"back\n"
        assert not backend.asleep
        assert await told(client, id) == [
            "created",
            "running",
            "paused",
            "rested pause",
            "rested page_out",
            "rested sleep",
            "resumed",
        ]


async def test_use_begins_it_anew_and_looking_is_no_use(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock) as (client, _):
        id = (await create(client)).id
        for _ in range(3):
            await clock.advance(40)
            await file(client, Method.FILE_STAT, id, agent.PathArgs(path=b"/"), records.FileInfo)
        assert await is_in(client, id, "running")

        await clock.advance(40)
        await get(client, id)
        await client.call(Method.LIST, records.ListQuery(), records.SandboxPage)
        await rest(client, clock, id, 21, Rung.PAUSE)
        await client.call(Method.RESUME, records.SandboxRef(id), records.Sandbox)
        await clock.advance(59)
        assert await is_in(client, id, "running")
        await clock.advance(2)
        await eventually(lambda: is_in(client, id, "paused"))


async def test_what_works_and_what_is_kept_alive_is_left_alone(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock) as (client, _):
        busy, kept, idle = [(await create(client, keepalive=True)).id for _ in range(3)]
        await start(client, busy, "sleep", "6000", wait_s=None)
        await start(client, kept, shell="sleep 6000 &")

        for _ in range(3):
            await clock.advance(61)
        await eventually(lambda: is_in(client, idle, "paused"))

        assert await is_in(client, busy, "running")
        assert await is_in(client, kept, "running")


async def test_being_idle_ends_what_rests_but_not_what_somebody_wants_paused(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock) as (client, _):
        rests, wanted = [(await create(client, ttl_idle_s=300.0)).id for _ in range(2)]
        for id in (rests, wanted):
            await rest(client, clock, id, 61 if id is rests else 0, Rung.PAUSE)
        await pause(client, wanted)

        await clock.advance(300)
        await eventually(lambda: is_in(client, rests, "gone"))

        assert (await get(client, rests)).cause == "ttl_idle"
        assert await is_in(client, wanted, "paused")
        assert "rested sleep" not in await told(client, wanted)


async def test_who_wants_it_paused_in_the_moment_before_its_time_is_over_has_it(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig(pause_s=60.0)) as (client, _):
        id = (await create(client, ttl_idle_s=300.0)).id
        await rest(client, clock, id, 61, Rung.PAUSE)
        sandbox = client.node.registry.find(SandboxId(id))
        assert sandbox is not None
        async with sandbox.creating():  # its turn is taken, as by its memory on its way to the disk
            wanted = asyncio.create_task(pause(client, id))
            await eventually(lambda: sandbox._lock._waiters)  # type: ignore[attr-defined]
            await clock.advance(300)
        await wanted
        await settle()

        assert await is_in(client, id, "paused")


async def test_who_uses_it_in_the_moment_before_its_time_is_over_has_it(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig(pause_s=60.0)) as (client, _):
        id = (await create(client, ttl_idle_s=300.0)).id
        await rest(client, clock, id, 61, Rung.PAUSE)
        sandbox = client.node.registry.find(SandboxId(id))
        assert sandbox is not None
        async with sandbox.creating():
            await clock.advance(300)  # its end waits for its turn
            used = asyncio.create_task(start(client, id, "echo", "used"))
            await eventually(lambda: sandbox.lifetime.busy)

        assert (await used).out == b"used\n"
        assert await is_in(client, id, "running")


async def test_a_backend_that_can_do_no_more_only_pauses(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep, idle=LADDER) as client:
        id = (await create(client)).id
        await rest(client, clock, id, 61, Rung.PAUSE)
        await clock.advance(10_000)

        assert await told(client, id) == ["created", "running", "paused", "rested pause"]
        assert (await start(client, id, "true")).exec.exit_code == 0


async def test_without_a_ladder_nothing_happens(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig()) as (client, _):
        id = (await create(client)).id
        await clock.advance(10_000)

        assert await is_in(client, id, "running")


async def test_a_rung_that_fails_is_tried_again_only_after_use(tmp_path: Path) -> None:
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig(pause_s=60.0, sleep_s=90.0)) as (client, backend):
        backend.full = True
        id = (await create(client)).id
        await rest(client, clock, id, 61, Rung.PAUSE)
        await clock.advance(1_000)
        assert await is_in(client, id, "paused")
        backend.full = False
        await clock.advance(1_000)
        assert not backend.asleep

        await start(client, id, "true")
        await clock.advance(61)
        await eventually(lambda: is_in(client, id, "paused"))
        await rest(client, clock, id, 30, Rung.SLEEP)
        assert backend.asleep == {id}


async def test_a_node_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    clock, backend = ManualClock(), DrowsyBackend()
    node = make_fake_node(tmp_path, clock=clock, sleep=clock.sleep, idle=LADDER)
    node._make_backends = lambda _: {Substrate.FAKE: backend}
    await node.start()
    client = NodeClient(node)
    id = (await create(client, ttl_idle_s=5_000.0)).id
    await rest(client, clock, id, 61, Rung.PAUSE)
    await crash(node)

    async with drowsy_node(tmp_path, clock, backend=backend) as (client, _):
        await eventually(lambda: is_in(client, id, "paused"))
        await rest(client, clock, id, 601, Rung.SLEEP)
        assert (await start(client, id, "echo", "back")).out == b"back\n"
        await clock.advance(5_001)
        await eventually(lambda: is_in(client, id, "gone"))


# ---- memory for what comes back ------------------------------------------------------------------------


async def test_what_comes_back_waits_for_memory_and_fails_by_name_when_there_is_none_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr("dsec.node.memoryqueue.memory_available_bytes", lambda: free)
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig(pause_s=60.0, sleep_s=90.0)) as (client, backend):
        client.node.config = replace(client.node.config, memory_available_bytes_min=MIB)
        client.node._services.config = client.node.config
        id = (await create(client)).id
        await rest(client, clock, id, 61, Rung.PAUSE)
        assert (await start(client, id, "true")).exec.exit_code == 0, "it had kept its memory"
        await clock.advance(61)
        await eventually(lambda: is_in(client, id, "paused"))
        await rest(client, clock, id, 30, Rung.SLEEP)

        asked = asyncio.create_task(start(client, id, "true"))
        await passes(clock, asked.done)
        with pytest.raises(ResumeNoMemoryError) as refused:
            await asked
        assert refused.value.sandbox == id
        assert refused.value.retry_after_s
        assert (await get(client, id)).asleep

        asked = asyncio.create_task(start(client, id, "echo", "back"))
        await clock.wait_sleepers(2, deadline_s=60)
        free = MIB
        await passes(clock, asked.done)
        assert (await asked).out == b"back\n"
        assert not backend.asleep


async def test_what_it_had_in_memory_is_what_it_needs_again_and_no_create_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 20 * MIB
    monkeypatch.setattr("dsec.node.memoryqueue.memory_available_bytes", lambda: free)
    monkeypatch.setattr("dsec.node.node.memory_available_bytes", lambda: free)
    clock, backend = ManualClock(), DrowsyBackend()
    backend.memory_bytes = 15 * MIB
    node = make_fake_node(tmp_path, clock=clock, sleep=clock.sleep, memory_available_bytes_min=10 * MIB)
    node._make_backends = lambda _: {Substrate.FAKE: backend}
    await node.start()
    id = (await create(NodeClient(node))).id
    await NodeClient(node).call(Method.PAUSE, records.PauseRequest(id, deep=True), records.Sandbox)
    await crash(node)

    node = make_fake_node(tmp_path, clock=clock, sleep=clock.sleep, memory_available_bytes_min=10 * MIB)
    node._make_backends = lambda _: {Substrate.FAKE: backend}
    await node.start()
    client = NodeClient(node)
    try:
        await create(client)
        asked = asyncio.create_task(start(client, id, "echo", "back"))
        await eventually(lambda: len(node.memory) == 1)
        with pytest.raises(CapacityError, match=r"5\.0 MiB of memory left"):
            await create(client)

        free = 25 * MIB
        await passes(clock, asked.done)
        assert (await asked).out == b"back\n"
        await clock.advance(1)
        await create(client)
    finally:
        await node.close()


async def test_one_that_is_destroyed_while_it_waits_for_memory_is_gone_for_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.memoryqueue.memory_available_bytes", lambda: 0)
    clock = ManualClock()
    async with drowsy_node(tmp_path, clock, IdleConfig()) as (client, _):
        id = (await create(client)).id
        await client.call(Method.PAUSE, records.PauseRequest(id, deep=True), records.Sandbox)
        asked = asyncio.create_task(start(client, id, "true"))
        await eventually(lambda: len(client.node.memory) == 1)

        await client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)

        with pytest.raises(GoneError):
            await asked
        assert len(client.node.memory) == 0


async def passes(clock: ManualClock, until: Callable[[], bool]) -> None:
    async def is_over() -> bool:
        await clock.advance(0.5)
        return until()

    await eventually(is_over)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sleep_s": 5.0},
        {"page_out_s": 5.0},
        {"pause_s": 10.0, "sleep_s": 5.0},
        {"pause_s": 5.0, "page_out_s": 20.0, "sleep_s": 10.0},
        {"pause_s": -1.0},
    ],
)
def test_a_ladder_whose_rungs_are_in_no_order_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        IdleConfig(**wrong)
