"""Creating, ending, finding sandboxes: what callers can count on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    EnvironmentNotFoundError,
    GoneError,
    IdempotencyError,
    InvalidArgumentError,
    LaunchError,
    LimitError,
    UnsupportedError,
)
from dsec.core.spec import Environment, Substrate
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import (
    Method,
)
from tests.node_calls import create, destroy, get, host_of, start


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


# ---- create and end -------------------------------------------------------------------------------


async def test_a_sandbox_is_created_used_and_destroyed_and_nothing_is_left(client: NodeClient) -> None:
    sandbox = await create(client, name="one", labels={"a": "b"})
    answer = await start(client, sandbox.id, "echo", "hello")
    gone = await destroy(client, sandbox.id)

    assert sandbox.state == "running"
    assert sandbox.create_ms is not None
    assert (answer.out, answer.err, answer.exec.exit_code) == (b"hello\n", b"", 0)
    assert (gone.state, gone.cause) == ("gone", "destroyed")
    assert host_of(client).leftovers() == []
    assert list(client.node.config.records_dir.iterdir()) == []


async def test_destroying_twice_is_fine_and_the_tombstone_stays(client: NodeClient) -> None:
    sandbox = await create(client)
    first = await destroy(client, sandbox.id)

    assert await destroy(client, sandbox.id) == first
    assert await get(client, sandbox.id) == first


async def test_using_an_ended_sandbox_tells_its_end(client: NodeClient) -> None:
    sandbox = await create(client)
    await destroy(client, sandbox.id)

    with pytest.raises(GoneError) as gone:
        await start(client, sandbox.id, "true")

    assert gone.value.detail["cause"] == "destroyed"
    assert gone.value.sandbox == sandbox.id


async def test_an_id_of_another_node_is_gone_for_good(client: NodeClient) -> None:
    from dsec.core.errors import NodeRetiredError

    with pytest.raises(NodeRetiredError):
        await get(client, "sbx_zzzzzzzz_aaaaaaaaaaaaaaaa")


@pytest.mark.parametrize("id", ["", "x", "sbx_../../etc_x", "sbx_ABCDEFGH_aaaaaaaaaaaaaaaa"])
async def test_an_id_that_is_none_is_a_typed_error(client: NodeClient, id: str) -> None:
    with pytest.raises(InvalidArgumentError):
        await get(client, id)


async def test_a_substrate_that_is_not_offered_is_refused(client: NodeClient) -> None:
    with pytest.raises(UnsupportedError):
        await create(client, substrate=Substrate.CONTAINER)


async def test_an_unknown_environment_is_refused_and_leaves_nothing(client: NodeClient) -> None:
    with pytest.raises(EnvironmentNotFoundError):
        await create(client, key="k", environment=Environment(base="nowhere"))

    assert client.node.journal.sandboxes() == []
    assert len(client.node.registry) == 0
    assert client.node.journal.key("/test", "k") is None


async def test_names_are_unique_within_a_project_and_free_after_the_end(client: NodeClient) -> None:
    first = await create(client, name="one")
    with pytest.raises(ConflictError):
        await create(client, name="one")
    other = await create(client.of(caller_of("/other")), name="one")
    await destroy(client, first.id)

    again = await create(client, name="one")

    assert len({first.id, other.id, again.id}) == 3


async def test_more_than_the_node_may_hold_is_refused_with_when_to_try_again(tmp_path: Path) -> None:
    async with fake_node(tmp_path, sandboxes_max=2) as client:
        first = await create(client)
        await create(client)
        with pytest.raises(CapacityError) as refused:
            await create(client)
        await destroy(client, first.id)

        await create(client)

        assert refused.value.retry_after_s


async def test_a_burst_never_holds_more_than_was_admitted(tmp_path: Path) -> None:
    async with fake_node(tmp_path, sandboxes_max=5) as client:
        results = await asyncio.gather(*(create(client) for _ in range(20)), return_exceptions=True)

        assert sum(isinstance(result, records.Sandbox) for result in results) == 5
        assert sum(isinstance(result, CapacityError) for result in results) == 15


async def test_a_create_that_is_not_ready_in_time_fails_and_leaves_nothing(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 60.0 if step == "connect" else 0.0)
    async with fake_node(tmp_path, host=host) as client:
        with pytest.raises(LaunchError) as failed:
            await client.call(
                Method.CREATE, records.CreateRequest(spec=FAKE_SPEC, timeout_s=1.0), records.Sandbox, key="k"
            )

        assert failed.value.step == "hello"
        assert host.leftovers() == []
        assert client.node.journal.sandboxes() == []
        assert client.node.journal.key("/test", "k") is None


async def test_who_destroys_a_sandbox_that_is_being_made_does_not_wait_for_that(tmp_path: Path) -> None:
    slow = True
    host = FakeHost(delay_s=lambda step: 600.0 if slow and step == "connect" else 0.0)
    async with fake_node(tmp_path, host=host) as client:
        making = asyncio.create_task(create(client, key="k"))
        await eventually(lambda: host.leftovers() != [])
        (sandbox,) = client.node.registry

        await asyncio.wait_for(destroy(client, sandbox.id), 30)

        with pytest.raises(LaunchError, match="destroyed while it was made"):
            await making
        assert host.leftovers() == []
        assert client.node.journal.sandboxes() == []
        slow = False
        again = await create(client, key="k")
        await destroy(client, again.id)


async def test_a_caller_without_a_key_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 0.05)
    async with fake_node(tmp_path, host=host) as client:
        task = asyncio.create_task(create(client))
        await eventually(lambda: host.leftovers() != [])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        await eventually(lambda: len(client.node.registry) == 0)
        assert host.leftovers() == []
        assert client.node.journal.sandboxes() == []


async def test_a_caller_with_a_key_that_goes_away_finds_it_again(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 0.02)
    async with fake_node(tmp_path, host=host) as client:
        task = asyncio.create_task(create(client, key="k"))
        await eventually(lambda: host.leftovers() != [])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        again = await create(client, key="k")

        assert again.state == "running"
        assert len(client.node.registry) == 1


# ---- idempotency ----------------------------------------------------------------------------------


async def test_the_same_key_and_request_give_the_same_sandbox(client: NodeClient) -> None:
    first = await create(client, key="k")

    again = await create(client, key="k")

    assert again.id == first.id
    assert len(client.node.registry) == 1


async def test_the_same_key_in_flight_is_one_create(tmp_path: Path) -> None:
    async with fake_node(tmp_path, host=FakeHost(delay_s=lambda step: 0.01)) as client:
        sandboxes = await asyncio.gather(*(create(client, key="k") for _ in range(10)))

        assert len({sandbox.id for sandbox in sandboxes}) == 1


async def test_a_key_used_for_another_request_is_refused(client: NodeClient) -> None:
    await create(client, key="k")

    with pytest.raises(IdempotencyError):
        await create(client, key="k", cpu=2.0)


async def test_keys_of_projects_are_apart(client: NodeClient) -> None:
    mine = await create(client, key="k")
    theirs = await create(client.of(caller_of("/other")), key="k", cpu=2.0)

    assert mine.id != theirs.id


async def test_a_key_whose_sandbox_has_ended_gives_its_tombstone(client: NodeClient) -> None:
    sandbox = await create(client, key="k")
    await destroy(client, sandbox.id)

    again = await create(client, key="k")

    assert (again.id, again.state) == (sandbox.id, "gone")


async def test_a_key_is_forgotten_after_its_time(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock) as client:
        first = await create(client, key="k")
        await clock.advance(limits.IDEMPOTENCY_TTL_S + 1)

        again = await create(client, key="k")

        assert again.id != first.id


@pytest.mark.parametrize("key", ["", "x" * 256, "é" * 128])
async def test_a_key_that_is_too_short_or_long_is_a_typed_error(client: NodeClient, key: str) -> None:
    with pytest.raises(LimitError):
        await create(client, key=key)


# ---- listing --------------------------------------------------------------------------------------


async def test_listing_filters_and_pages_and_the_cursor_survives_ends(client: NodeClient) -> None:
    made = [await create(client, labels={"n": str(i % 2)}) for i in range(7)]

    async def page(cursor: str | None, **filters: object) -> records.SandboxPage:
        query = records.ListQuery(cursor=cursor, limit=3, **filters)  # type: ignore[arg-type]
        return await client.call(Method.LIST, query, records.SandboxPage)

    first = await page(None)
    await destroy(client, first.sandboxes[-1].id)  # where the cursor stands
    rest = await page(first.next)
    last = await page(rest.next)
    odd = await page(None, labels={"n": "1"})
    gone = await page(None, states=["gone", "failed"])

    assert [s.id for s in first.sandboxes + rest.sandboxes + last.sandboxes] == [s.id for s in made]
    assert last.next is None
    assert [s.id for s in odd.sandboxes] == [made[1].id, made[3].id, made[5].id]
    assert [s.id for s in gone.sandboxes] == [made[2].id]


async def test_listing_the_living_and_the_ended_is_in_one_order(client: NodeClient) -> None:
    made = [await create(client) for _ in range(4)]
    await destroy(client, made[1].id)
    await destroy(client, made[3].id)

    page = await client.call(Method.LIST, records.ListQuery(states=["running", "gone"]), records.SandboxPage)

    assert [s.id for s in page.sandboxes] == [s.id for s in made]


@pytest.mark.parametrize(
    "query",
    [
        records.ListQuery(limit=0),
        records.ListQuery(limit=100_000),
        records.ListQuery(cursor="x"),
        records.ListQuery(states=["odd"]),
    ],
)
async def test_a_listing_that_cannot_be_is_a_typed_error(client: NodeClient, query: records.ListQuery) -> None:
    with pytest.raises(InvalidArgumentError):
        await client.call(Method.LIST, query, records.SandboxPage)
