"""Each step failing once, then the next: the error is typed, and nothing is left that nobody owns."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import CapacityError, DsecError, LaunchError, StorageError, UnavailableError
from dsec.core.ids import new_exec_id
from dsec.testing.faults import Faults, each_nth_failure
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, fake_instance, fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import ExecStart, Method


async def create(client: NodeClient, key: str | None = None) -> records.Sandbox:
    return await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox, key=key)


async def start(client: NodeClient, sandbox: str, **fields: object) -> records.ExecAnswer:
    request = records.ExecRequest(**{"id": new_exec_id(), "wait_s": 20.0, **fields})  # type: ignore[arg-type]
    return await client.call(Method.EXEC_START, ExecStart(sandbox, request), records.ExecAnswer)


async def destroy(client: NodeClient, id: str) -> records.Sandbox:
    return await client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)


async def until_empty(client: NodeClient) -> None:
    """What could not be removed at once is tried again by the node."""
    await eventually(lambda: len(client.node.registry) == 0)


async def soon(seconds: float) -> None:
    """Back-off without the wait."""
    await asyncio.sleep(min(seconds, 0.01))


def assert_nothing_left(client: NodeClient, host: FakeHost) -> None:
    assert host.leftovers() == []
    assert client.node.journal.sandboxes() == []
    assert list(client.node.config.records_dir.iterdir()) == []
    assert client.node.registry.memory_promised_bytes == 0


@pytest.mark.parametrize("prefix", ["fake.create.", "fake.connect", "node.journal."])
async def test_a_create_that_fails_at_any_step_leaves_nothing_and_frees_its_key(tmp_path: Path, prefix: str) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host, sleep=soon) as client:
        runs = 0
        async for faults in each_nth_failure(prefix):
            runs += 1
            key = f"k{runs}"
            sandbox, failure = None, None
            with faults:
                try:
                    sandbox = await create(client, key)
                except DsecError as error:
                    failure = error
            await until_settled(client)
            if sandbox is None:
                assert isinstance(failure, LaunchError), repr(failure)
                assert failure.step, "the step that failed is named"
                assert_nothing_left(client, host)
                sandbox = await create(client, key)
            await destroy(client, sandbox.id)
            await until_empty(client)
            assert_nothing_left(client, host)


async def until_settled(client: NodeClient) -> None:
    """Until no sandbox is being removed."""
    await eventually(lambda: not any(sandbox.state == "destroying" for sandbox in client.node.registry))


async def test_a_whole_life_with_any_one_failure_leaves_nothing(tmp_path: Path) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host, sleep=soon) as client:
        async for faults in each_nth_failure():
            with faults, suppress(DsecError):
                sandbox = await create(client)
                answer = await start(client, sandbox.id, shell="seq 1 30000; echo x >&2")
                assert answer.exec.state == "ended"
                await destroy(client, sandbox.id)
            for left in client.node.registry:
                with suppress(DsecError):
                    await destroy(client, left.id)
            await until_empty(client)
            assert_nothing_left(client, host)


async def test_a_channel_that_breaks_at_any_message_loses_no_output_and_runs_nothing_twice(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)
        runs = 0
        async for faults in each_nth_failure("fake.agent."):
            runs += 1
            with faults:
                answer = await start(
                    client, sandbox.id, shell=f"echo x >> /tmp/{runs}; seq 1 60000; cat /tmp/{runs} >&2"
                )

            assert (answer.exec.exit_code, answer.err) == (0, b"x\n")
            assert answer.out == b"".join(b"%d\n" % n for n in range(1, 60_001))
        assert runs > 2


async def test_a_destroy_that_fails_is_tried_again_until_nothing_is_left(tmp_path: Path) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host, sleep=soon) as client:
        sandbox = await create(client)

        with Faults(1, prefix="fake.destroy"), pytest.raises(DsecError) as failed:
            await destroy(client, sandbox.id)
        await until_empty(client)

        assert failed.value.outcome == "unknown"
        assert_nothing_left(client, host)
        assert (await client.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)).state == "gone"


async def test_a_full_disk_under_the_record_drops_output_and_says_so(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)

        with Faults(2, prefix="node.record.write"):
            answer = await start(client, sandbox.id, shell="seq 1 100000")

        assert (answer.exec.exit_code, answer.exec.cause) == (0, "disk_full")
        missing = sum(gap.end - gap.start for gap in answer.exec.gaps)
        assert missing > 0
        assert answer.out is not None
        assert len(answer.out) + missing == answer.exec.out_bytes


async def test_a_disk_below_its_reserve_keeps_small_output_and_drops_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)
        found = client.node.registry.find(sandbox.id)
        assert found is not None
        found.execs._has_room = lambda: False

        small = await start(client, sandbox.id, shell="seq 1 1000")
        large = await start(client, sandbox.id, shell="seq 1 100000")

        assert (small.exec.cause, small.exec.gaps) == (None, [])
        assert large.exec.cause == "disk_full"


async def test_a_disk_below_its_reserve_refuses_creates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.node.node.free_bytes", lambda path: 10)
    async with fake_node(tmp_path, disk_free_bytes_min=11) as client:
        with pytest.raises(CapacityError) as refused:
            await create(client)

        assert refused.value.retry_after_s


async def test_an_exec_that_cannot_be_journalled_is_not_started(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)

        with Faults(1, prefix="node.execlog.append"), pytest.raises(StorageError):
            await start(client, sandbox.id, shell="echo x > /tmp/proof")

        answer = await start(client, sandbox.id, shell="cat /tmp/proof")
        assert answer.exec.exit_code == 1


async def test_an_end_that_cannot_be_journalled_is_kept_by_the_agent_for_the_next_node(tmp_path: Path) -> None:
    host = FakeHost()
    id = new_exec_id()
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        with Faults(2, prefix="node.execlog.append"):
            first = await start(client, sandbox.id, id=id, shell="echo kept")

    async with fake_node(tmp_path, host=host) as client:
        again = await start(client, sandbox.id, id=id, shell="echo kept")

    assert first.exec.state == again.exec.state == "ended"
    assert again.out == b"kept\n"


async def test_destroying_works_while_the_journal_cannot_be_written(tmp_path: Path) -> None:
    host = FakeHost()
    async with fake_node(tmp_path, host=host, sleep=soon) as client:
        sandbox = await create(client)

        with Faults(1, prefix="node.journal.write"):
            view = await destroy(client, sandbox.id)

        assert view.state == "gone"
        assert_nothing_left(client, host)


async def test_a_pause_that_cannot_be_journalled_leaves_the_sandbox_running(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)

        with Faults(1, prefix="node.journal.write"), pytest.raises(StorageError):
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

        assert (await start(client, sandbox.id, shell="echo x")).out == b"x\n"


async def test_a_create_cancelled_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 0.001)
    async with fake_node(tmp_path, host=host, sleep=soon) as client:
        for turns in range(0, 60, 3):
            task = asyncio.create_task(create(client))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            with suppress(asyncio.CancelledError):
                sandbox = await task
                await destroy(client, sandbox.id)
            await until_empty(client)
            assert_nothing_left(client, host)


async def test_an_end_that_the_disk_refused_is_not_acknowledged_before_it_is_journalled(tmp_path: Path) -> None:
    host = FakeHost()
    id = new_exec_id()
    async with fake_node(tmp_path, host=host) as client:
        sandbox = await create(client)
        found = client.node.registry.find(sandbox.id)
        assert found is not None
        assert found._link is not None
        with Faults(2, prefix="node.execlog.append"):
            await start(client, sandbox.id, id=id, shell="echo kept")

        (await found._link.client()).close()  # the next hello tells of it again
        await start(client, sandbox.id, shell="true")
        await eventually(lambda: id not in fake_instance(client.node, sandbox.id).agent.execs)
        await crash(client.node)

    async with fake_node(tmp_path, host=host) as client:
        again = await start(client, sandbox.id, id=id, shell="echo kept")

    assert (again.existing, again.exec.status, again.out) == (True, "exited", b"kept\n")


async def test_a_node_that_stops_tells_those_who_wait_for_a_create(tmp_path: Path) -> None:
    host = FakeHost(delay_s=lambda step: 30.0 if step == "create.launch" else 0.0)
    async with fake_node(tmp_path, host=host) as client:
        waiting = asyncio.create_task(create(client, key="k"))
        await eventually(lambda: host.leftovers() != [])

        await client.node.close()

        with pytest.raises(UnavailableError):
            await waiting
        assert host.leftovers() == []
