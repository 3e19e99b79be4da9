"""A node that is killed and started again: sandboxes run on, output is whole, nothing half made stays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.backends.base import Instance, InstanceSpec, Intend
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.core.errors import DsecError, HostError, IdempotencyError, UnavailableError
from dsec.core.ids import new_exec_id, new_sandbox_id
from dsec.core.limits import EXEC_UNACKED_BYTES_MAX
from dsec.core.spec import Substrate
from dsec.core.states import EndCause
from dsec.node.journal import Journal
from dsec.node.supervisor import Supervisor
from dsec.testing.faults import Faults
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, fake_instance, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.frames import FrameType, decode_data
from dsec.wire.node import ExecStart, Method, OutputQuery


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@asynccontextmanager
async def running(state: Path, host: FakeHost, **settings: object) -> AsyncIterator[NodeClient]:
    """A node process; the block may kill it before its end."""
    node = make_fake_node(state, host=host, **settings)
    await node.start()
    try:
        yield NodeClient(node)
    finally:
        await node.close()


async def create(client: NodeClient, key: str | None = None) -> records.Sandbox:
    return await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox, key=key)


async def start(client: NodeClient, sandbox: str, **fields: object) -> records.ExecAnswer:
    request = records.ExecRequest(**{"id": new_exec_id(), **fields})  # type: ignore[arg-type]
    return await client.call(Method.EXEC_START, ExecStart(sandbox, request), records.ExecAnswer)


async def output(client: NodeClient, sandbox: str, exec: str) -> tuple[bytes, bytes, records.ExecInfo]:
    from dsec.wire.codec import unpack

    found = {1: b"", 2: b""}
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox, exec=exec)) as stream:
        frames = await stream.all()
    for frame in frames:
        assert frame.type != FrameType.EVENT, "nothing may be missing"
        if frame.type == FrameType.DATA:
            data = decode_data(frame.body)
            assert data.offset == len(found[data.channel])
            found[data.channel] += data.payload
    return found[1], found[2], unpack(frames[-1].body, records.ExecInfo)


@pytest.mark.parametrize("lines", [10, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_an_exec_runs_on_and_its_output_is_whole_and_not_doubled(
    tmp_path: Path, host: FakeHost, lines: int, how: str
) -> None:
    shell = f"seq 1 {lines}; echo one >&2; sleep 0.4; seq {lines + 1} {2 * lines}; echo two >&2"
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        answer = await start(client, sandbox.id, shell=shell, wait_s=0.2)
        if how == "killed":
            await crash(client.node)
    assert host.leftovers() != []

    async with running(tmp_path, host) as client:
        out, err, info = await output(client, sandbox.id, answer.exec.id)

    assert out == b"".join(b"%d\n" % n for n in range(1, 2 * lines + 1))
    assert err == b"one\ntwo\n"
    assert (info.state, info.exit_code, info.out_bytes) == ("ended", 0, len(out))


async def test_an_exec_that_ended_while_the_node_was_away_is_told_in_full(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        answer = await start(client, sandbox.id, shell="sleep 0.1; seq 1 100; false")
        world = fake_instance(client.node, sandbox.id)
        await crash(client.node)
    await eventually(lambda: world.execs_live == 0)

    async with running(tmp_path, host) as client:
        out, _, info = await output(client, sandbox.id, answer.exec.id)

    assert out == b"".join(b"%d\n" % n for n in range(1, 101))
    assert (info.status, info.exit_code) == ("exited", 1)


async def test_what_ended_before_the_kill_is_still_there(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        small = await start(client, sandbox.id, shell="echo small", wait_s=10.0)
        large = await start(client, sandbox.id, shell="seq 1 30000; echo e >&2", wait_s=10.0)
        await crash(client.node)

    async with running(tmp_path, host) as client:
        view = await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)
        one = await output(client, sandbox.id, small.exec.id)
        two = await output(client, sandbox.id, large.exec.id)

    assert view.state == "running"
    assert (one[0], one[2]) == (b"small\n", small.exec)
    assert (two[0], two[1], two[2]) == (large.out, b"e\n", large.exec)


async def test_a_sandbox_is_usable_and_counted_as_before(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client, key="k")
        await crash(client.node)

    async with running(tmp_path, host) as client:
        again = await create(client, key="k")
        answer = await start(client, sandbox.id, argv=["echo", "x"], wait_s=10.0)
        with pytest.raises(IdempotencyError):
            await client.call(
                Method.CREATE,
                records.CreateRequest(
                    spec=type(FAKE_SPEC)(environment=FAKE_SPEC.environment, substrate=FAKE_SPEC.substrate)
                ),
                records.Sandbox,
                key="k",
            )
        gone = await client.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)

    assert again.id == sandbox.id
    assert answer.out == b"x\n"
    assert gone.state == "gone"
    assert host.leftovers() == []


async def test_an_exec_id_asked_for_again_after_a_restart_does_not_run_again(tmp_path: Path, host: FakeHost) -> None:
    id = new_exec_id()
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await start(client, sandbox.id, id=id, shell="echo x >> /tmp/f; cat /tmp/f", wait_s=10.0)
        await crash(client.node)

    async with running(tmp_path, host) as client:
        answer = await start(client, sandbox.id, id=id, shell="echo x >> /tmp/f; cat /tmp/f", wait_s=10.0)

    assert (answer.existing, answer.out) == (True, b"x\n")


async def test_stdin_given_whole_goes_on_when_it_is_asked_for_again(tmp_path: Path, host: FakeHost) -> None:
    id = new_exec_id()
    data = b"y" * 2_000_000
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await start(client, sandbox.id, id=id, shell="sleep 0.3; wc -c", stdin_data=data)
        await crash(client.node)

    async with running(tmp_path, host) as client:
        answer = await start(client, sandbox.id, id=id, shell="sleep 0.3; wc -c", stdin_data=data, wait_s=10.0)

    assert answer.out == b"2000000\n"


async def test_a_paused_sandbox_stays_paused_and_resumes(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        answer = await start(client, sandbox.id, shell="echo a; sleep 0.2; echo b", wait_s=0.1)
        await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
        await crash(client.node)

    async with running(tmp_path, host) as client:
        view = await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)
        assert view.state == "paused"
        await client.call(Method.RESUME, records.SandboxRef(sandbox.id), records.Sandbox)
        out, _, info = await output(client, sandbox.id, answer.exec.id)

    assert out == b"a\nb\n"
    assert info.exit_code == 0


async def test_what_was_half_created_is_removed_and_its_key_is_free(tmp_path: Path, host: FakeHost) -> None:
    host._delay_s = lambda step: 30.0 if step == "create.launch" else 0.0
    async with running(tmp_path, host) as client:
        creating = asyncio.create_task(create(client, key="k"))
        await eventually(lambda: host.leftovers() != [])
        rows = client.node.journal.sandboxes()
        # A kill cleans nothing: what the create has made so far stays, as on a real host.
        held = dict(host._held)
        await crash(client.node)
        creating.cancel()
        host._held.update(held)
        restore = await Journal.open(client.node.config.journal_path)
        await restore.put(rows[0])
        await restore.close()
    host._delay_s = None

    async with running(tmp_path, host) as client:
        assert host.leftovers() == []
        assert client.node.journal.sandboxes() == []
        sandbox = await create(client, key="k")

    assert sandbox.id != rows[0].id


async def test_what_was_half_destroyed_is_destroyed(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        with Faults(1, prefix="fake.destroy"), pytest.raises(DsecError):
            await client.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
        await crash(client.node)
    assert host.leftovers() != []

    async with running(tmp_path, host) as client:
        view = await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)

    assert (view.state, view.cause) == ("gone", "destroyed")
    assert host.leftovers() == []


async def test_a_sandbox_that_died_meanwhile_has_a_tombstone_and_leaves_nothing(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        world = fake_instance(client.node, sandbox.id)
        await crash(client.node)
    await world.crash(EndCause.OOM)

    async with running(tmp_path, host) as client:
        view = await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)

    assert view.state == "failed"
    assert host.leftovers() == []


async def test_one_that_dies_while_it_is_taken_over_is_told_by_its_own_cause(
    tmp_path: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        world = fake_instance(client.node, sandbox.id)
        await crash(client.node)

    async def dies(*_: object) -> None:
        await world.crash(EndCause.OOM)
        raise UnavailableError("the channel is lost")

    monkeypatch.setattr(Supervisor, "take_over", dies)
    async with running(tmp_path, host) as client:
        view = await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)

    assert (view.state, view.cause) == ("failed", "oom")
    assert host.leftovers() == []


async def test_after_a_reboot_all_are_gone_and_say_so(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandboxes = [await create(client) for _ in range(3)]
        await start(client, sandboxes[0].id, shell="sleep 60")
        await crash(client.node)
    await host.reboot()

    async with running(tmp_path, host, boot_id="another boot") as client:
        views = [await client.call(Method.GET, records.SandboxRef(s.id), records.Sandbox) for s in sandboxes]
        assert list(client.node.config.records_dir.iterdir()) == []

    assert {(view.state, view.cause) for view in views} == {("failed", "node_rebooted")}
    assert host.leftovers() == []


async def test_an_exec_that_only_the_journal_knows_is_unknown(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        answer = await start(client, sandbox.id, shell="sleep 60")
        world = fake_instance(client.node, sandbox.id)
        await crash(client.node)
    for exec in list(world.agent.execs.values()):
        for task in exec.cancel():
            await asyncio.wait([task])
    world.agent.execs.clear()

    async with running(tmp_path, host) as client:
        _, _, info = await output(client, sandbox.id, answer.exec.id)

    assert (info.status, info.cause, info.exit_code) == ("unknown", "node_lost", None)


async def test_an_agent_that_cannot_be_reached_at_first_is_tried_again(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await crash(client.node)
    node = make_fake_node(tmp_path, host=host)

    with Faults(1, prefix="fake.connect") as faults:
        await node.start()

    view = await NodeClient(node).call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)
    assert faults.hit is not None
    assert view.state == "running"
    await node.close()


async def test_many_are_taken_over_at_once(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        made = [await create(client) for _ in range(100)]
        await crash(client.node)

    async with running(tmp_path, host, adopts_at_once_max=8) as client:
        page = await client.call(Method.LIST, records.ListQuery(limit=1_000), records.SandboxPage)

    assert [s.id for s in page.sandboxes] == [s.id for s in made]


async def test_directories_that_nobody_knows_are_removed(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await start(client, sandbox.id, shell="true", wait_s=10.0)
        stray = client.node.config.records_dir / new_sandbox_id(client.node.id)
        stray.mkdir()
        (stray / "execs.log").write_bytes(b"x")

    async with running(tmp_path, host) as client:
        left = [path.name for path in client.node.config.records_dir.iterdir()]

    assert left == [sandbox.id]


async def test_two_nodes_never_share_a_state_directory(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host):
        second = make_fake_node(tmp_path, host=host)
        with pytest.raises(HostError, match="another node"):
            await second.start()


async def test_a_substrate_that_is_no_longer_offered_is_not_forgotten(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        await create(client)
        await crash(client.node)
    node = make_fake_node(tmp_path, host=host)
    node._make_backends = lambda _: {}

    with pytest.raises(HostError, match="does not offer"):
        await node.start()

    async with running(tmp_path, host) as client:
        assert len(client.node.registry) == 1


async def test_a_lost_record_file_is_made_good_from_the_agent_or_told(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        answer = await start(client, sandbox.id, shell="seq 1 200000; sleep 1; echo end", wait_s=0.2)

        async def is_acknowledged() -> bool:
            """More than the agent keeps otherwise, so some of it is on record alone."""
            query = records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id)
            info = await client.call(Method.EXEC_GET, query, records.ExecInfo)
            return info.out_bytes > EXEC_UNACKED_BYTES_MAX

        await eventually(is_acknowledged)
        directory = client.node.config.records_dir / sandbox.id
        await crash(client.node)
    for path in directory.glob("*.out"):
        path.unlink()

    async with running(tmp_path, host) as client:
        query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)
        async with client.stream(Method.EXEC_OUTPUT, query) as stream:
            frames = await stream.all()
        info = await client.call(
            Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id), records.ExecInfo
        )

    received = sum(len(decode_data(frame.body).payload) for frame in frames if frame.type == FrameType.DATA)
    missing = sum(gap.end - gap.start for gap in info.gaps)
    assert info.exit_code == 0
    assert missing > 0
    assert received + missing == info.out_bytes


async def test_a_state_directory_that_vanishes_costs_records_and_no_sandbox(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await start(client, sandbox.id, shell="true", wait_s=10.0)
        await crash(client.node)
    shutil.rmtree(tmp_path / "state" / "records")

    async with running(tmp_path, host) as client:
        answer = await start(client, sandbox.id, shell="echo x", wait_s=10.0)

    assert answer.out == b"x\n"


class LateRecords(FakeBackend):
    """As a real backend: what it journals before it acts cannot be adopted, what it knows afterwards can."""

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> Instance:
        async def intend_early(record: bytes) -> None:
            await intend(b"not started: " + record)

        return await super().create(instance, intend=intend_early, deadline_s=deadline_s)


async def test_what_is_adopted_is_the_record_of_the_running_instance(tmp_path: Path, host: FakeHost) -> None:
    nodes = []
    for _ in range(2):
        node = make_fake_node(tmp_path, host=host)
        node._make_backends = lambda _: {Substrate.FAKE: LateRecords(host)}
        nodes.append(node)
    await nodes[0].start()
    sandbox = await create(NodeClient(nodes[0]))
    await crash(nodes[0])

    await nodes[1].start()

    view = await NodeClient(nodes[1]).call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)
    assert view.state == "running"
    await nodes[1].close()
