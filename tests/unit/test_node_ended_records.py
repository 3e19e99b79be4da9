"""What commands said outlives their sandbox for a day: who may read it, and how much of it there is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from dsec.core.errors import ExecNotFoundError, GoneError, SandboxNotFoundError, StorageError
from dsec.core.ids import new_exec_id
from dsec.core.limits import TOMBSTONE_TTL_S
from dsec.core.states import EndCause
from dsec.testing.clock import ManualClock
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import NodeClient, caller_of, fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.collect import GcReport, GcRequest
from dsec.wire.frames import Frame, FrameType
from dsec.wire.node import ExecSignal, Method, OutputQuery, Right
from tests.node_calls import create, destroy, get, output_of, start

DAY_S = TOMBSTONE_TTL_S


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def execs(client: NodeClient, sandbox: str) -> list[records.ExecInfo]:
    return (await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox), records.ExecPage)).execs


async def frames_of(
    client: NodeClient, sandbox: str, exec: str, method: Method = Method.EXEC_OUTPUT, **at: int
) -> list[Frame]:
    async with client.stream(method, OutputQuery(sandbox=sandbox, exec=exec, **at)) as stream:
        return await stream.all()


async def lived(client: NodeClient, shell: str = "echo said", **options: object) -> tuple[str, str]:
    """A sandbox that has ended, and its command."""
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell=shell, **options)
    await destroy(client, sandbox.id)
    return sandbox.id, answer.exec.id


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# ---- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [10, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("method", [Method.EXEC_OUTPUT, Method.EXEC_ATTACH])
async def test_output_and_end_of_a_command_are_read_as_before(client: NodeClient, lines: int, method: Method) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell=f"seq 1 {lines}; echo problem >&2; exit 3")
    before = await frames_of(client, sandbox.id, answer.exec.id)
    await destroy(client, sandbox.id)

    after = await frames_of(client, sandbox.id, answer.exec.id, method)
    later = await frames_of(client, sandbox.id, answer.exec.id, method, out=5, err=3)

    query = records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=30.0)
    assert await client.call(Method.EXEC_GET, query, records.ExecInfo) == answer.exec
    assert await execs(client, sandbox.id) == [answer.exec]
    assert [(frame.type, frame.body) for frame in after] == [(frame.type, frame.body) for frame in before]
    assert output_of(after)[2] == b"problem\n"
    assert output_of(later) == {1: output_of(before)[1][5:], 2: b"blem\n"}
    assert unpack(after[-1].body, records.ExecInfo).exit_code == 3


async def test_a_cut_is_told_as_before(client: NodeClient) -> None:
    sandbox, exec = await lived(client, "head -c 20000000 /dev/zero", record_bytes_max=1_000_000)

    frames = await frames_of(client, sandbox, exec)
    (info,) = await execs(client, sandbox)

    missing = sum(gap.end - gap.start for gap in info.gaps)
    assert missing > 0
    assert len(output_of(frames)[1]) + missing == info.out_bytes == 20_000_000
    assert sum(frame.type == FrameType.EVENT for frame in frames) == len(info.gaps)


async def test_a_command_that_ran_to_the_end_of_its_sandbox_keeps_what_it_had_said(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="echo begun; sleep 600", wait_s=None)
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        await stream.recv()
    await destroy(client, sandbox.id)

    frames = await frames_of(client, sandbox.id, answer.exec.id)
    info = unpack(frames[-1].body, records.ExecInfo)

    assert output_of(frames)[1] == b"begun\n"
    assert (info.state, info.status, info.cause, info.exit_code) == ("ended", "unknown", "killed", None)


async def test_commands_of_a_sandbox_that_failed_tell_why(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="echo begun; sleep 600", wait_s=0.2)
    found = client.node.registry.find(sandbox.id)
    assert found is not None
    found.fail(EndCause.SANDBOX_FAULT, "a test")

    async def failed() -> bool:
        return (await get(client, sandbox.id)).state == "failed"

    await eventually(failed)
    frames = await frames_of(client, sandbox.id, answer.exec.id)
    assert output_of(frames)[1] == b"begun\n"
    assert unpack(frames[-1].body, records.ExecInfo).cause == "agent_lost"


async def test_whoever_reads_while_the_sandbox_ends_reads_on(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "head", "-c", "5000000", "/dev/zero")
    found = client.node.registry.find(sandbox.id)
    assert found is not None
    exec = found.execs.get(answer.exec.id)
    with exec as record:
        first = record.read(1, 0, 1_000)
        await destroy(client, sandbox.id)
        rest = record.read(1, 1_000, 10_000_000)
    with exec as record:  # and whoever begins late
        again = record.read_all(1)

    assert first is not None
    assert rest is not None
    assert len(first.payload + rest.payload) == len(again) == 5_000_000


async def test_nothing_else_can_be_done_with_them(client: NodeClient) -> None:
    sandbox, exec = await lived(client)

    for method, request in (
        (Method.EXEC_KILL, records.ExecQuery(sandbox=sandbox, exec=exec)),
        (Method.EXEC_SIGNAL, ExecSignal(sandbox, exec, records.SignalRequest())),
    ):
        with pytest.raises(GoneError):
            await client.call(method, request, records.ExecInfo)
    with pytest.raises(GoneError):
        await start(client, sandbox, shell="echo said", id=exec)
    with pytest.raises(ExecNotFoundError):
        await frames_of(client, sandbox, new_exec_id())


async def test_they_are_the_projects_own_and_its_parents(client: NodeClient) -> None:
    owner = client.of(caller_of("/team/a"))
    sandbox, exec = await lived(owner)

    for project in ("/team/b", "/team/a/below", "/team/ab"):
        other = client.of(caller_of(project))
        with pytest.raises(SandboxNotFoundError):
            await execs(other, sandbox)
        for method in (Method.EXEC_OUTPUT, Method.EXEC_ATTACH):
            with pytest.raises(SandboxNotFoundError):
                await frames_of(other, sandbox, exec, method)
        with pytest.raises(SandboxNotFoundError):
            await other.call(Method.EXEC_GET, records.ExecQuery(sandbox=sandbox, exec=exec), records.ExecInfo)
    for project in ("/team/a", "/team"):
        assert output_of(await frames_of(client.of(caller_of(project)), sandbox, exec))[1] == b"said\n"


async def test_many_that_are_read_leave_no_descriptor(client: NodeClient) -> None:
    made = [await lived(client, "seq 1 20000") for _ in range(8)] + [await lived(client) for _ in range(8)]
    late = await create(client)
    answer = await start(client, late.id, "echo", "late")
    found = client.node.registry.find(late.id)
    assert found is not None
    exec = found.execs.get(answer.exec.id)
    await destroy(client, late.id)
    await frames_of(client, *made[0])
    before = len(names(Path("/proc/self/fd")))

    await asyncio.gather(*(frames_of(client, *one) for one in 3 * made))
    with exec as record:
        assert record.read_all(1) == b"late\n"

    assert len(names(Path("/proc/self/fd"))) <= before


# ---- bounds ---------------------------------------------------------------------------------------


async def test_a_sandbox_without_commands_leaves_nothing_and_says_so(client: NodeClient) -> None:
    sandbox = await create(client)
    await destroy(client, sandbox.id)

    assert names(client.node.config.ended_dir) == set()
    with pytest.raises(GoneError) as gone:
        await execs(client, sandbox.id)
    assert gone.value.hint is not None
    assert gone.value.detail["cause"] == "destroyed"


async def test_the_oldest_ends_make_room_and_the_living_keep_theirs(tmp_path: Path) -> None:
    async with fake_node(tmp_path, ended_records_bytes_max=1_000_000) as client:
        living = await create(client)
        exec = (await start(client, living.id, "head", "-c", "3000000", "/dev/zero")).exec.id
        made = [await lived(client, "head -c 400000 /dev/zero") for _ in range(5)]

        async def only_two() -> bool:
            return names(client.node.config.ended_dir) == {sandbox for sandbox, _ in made[3:]}

        await eventually(only_two)
        assert 800_000 <= client.node.ended.bytes <= 1_000_000
        for sandbox, ended in made[:3]:
            with pytest.raises(GoneError):
                await frames_of(client, sandbox, ended)
        for sandbox, ended in [*made[3:]]:
            assert len(output_of(await frames_of(client, sandbox, ended))[1]) == 400_000
        assert len(output_of(await frames_of(client, living.id, exec))[1]) == 3_000_000


async def test_one_that_alone_is_too_large_drives_out_nobody(tmp_path: Path) -> None:
    async with fake_node(tmp_path, ended_records_bytes_max=1_000_000) as client:
        sandbox, exec = await lived(client)
        large, _ = await lived(client, "head -c 3000000 /dev/zero")

        await eventually(lambda: names(client.node.config.ended_dir) == {sandbox})
        assert output_of(await frames_of(client, sandbox, exec))[1] == b"said\n"
        with pytest.raises(GoneError):
            await execs(client, large)


async def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    async with fake_node(tmp_path, ended_records_bytes_max=0) as client:
        sandbox, _ = await lived(client)

        await eventually(lambda: names(client.node.config.ended_dir) == set())
        with pytest.raises(GoneError):
            await execs(client, sandbox)


async def test_their_number_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.node.endedrecords.ENDED_RECORDS_MAX", 3)
    async with fake_node(tmp_path) as client:
        made = [await lived(client) for _ in range(5)]

        await eventually(lambda: names(client.node.config.ended_dir) == {sandbox for sandbox, _ in made[2:]})


async def test_they_go_with_their_tombstones(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        first, _ = await lived(client)
        await clock.advance(DAY_S / 2)
        second, exec = await lived(client)
        await clock.advance(DAY_S / 2)

        async def first_is_unknown() -> bool:
            await clock.advance(60)  # the node writes in threads, for which no time passes here
            try:
                await execs(client, first)
            except SandboxNotFoundError:
                return True
            except GoneError:  # its tombstone goes last
                pass
            return False

        await eventually(first_is_unknown)
        assert names(client.node.config.ended_dir) == {second}
        assert output_of(await frames_of(client, second, exec))[1] == b"said\n"


async def test_they_go_before_a_create_or_a_record_lacks_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_node(tmp_path, disk_free_bytes_min=1_000) as client:
        made = [await lived(client) for _ in range(4)]
        ended = client.node.config.ended_dir
        monkeypatch.setattr("dsec.node.node.free_bytes", lambda _: 1_200 - 100 * len(names(ended)))

        sandbox = await create(client)
        assert names(ended) == {sandbox for sandbox, _ in made[2:]}

        monkeypatch.setattr("dsec.node.node.free_bytes", lambda _: 260 - 100 * len(names(ended)))
        answer = await start(client, sandbox.id, "head", "-c", "200000", "/dev/zero")
        assert answer.exec.out_bytes == 200_000
        assert (answer.exec.cause, answer.exec.gaps) == (None, [])
        assert names(ended) == set()


async def test_a_failure_on_the_way_keeps_no_sandbox_from_ending(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        async for faults in each_nth_failure("node.ended."):
            with faults:
                sandbox, _ = await lived(client)
            assert (await get(client, sandbox)).state == "gone"
            assert names(client.node.config.records_dir) == set()
            assert (sandbox in client.node.ended) is (faults.hit is None)
            assert (sandbox in names(client.node.config.ended_dir)) is (faults.hit is None)
            assert not [target for target in descriptors() if f"{sandbox}/execs.log (deleted)" in target]


async def test_a_damaged_record_is_an_error_of_that_command_alone(client: NodeClient) -> None:
    sandbox = await create(client)
    large = (await start(client, sandbox.id, "head", "-c", "200000", "/dev/zero")).exec.id
    small = (await start(client, sandbox.id, "echo", "said")).exec.id
    await destroy(client, sandbox.id)
    (client.node.config.ended_dir / sandbox.id / f"{large}.out").write_bytes(b"x" * 5_000)

    with pytest.raises(StorageError):
        await frames_of(client, sandbox.id, large)
    assert output_of(await frames_of(client, sandbox.id, small))[1] == b"said\n"


async def test_half_removed_ones_are_collected(client: NodeClient) -> None:
    half = client.node.config.ended_dir / ".removed-sbx"
    half.mkdir()
    (half / "execs.log").write_bytes(b"x")
    os.utime(half, (time.time() - 86_400, time.time() - 86_400))
    kept, _ = await lived(client)

    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    report = await admin.call(Method.GC, GcRequest(), GcReport)

    assert [item.name for item in report.items] == ["ended/.removed-sbx"]
    assert names(client.node.config.ended_dir) == {kept}


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that is read by
            found.append(str(path.readlink()))
    return found
