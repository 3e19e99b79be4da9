"""Forks and rollbacks as a node makes them: whole or not at all. On the fake backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DsecError,
    IdempotencyError,
    LaunchError,
    LimitError,
    NotFoundError,
    SandboxStateError,
)
from dsec.core.ids import new_exec_id
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import NodeClient, caller_of, crash, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import Method
from dsec.wire.snapshots import Fork, Forked, ForkRequest, Rollback, RollbackRequest
from tests.node_calls import create, destroy, get, host_of, start
from tests.unit.test_node_snapshots import create_on, held_at, listed, make_file, read, remove, take


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def fork(client: NodeClient, sandbox: str, count: int = 1, key: str | None = None) -> list[records.Sandbox]:
    request = Fork(sandbox, ForkRequest(count=count))
    return (await client.call(Method.FORK, request, Forked, key=key)).sandboxes


async def roll_back(client: NodeClient, sandbox: str, snapshot: str) -> records.Sandbox:
    return await client.call(Method.ROLLBACK, Rollback(sandbox, RollbackRequest(snapshot)), records.Sandbox)


def living(client: NodeClient) -> set[str]:
    return {sandbox.id for sandbox in client.node.registry}


# ---- forks ---------------------------------------------------------------------------------------


async def test_forks_have_the_files_of_the_moment_and_go_their_own_ways(client: NodeClient) -> None:
    sandbox = await create(client, name="first", labels={"a": "b"}, env={"X": "1"}, cpu=0.5)
    await make_file(client, sandbox.id, "one")

    forks = await fork(client, sandbox.id, 3)
    await make_file(client, sandbox.id, "parent")
    await make_file(client, forks[0].id, "child")

    assert [await read(client, child.id) for child in forks] == [b"child\n", b"one\n", b"one\n"]
    assert await read(client, sandbox.id) == b"parent\n"
    assert len({child.id for child in forks} | {sandbox.id}) == 4
    for child in forks:
        assert (child.name, child.labels, child.cpu, child.project) == (None, {"a": "b"}, 0.5, sandbox.project)
        assert (await start(client, child.id, shell="echo $X")).out == b"1\n"
    assert (await listed(client)).snapshots == []


async def test_a_fork_can_be_forked_and_snapshotted(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    (child,) = await fork(client, sandbox.id)
    (grandchild,) = await fork(client, child.id)
    await destroy(client, sandbox.id)
    await destroy(client, child.id)
    await take(client, grandchild.id, "snap")

    assert await read(client, (await create_on(client, "snap")).id) == b"one\n"


async def test_an_admin_s_fork_belongs_to_the_owner_of_the_sandbox(client: NodeClient) -> None:
    sandbox = await create(client)
    admin = client.of(caller_of("/", rights=frozenset({"admin"})))

    (child,) = await fork(admin, sandbox.id)

    assert child.project == sandbox.project
    assert (await get(client, child.id)).state == "running"


@pytest.mark.parametrize("count", [0, 1_001])
async def test_a_number_out_of_bounds_is_refused(count: int) -> None:
    with pytest.raises(LimitError):
        ForkRequest(count=count)


async def test_when_one_cannot_be_made_none_is_left(tmp_path: Path) -> None:
    async with fake_node(tmp_path, host=FakeHost(instances_max=4)) as client:
        sandbox = await create(client)

        with pytest.raises(LaunchError, match="nothing of it is left") as failed:
            await fork(client, sandbox.id, 6)

        assert failed.value.detail["asked"] == 6
        await eventually(lambda: living(client) == {sandbox.id})
        assert set(host_of(client).sandboxes) == {sandbox.id}
        assert len(await fork(client, sandbox.id, 3)) == 3


async def test_a_node_without_room_for_all_makes_none(tmp_path: Path) -> None:
    async with fake_node(tmp_path, sandboxes_max=3) as client:
        sandbox = await create(client)

        with pytest.raises(CapacityError):
            await fork(client, sandbox.id, 5)

        await eventually(lambda: living(client) == {sandbox.id})


async def test_a_failure_at_any_step_leaves_no_fork(client: NodeClient) -> None:
    sandbox = await create(client)

    for faults in each_nth_failure("fake.create."):
        with faults:
            try:
                forks = await fork(client, sandbox.id, 2)
            except LaunchError:
                forks = []
        await eventually(lambda made={child.id for child in forks}: living(client) == made | {sandbox.id})  # type: ignore[misc]
        for child in forks:
            await destroy(client, child.id)


async def test_a_caller_that_goes_away_leaves_no_fork(tmp_path: Path) -> None:
    host, gate = held_at("create.agent")
    gate.set()
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        gate.clear()
        forking = asyncio.create_task(fork(client, sandbox.id, 3))
        await eventually(lambda: len(living(client)) == 4)
        forking.cancel()
        await asyncio.wait([forking])

        await eventually(lambda: living(client) == {sandbox.id})


async def test_the_same_key_gives_the_same_forks(client: NodeClient) -> None:
    sandbox = await create(client)

    first, again = await asyncio.gather(*(fork(client, sandbox.id, 2, key="k") for _ in range(2)))
    await destroy(client, first[0].id)
    later = await fork(client, sandbox.id, 2, key="k")

    assert [child.id for child in first] == [child.id for child in again] == [child.id for child in later]
    assert later[0].state == "gone"
    with pytest.raises(IdempotencyError):
        await fork(client, sandbox.id, 3, key="k")


async def test_forks_outlive_a_restart_and_those_that_were_not_complete_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    node = make_fake_node(tmp_path, host=host)
    await node.start()
    client = NodeClient(node)
    sandbox = await create(client)
    whole = await fork(client, sandbox.id, 2, key="k")

    async def killed(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(node.journal, "settle_fork", killed)
    forking = asyncio.create_task(fork(client, sandbox.id, 2))
    await eventually(lambda: sum(s.row.fork is not None for s in node.registry) == 0 and len(living(client)) == 5)
    rows = {row.id: row for row in node.journal.sandboxes()}
    monkeypatch.setattr(node.forks, "_undo", killed)
    forking.cancel()
    await crash(node)
    await asyncio.gather(forking, return_exceptions=True)

    assert sum(row.fork is not None for row in rows.values()) == 2
    async with fake_node(tmp_path, host=host) as client:
        for child in whole:
            assert (await get(client, child.id)).state == "running"
        await eventually(lambda: living(client) == {sandbox.id, *(child.id for child in whole)})
        assert set(host.sandboxes) == living(client)
        assert [child.id for child in await fork(client, sandbox.id, 2, key="k")] == [child.id for child in whole]


# ---- rollbacks -----------------------------------------------------------------------------------


async def test_a_rolled_back_sandbox_is_the_same_with_the_files_of_before(client: NodeClient) -> None:
    sandbox = await create(client, name="mine", labels={"a": "b"}, env={"X": "1"})
    await make_file(client, sandbox.id, "one")
    await take(client, sandbox.id, "snap")
    await make_file(client, sandbox.id, "two")

    after = await roll_back(client, sandbox.id, "snap")

    assert (after.id, after.name, after.labels, after.state) == (sandbox.id, "mine", {"a": "b"}, "running")
    assert after.incarnation == sandbox.incarnation + 1
    assert await read(client, sandbox.id) == b"one\n"
    assert (await start(client, sandbox.id, shell="echo $X")).out == b"1\n"
    assert len(host_of(client).sandboxes) == 1
    with pytest.raises(ConflictError, match=sandbox.id):
        await remove(client, "snap")


async def test_what_ran_before_has_ended_and_says_why(client: NodeClient) -> None:
    sandbox = await create(client)
    await take(client, sandbox.id, "snap")
    ended = await start(client, sandbox.id, "echo", "x")
    running = await start(client, sandbox.id, shell="echo begun; sleep 600", wait_s=0.2)

    await roll_back(client, sandbox.id, "snap")

    query = records.ExecQuery(sandbox=sandbox.id, exec=running.exec.id)
    info = await client.call(Method.EXEC_GET, query, records.ExecInfo)
    assert (info.status, info.cause) == ("unknown", "rolled_back")
    query = records.ExecQuery(sandbox=sandbox.id, exec=ended.exec.id)
    assert (await client.call(Method.EXEC_GET, query, records.ExecInfo)).exit_code == 0
    assert (await get(client, sandbox.id)).execs_live == 0


async def test_an_operation_under_way_is_told(client: NodeClient) -> None:
    sandbox = await create(client)
    await take(client, sandbox.id, "snap")
    waiting = asyncio.create_task(start(client, sandbox.id, shell="sleep 600", id=new_exec_id()))
    await eventually(lambda: client.node.registry.find(sandbox.id).execs.live_count == 1)  # type: ignore[union-attr]

    await roll_back(client, sandbox.id, "snap")

    assert (await waiting).exec.cause == "rolled_back"


async def test_it_may_go_back_and_forth(client: NodeClient) -> None:
    sandbox = await create(client)
    for name in ("one", "two"):
        await make_file(client, sandbox.id, name)
        await take(client, sandbox.id, name)
    for name in ("one", "two", "one"):
        await roll_back(client, sandbox.id, name)
        assert await read(client, sandbox.id) == f"{name}\n".encode()
    await make_file(client, sandbox.id, "three")
    third = await take(client, sandbox.id, "three")

    assert third.parent is not None
    await roll_back(client, sandbox.id, "two")
    assert await read(client, (await create_on(client, "three")).id) == b"three\n"
    await remove(client, "one")
    assert (await get(client, sandbox.id)).incarnation == 5


async def test_a_paused_sandbox_runs_after_a_rollback(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await take(client, sandbox.id, "snap")
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    assert (await roll_back(client, sandbox.id, "snap")).state == "running"
    assert await read(client, sandbox.id) == b"one\n"


async def test_to_a_snapshot_that_is_not_there_nothing_goes(client: NodeClient) -> None:
    sandbox = await create(client)
    other = client.of(caller_of("/other"))
    await take(other, (await create(other)).id, "theirs")

    for name in ("nothing", "theirs"):
        with pytest.raises(NotFoundError):
            await roll_back(client, sandbox.id, name)
    assert (await get(client, sandbox.id)).incarnation == 1


async def test_a_rollback_and_a_snapshot_at_once_are_a_conflict(tmp_path: Path) -> None:
    host, gate = held_at("snapshot.keep")
    gate.set()
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        await take(client, sandbox.id, "one")
        gate.clear()
        taking = asyncio.create_task(take(client, sandbox.id, "two"))
        supervisor = client.node.registry.find(sandbox.id)
        await eventually(lambda: supervisor._disk_change is not None)  # type: ignore[union-attr]
        with pytest.raises(SandboxStateError):
            await roll_back(client, sandbox.id, "one")
        gate.set()
        await taking
        await roll_back(client, sandbox.id, "two")


@pytest.mark.parametrize("prefix", ["fake.create.", "fake.claim", "fake.agent.claim", "node.journal.write"])
async def test_after_a_failure_it_is_as_it_was_or_as_it_should_be(client: NodeClient, prefix: str) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await take(client, sandbox.id, "snap")
    await make_file(client, sandbox.id, "two")
    running = await start(client, sandbox.id, shell="sleep 600", wait_s=0.1)

    for faults in each_nth_failure(prefix):
        with faults:
            try:
                await roll_back(client, sandbox.id, "snap")
            except DsecError:
                query = records.ExecQuery(sandbox=sandbox.id, exec=running.exec.id)
                assert (await client.call(Method.EXEC_GET, query, records.ExecInfo)).status is None
                assert await read(client, sandbox.id) == b"two\n"
                assert (await get(client, sandbox.id)).incarnation == 1
        await eventually(lambda: len(host_of(client).sandboxes) == 1)
        if await read(client, sandbox.id) == b"one\n":
            break
    assert (await get(client, sandbox.id)).incarnation == 2
    await eventually(lambda: client.node.journal.spares() == [])


async def test_a_node_killed_before_the_decision_leaves_the_old_and_after_it_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    for decided in (False, True):
        node = make_fake_node(tmp_path, host=host)
        await node.start()
        client = NodeClient(node)
        sandbox = await create(client)
        await make_file(client, sandbox.id, "old")
        snapshot = await take(client, sandbox.id)
        await make_file(client, sandbox.id, "new")
        claim, reached = node.journal.claim, asyncio.Event()

        async def killed(
            *arguments: Any, claim: Any = claim, decided: bool = decided, reached: asyncio.Event = reached
        ) -> None:
            if decided:
                await claim(*arguments)
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(node.journal, "claim", killed)
            rolling = asyncio.create_task(roll_back(client, sandbox.id, snapshot.id))
            await reached.wait()
            # What a killed process would not have done any more.
            patch.setattr(node.rollbacks, "_discard", killed)
            await crash(node)
            await asyncio.gather(rolling, return_exceptions=True)

        async with fake_node(tmp_path, host=host) as client:
            assert await read(client, sandbox.id) == (b"old\n" if decided else b"new\n")
            await eventually(lambda: len(host.sandboxes) == 1)
            assert (await get(client, sandbox.id)).incarnation == (2 if decided else 1)
            await destroy(client, sandbox.id)
            assert host.sandboxes == {}


async def test_what_is_left_of_the_instance_before_goes_with_the_sandbox(client: NodeClient) -> None:
    sandbox = await create(client)
    await take(client, sandbox.id, "snap")
    await roll_back(client, sandbox.id, "snap")
    await destroy(client, sandbox.id)

    assert host_of(client).sandboxes == {}
    assert client.node.journal.sandboxes() == []
