"""Snapshots as a node keeps them: names, listings, children, failures, restarts. On the fake backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.backends.fake.capture import FakeCapture
from dsec.backends.fake.host import FakeHost
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    DsecError,
    IdempotencyError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
    SandboxStateError,
    StorageError,
    UnsupportedError,
)
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.node.origins import Origin
from dsec.node.snapshots import Captured, Snapshots, _run_to_merge
from dsec.node.snapshotstore import SnapshotStore
from dsec.node.supervisor import Supervisor
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, crash, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import agent, records
from dsec.wire.node import Done, Method, Right
from dsec.wire.snapshots import SnapshotInfo, SnapshotPage, SnapshotQuery, SnapshotRef, SnapshotRequest, SnapshotTake
from tests.node_calls import create, destroy, file, get, start

CONTENT = "echo {} > /tmp/content"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def take(client: NodeClient, sandbox: str, name: str | None = None, key: str | None = None) -> SnapshotInfo:
    request = SnapshotTake(sandbox, SnapshotRequest(name=name))
    return await client.call(Method.SNAPSHOT_TAKE, request, SnapshotInfo, key=key)


async def listed(client: NodeClient, **query: object) -> SnapshotPage:
    return await client.call(Method.SNAPSHOT_LIST, SnapshotQuery(**query), SnapshotPage)  # type: ignore[arg-type]


async def remove(client: NodeClient, name: str) -> None:
    await client.call(Method.SNAPSHOT_REMOVE, SnapshotRef(name), Done)


async def create_on(client: NodeClient, snapshot: str, spec: SandboxSpec | None = None) -> records.Sandbox:
    asked = spec or SandboxSpec(environment=FAKE_SPEC.environment)
    return await client.call(Method.CREATE, records.CreateRequest(spec=asked, snapshot=snapshot), records.Sandbox)


async def read(client: NodeClient, sandbox: str) -> bytes:
    return (await start(client, sandbox, "cat", "/tmp/content")).out


async def make_file(client: NodeClient, sandbox: str, text: str) -> None:
    assert (await start(client, sandbox, shell=CONTENT.format(text))).exec.exit_code == 0


def held_at(step: str) -> tuple[FakeHost, asyncio.Event]:
    """A host on which this step takes until the event is set."""
    gate = asyncio.Event()

    async def sleep(_: float) -> None:
        await gate.wait()

    return FakeHost(sleep=sleep, delay_s=lambda name: 1.0 if name == step else 0.0), gate


# ---- what is in one ------------------------------------------------------------------------------


async def test_a_sandbox_made_from_a_snapshot_has_what_was_there_at_its_moment(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await take(client, sandbox.id, "first")
    await make_file(client, sandbox.id, "two")

    child = await create_on(client, "first")
    await make_file(client, child.id, "three")
    other = await create_on(client, "first")

    assert [await read(client, id) for id in (sandbox.id, child.id, other.id)] == [b"two\n", b"three\n", b"one\n"]


async def test_what_is_not_asked_for_is_as_in_the_snapshotted_sandbox(client: NodeClient) -> None:
    sandbox = await create(
        client, name="first", cpu=0.5, env={"A": "1", "B": "1"}, labels={"x": "y"}, workdir="/tmp", pids_max=64
    )
    await take(client, sandbox.id, "snap")

    asked = SandboxSpec(environment=FAKE_SPEC.environment, env={"B": "2"}, labels={"z": "1"}, pids_max=99, name="mine")
    child = await create_on(client, "snap", asked)

    assert (child.cpu, child.pids_max, child.name, child.workdir) == (0.5, 99, "mine", "/tmp")
    assert child.labels == {"x": "y", "z": "1"}
    assert (await start(client, child.id, shell="echo $A$B; pwd")).out == b"12\n/tmp\n"
    assert (await create_on(client, "snap")).name is None


async def test_a_snapshot_becomes_no_sandbox_of_another_substrate(client: NodeClient) -> None:
    sandbox = await create(client)
    await take(client, sandbox.id, "snap")
    asked = SandboxSpec(environment=FAKE_SPEC.environment, substrate=Substrate.MICROVM)

    with pytest.raises(UnsupportedError):
        await create_on(client, "snap", asked)


async def test_snapshots_of_snapshots_tell_what_they_are_of(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    first = await take(client, sandbox.id, "first")
    child = await create_on(client, "first")
    second = await take(client, child.id, "second")

    assert (first.parent, second.parent) == (None, first.id)
    assert second.layers[: len(first.layers)] == first.layers
    assert await read(client, (await create_on(client, "second")).id) == b"one\n"


async def test_a_paused_sandbox_stays_paused(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    snapshot = await take(client, sandbox.id)

    assert (await get(client, sandbox.id)).state == "paused"
    assert snapshot.frozen_ms == 0.0
    assert await read(client, (await create_on(client, snapshot.id)).id) == b"one\n"


# ---- names, listings, owners ---------------------------------------------------------------------


async def test_names_are_unique_in_a_project_and_free_again_after_removal(client: NodeClient) -> None:
    sandbox = await create(client)
    await take(client, sandbox.id, "snap")

    with pytest.raises(ConflictError, match="snap"):
        await take(client, sandbox.id, "snap")
    await remove(client, "snap")
    await take(client, sandbox.id, "snap")

    other = client.of(caller_of("/other"))
    theirs = await create(other)
    assert (await take(other, theirs.id, "snap")).project == "/other"


async def test_without_a_name_it_goes_by_its_id(client: NodeClient) -> None:
    sandbox = await create(client)

    snapshot = await take(client, sandbox.id)

    assert snapshot.name == snapshot.id
    assert (await client.call(Method.SNAPSHOT_GET, SnapshotRef(snapshot.id), SnapshotInfo)) == snapshot


async def test_other_projects_see_none_of_it(client: NodeClient) -> None:
    sandbox = await create(client)
    snapshot = await take(client, sandbox.id, "snap")
    other = client.of(caller_of("/other"))

    for name in ("snap", snapshot.id):
        with pytest.raises(NotFoundError):
            await other.call(Method.SNAPSHOT_GET, SnapshotRef(name), SnapshotInfo)
        with pytest.raises(NotFoundError):
            await remove(other, name)
        with pytest.raises(NotFoundError):
            await create_on(other, name)
    assert (await listed(other)).snapshots == []


async def test_an_admin_finds_those_of_all_projects_and_must_say_which(client: NodeClient) -> None:
    for project in ("/one", "/two"):
        asking = client.of(caller_of(project))
        await take(asking, (await create(asking)).id, "snap")
    admin = client.of(caller_of("/", rights=frozenset({Right.ADMIN})))

    assert len((await listed(admin)).snapshots) == 2
    with pytest.raises(ConflictError, match="id"):
        await admin.call(Method.SNAPSHOT_GET, SnapshotRef("snap"), SnapshotInfo)


async def test_a_listing_comes_in_pages_in_order(client: NodeClient) -> None:
    one, two = await create(client), await create(client)
    made = [await take(client, (one if i % 2 else two).id, f"s{i}") for i in range(7)]

    first = await listed(client, limit=3)
    second = await listed(client, limit=3, cursor=first.next)
    third = await listed(client, limit=3, cursor=second.next)

    assert [info.name for page in (first, second, third) for info in page.snapshots] == [info.name for info in made]
    assert third.next is None
    assert [info.name for info in (await listed(client, sandbox=one.id)).snapshots] == ["s1", "s3", "s5"]
    with pytest.raises(InvalidArgumentError):
        await listed(client, cursor="nonsense")


async def test_a_project_has_a_bound(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SNAPSHOTS_PER_PROJECT_MAX", 2)
    sandbox = await create(client)
    await take(client, sandbox.id, "one")
    await take(client, sandbox.id, "two")

    with pytest.raises(LimitError):
        await take(client, sandbox.id, "three")
    await remove(client, "one")
    await take(client, sandbox.id, "three")


def test_what_a_project_may_have_is_for_those_below_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SNAPSHOTS_PER_PROJECT_MAX", 2)
    store = SnapshotStore(tmp_path)
    store.reserve("/team/a", "one", "1")
    store.reserve("/team/b/c", "one", "2")

    with pytest.raises(LimitError, match="/team and the projects below it"):
        store.reserve("/team/another", "one", "3")
    store.reserve("/teammate", "one", "3")
    store.let_go("/team/b/c", "one")
    store.reserve("/team/another", "one", "4")


async def test_a_node_has_a_bound(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SNAPSHOTS_MAX", 1)
    sandbox = await create(client)
    await take(client, sandbox.id, "one")

    with pytest.raises(CapacityError):
        await take(client, sandbox.id, "two")


async def test_a_chain_has_no_end(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SNAPSHOT_CHAIN_MAX", 3)
    sandbox = await create(client)
    counts = []
    for number in range(10):
        await make_file(client, sandbox.id, str(number))
        snapshot = await take(client, sandbox.id, f"snap-{number}")
        counts.append(len(snapshot.layers))
        sandbox = await create_on(client, f"snap-{number}")

    assert await read(client, sandbox.id) == b"9\n"
    assert max(counts) == counts[0] + 3  # the first is the base here: the fake environment has no layers
    for number in range(9, -1, -1):
        await destroy(client, sandbox.id)
        sandbox = await create_on(client, f"snap-{number}")
        assert await read(client, sandbox.id) == b"%d\n" % number


async def test_where_nothing_can_be_made_one_a_sandbox_has_no_more_layers_than_an_overlay_takes(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOWERS_MAX", 2)
    keep = FakeCapture.keep
    monkeypatch.setattr(FakeCapture, "keep", lambda self, run=(): keep(self))
    sandbox = await create(client)
    for name in ("one", "two"):
        await take(client, sandbox.id, name)
        sandbox = await create_on(client, name)

    with pytest.raises(LimitError, match="layers"):
        await take(client, sandbox.id, "three")


async def test_an_environment_of_as_many_layers_as_there_can_be_is_snapshotted_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LOWERS_MAX", 6)
    full = tuple("abcdef")

    assert _run_to_merge(full, full) == ("d", "e", "f")
    assert _run_to_merge(full[:5], full[:5]) == ()
    assert _run_to_merge((*full[:3], "x", "y", "z"), full[:3]) == ("x", "y", "z")
    assert _run_to_merge((*full[:5], "x"), full[:5]) == ("d", "e", "x")


async def test_a_disk_that_stands_still_ends_a_snapshot_and_not_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SNAPSHOT_MAKE_S_MAX", 0.2)
    for step in ("snapshot.look", "snapshot.keep"):
        host, _ = held_at(step)
        async with fake_node(tmp_path / step, host=host) as client:
            sandbox = await create(client)
            await make_file(client, sandbox.id, "one")

            with pytest.raises(DeadlineError, match="within") as refused:
                await take(client, sandbox.id, "snap")

            assert refused.value.sandbox == sandbox.id
            assert await read(client, sandbox.id) == b"one\n"
            assert (await listed(client)).snapshots == []
            with pytest.raises(DeadlineError):  # the name is free, and nobody is in the way
                await take(client, sandbox.id, "snap")


# ---- removal -------------------------------------------------------------------------------------


async def test_one_that_sandboxes_were_made_from_stays_and_says_which(client: NodeClient) -> None:
    await take(client, (await create(client)).id, "snap")
    child = await create_on(client, "snap")

    with pytest.raises(ConflictError, match=child.id) as refused:
        await remove(client, "snap")
    assert refused.value.detail["sandboxes"] == [child.id]
    await destroy(client, child.id)
    await remove(client, "snap")

    assert (await listed(client)).snapshots == []
    with pytest.raises(NotFoundError):
        await create_on(client, "snap")


async def test_a_snapshot_outlives_its_sandbox(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await take(client, sandbox.id, "snap")
    await destroy(client, sandbox.id)

    assert await read(client, (await create_on(client, "snap")).id) == b"one\n"


# ---- failures ------------------------------------------------------------------------------------


async def test_a_failure_at_any_step_leaves_nothing_and_the_sandbox_runs(client: NodeClient) -> None:
    sandbox = await create(client)

    for faults in each_nth_failure("fake.snapshot."):
        with faults:
            try:
                await take(client, sandbox.id, "snap")
            except StorageError:
                assert (await listed(client)).snapshots == []
            else:
                await remove(client, "snap")
        assert (await get(client, sandbox.id)).state == "running"
        assert (await start(client, sandbox.id, "true")).exec.exit_code == 0


async def test_a_record_that_cannot_be_written_is_no_snapshot(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await create(client)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dsec.node.snapshotstore.write_synced", full)
        with pytest.raises(StorageError, match="disk"):
            await take(client, sandbox.id, "snap")

    assert (await listed(client)).snapshots == []
    assert list(client.node.config.snapshots_dir.iterdir()) == []
    await take(client, sandbox.id, "snap")


async def test_two_snapshots_of_one_sandbox_at_once_are_a_conflict(tmp_path: Path) -> None:
    host, gate = held_at("snapshot.take")
    async with fake_node(tmp_path, host=host) as client:
        sandbox, other = await create(client), await create(client)
        first = asyncio.create_task(take(client, sandbox.id, "one"))
        await eventually(lambda: client.node.registry.find(sandbox.id).state == "pausing")  # type: ignore[union-attr]

        with pytest.raises(SandboxStateError, match="snapshot"):
            await take(client, sandbox.id, "two")
        gate.set()
        await take(client, other.id, "three")

        assert (await first).name == "one"
        assert {info.name for info in (await listed(client)).snapshots} == {"one", "three"}


async def test_use_of_a_sandbox_waits_for_the_moment_of_its_snapshot(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 0.2 if step == "snapshot.take" else 0.0)
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        taking = asyncio.create_task(take(client, sandbox.id, "one"))
        await eventually(lambda: client.node.registry.find(sandbox.id).state == "pausing")  # type: ignore[union-attr]

        assert (await start(client, sandbox.id, "true")).exec.exit_code == 0
        await taking


async def test_a_sandbox_that_is_destroyed_meanwhile_has_no_snapshot(tmp_path: Path) -> None:
    host, gate = held_at("snapshot.look")
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        taking = asyncio.create_task(take(client, sandbox.id, "one"))
        await asyncio.sleep(0)
        await destroy(client, sandbox.id)
        gate.set()

        with pytest.raises(DsecError) as failed:
            await taking
        assert failed.value.code == "gone"
        assert (await listed(client)).snapshots == []


async def test_a_caller_that_goes_away_has_made_nothing_and_the_sandbox_runs(tmp_path: Path) -> None:
    host, gate = held_at("snapshot.take")
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        taking = asyncio.create_task(take(client, sandbox.id, "one"))
        await eventually(lambda: client.node.registry.find(sandbox.id).state == "pausing")  # type: ignore[union-attr]
        taking.cancel()
        await asyncio.wait([taking])
        gate.set()

        assert (await start(client, sandbox.id, "true")).exec.exit_code == 0
        assert (await listed(client)).snapshots == []
        await take(client, sandbox.id, "one")


# ---- asked again ---------------------------------------------------------------------------------


async def test_the_same_key_gives_the_same_snapshot(client: NodeClient) -> None:
    sandbox = await create(client)

    first, again = await asyncio.gather(take(client, sandbox.id, "s", key="k"), take(client, sandbox.id, "s", key="k"))
    later = await take(client, sandbox.id, "s", key="k")

    assert first == again == later
    with pytest.raises(IdempotencyError):
        await take(client, sandbox.id, "other", key="k")


# ---- restarts ------------------------------------------------------------------------------------


async def test_snapshots_are_there_after_a_restart(tmp_path: Path) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        await make_file(client, sandbox.id, "one")
        made = await take(client, sandbox.id, "snap")
        child = await create_on(client, "snap")
        await crash(client.node)

    async with fake_node(tmp_path, host=host) as client:
        assert (await listed(client)).snapshots == [made]
        with pytest.raises(ConflictError, match=child.id):
            await remove(client, "snap")
        assert await read(client, (await create_on(client, "snap")).id) == b"one\n"
        with pytest.raises(ConflictError):
            await take(client, sandbox.id, "snap")


async def test_a_node_killed_in_the_middle_leaves_no_snapshot_and_the_next_one_lets_the_sandbox_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(delay_s=lambda step: 600.0 if step == "snapshot.take" else 0.0)
    node = make_fake_node(tmp_path, host=host)
    await node.start()
    client = NodeClient(node)
    sandbox = await create(client)
    taking = asyncio.create_task(take(client, sandbox.id, "one"))
    await eventually(lambda: host.sandboxes[sandbox.id].frozen)  # type: ignore[index]

    async def unheard(row: object) -> None:
        raise StorageError("killed")

    monkeypatch.setattr(node.journal, "put", unheard)
    await crash(node)
    await asyncio.gather(taking, return_exceptions=True)
    host.sandboxes[sandbox.id].freeze()  # type: ignore[index]  # as a killed node would have left it

    async with fake_node(tmp_path, host=host) as client:
        assert (await start(client, sandbox.id, "true")).exec.exit_code == 0
        assert (await get(client, sandbox.id)).state == "running"
        assert (await listed(client)).snapshots == []


async def test_a_record_that_cannot_be_read_stops_the_node_before_its_layers_are_forgotten(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        snapshot = await take(client, (await create(client)).id)
        path = client.node.config.snapshots_dir / f"{snapshot.id}.json"
    path.write_bytes(path.read_bytes()[:40])

    with pytest.raises(StorageError, match=snapshot.id):
        async with fake_node(tmp_path):
            pass


async def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        draft = client.node.config.snapshots_dir / "snp_x.draft"
    draft.write_bytes(b"half")

    async with fake_node(tmp_path) as client:
        assert (await listed(client)).snapshots == []
    assert not draft.exists()


async def test_reading_needs_no_more_than_the_right_to_read(client: NodeClient) -> None:
    await take(client, (await create(client)).id, "snap")
    reader = client.of(caller_of(rights=frozenset({Right.READ})))

    assert [info.name for info in (await listed(reader)).snapshots] == ["snap"]
    with pytest.raises(DsecError) as refused:
        await remove(reader, "snap")
    assert refused.value.code == "forbidden"


async def test_fields_that_a_newer_version_adds_are_ignored(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        snapshot = await take(client, (await create(client)).id, "snap")
        path = client.node.config.snapshots_dir / f"{snapshot.id}.json"
    stored = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(stored | {"later": 1}))

    async with fake_node(tmp_path) as client:
        assert (await listed(client)).snapshots == [snapshot]


async def test_files_of_a_snapshot_keep_their_owners_and_modes(client: NodeClient) -> None:
    sandbox = await create(client)
    await make_file(client, sandbox.id, "one")
    await file(client, Method.FILE_CHMOD, sandbox.id, agent.ChmodArgs(path=b"/tmp/content", mode=0o640))
    await take(client, sandbox.id, "snap")

    child = await create_on(client, "snap")
    info = await file(client, Method.FILE_STAT, child.id, agent.PathArgs(path=b"/tmp/content"), records.FileInfo)

    assert isinstance(info, records.FileInfo)
    assert info.mode & 0o7777 == 0o640


async def test_one_project_leaves_a_turn_to_others(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes minutes is made of one sparse file."""
    gate = asyncio.Event()

    async def captured(_: Snapshots, sandbox: Supervisor) -> Captured:
        if sandbox.row.project == "/greedy":
            await gate.wait()
        raise LimitError("it has had its turn")

    monkeypatch.setattr(Snapshots, "_captured", captured)
    monkeypatch.setattr(limits, "SNAPSHOTS_WAITING_PER_PROJECT_MAX", limits.SNAPSHOTS_AT_ONCE_MAX)
    greedy, modest = client.of(caller_of("/greedy")), client.of(caller_of("/modest"))
    many = [(await create(greedy)).id for _ in range(limits.SNAPSHOTS_AT_ONCE_MAX)]
    taking = [asyncio.create_task(take(greedy, id)) for id in many]
    await eventually(lambda: client.node.snapshots._under_way.total() == len(many))

    with pytest.raises(CapacityError):
        await take(greedy, (await create(greedy)).id)
    async with asyncio.timeout(10):
        with pytest.raises(LimitError, match="had its turn"):
            await take(modest, (await create(modest)).id)
    gate.set()
    await asyncio.gather(*taking, return_exceptions=True)

    assert not client.node.snapshots._under_way


def test_what_is_said_wins_over_the_snapshot_though_it_is_the_default() -> None:
    other = SandboxSpec(
        environment=Environment("e"), cpu=2.0, memory_bytes=2 << 30, pids_max=7, keepalive=True, user="u", start=True
    )
    asked, origin = SandboxSpec(environment=Environment("base")), Origin(other, ())

    left = origin.spec_for(asked)
    said = origin.spec_for(asked, frozenset({"cpu", "memory_bytes", "pids_max", "keepalive", "user", "environment"}))

    assert (left.cpu, left.memory_bytes, left.pids_max, left.keepalive, left.user) == (2.0, 2 << 30, 7, True, "u")
    assert (said.cpu, said.memory_bytes, said.pids_max, said.keepalive) == (1.0, 1 << 30, 1024, False)
    assert (said.user, said.start, said.environment.base) == ("u", True, "e"), "None is nothing that is said"
    machine = Origin(msgspec.structs.replace(other, substrate=Substrate.MICROVM), ())
    assert machine.spec_for(asked).substrate is Substrate.MICROVM
    with pytest.raises(UnsupportedError):
        machine.spec_for(asked, frozenset({"substrate"}))
