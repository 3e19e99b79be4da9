"""Execs and their output: what callers can count on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import (
    ConflictError,
    DsecError,
    ExecNotFoundError,
    InvalidArgumentError,
)
from dsec.core.ids import new_exec_id
from dsec.testing.nodes import NodeClient, fake_node
from dsec.wire import agent, records
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Channel, Frame, FrameType, encode_data_body
from dsec.wire.node import (
    ExecResize,
    ExecSignal,
    Method,
    OutputQuery,
    StdinWrite,
)
from tests.node_calls import create, get, output_of, start


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


# ---- execs ----------------------------------------------------------------------------------------


async def test_an_exec_of_a_known_id_never_runs_twice(client: NodeClient) -> None:
    sandbox = await create(client)
    id = new_exec_id()
    first = await start(client, sandbox.id, id=id, shell="echo x >> /tmp/f; cat /tmp/f")

    again = await start(client, sandbox.id, id=id, shell="echo x >> /tmp/f; cat /tmp/f")

    assert (first.existing, again.existing) == (False, True)
    assert first.out == again.out == b"x\n"


async def test_an_id_of_a_different_request_is_refused(client: NodeClient) -> None:
    sandbox = await create(client)
    id = new_exec_id()
    await start(client, sandbox.id, "true", id=id)

    with pytest.raises(ConflictError):
        await start(client, sandbox.id, "false", id=id)


async def test_an_id_asked_for_at_once_by_many_runs_once(client: NodeClient) -> None:
    sandbox = await create(client)
    id = new_exec_id()

    answers = await asyncio.gather(
        *(start(client, sandbox.id, id=id, shell="echo x >> /tmp/f; cat /tmp/f") for _ in range(10))
    )

    assert {answer.out for answer in answers} == {b"x\n"}
    assert sum(not answer.existing for answer in answers) == 1


async def test_a_command_that_does_not_exist_is_refused_and_its_id_is_free(client: NodeClient) -> None:
    sandbox = await create(client)
    id = new_exec_id()
    with pytest.raises(InvalidArgumentError) as refused:
        await start(client, sandbox.id, "no-such-program", id=id)

    answer = await start(client, sandbox.id, "true", id=id)

    assert refused.value.exec == id
    assert refused.value.detail["code"] == "command_not_found"
    assert answer.exec.exit_code == 0
    assert (await get(client, sandbox.id)).execs_live == 0


async def test_without_wait_the_answer_comes_at_once_and_the_end_can_be_waited_for(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "sleep", "0.05", wait_s=None)

    info = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=10), records.ExecInfo
    )

    assert answer.exec.state == "running"
    assert answer.out is None
    assert (info.state, info.exit_code) == ("ended", 0)


async def test_a_wait_that_is_over_answers_with_the_output_so_far(client: NodeClient) -> None:
    sandbox = await create(client)

    answer = await start(client, sandbox.id, shell="echo begun; sleep 60", wait_s=0.2)

    assert (answer.exec.state, answer.out) == ("running", b"begun\n")


async def test_stdin_that_is_given_whole_is_read_to_its_end(client: NodeClient) -> None:
    sandbox = await create(client)
    large = bytes(range(256)) * 4_000  # above one credit window

    answer = await start(client, sandbox.id, "wc", "-c", stdin_data=large)

    assert answer.out == b"%d\n" % len(large)


async def test_stdin_in_pieces_is_taken_once_whatever_is_sent_again(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "cat", stdin=True, wait_s=None)
    exec = answer.exec.id

    async def write(data: bytes, offset: int | None, eof: bool = False) -> int:
        request = StdinWrite(sandbox=sandbox.id, exec=exec, data=data, offset=offset, eof=eof)
        return (await client.call(Method.EXEC_STDIN, request, records.StdinAnswer)).offset

    assert await write(b"hello ", 0) == 6
    assert await write(b"hello world", 0) == 11
    assert await write(b"", None) == 11
    with pytest.raises(ConflictError) as hole:
        await write(b"x", 50)
    assert await write(b"", None, eof=True) == 11
    info = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=exec, wait_s=10), records.ExecInfo
    )

    assert hole.value.detail["accepted"] == 11
    assert info.exit_code == 0
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=exec)) as stream:
        assert output_of(await stream.all())[1] == b"hello world"


async def test_stdin_of_an_exec_that_has_none_is_refused(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "sleep", "60", wait_s=None)

    with pytest.raises(InvalidArgumentError):
        await client.call(
            Method.EXEC_STDIN, StdinWrite(sandbox=sandbox.id, exec=answer.exec.id, data=b"x"), records.StdinAnswer
        )


async def test_kill_and_signal_end_an_exec_with_what_they_did(client: NodeClient) -> None:
    sandbox = await create(client)
    killed = await start(client, sandbox.id, "sleep", "60", wait_s=None)
    signalled = await start(client, sandbox.id, "sleep", "60", wait_s=None)

    one = await client.call(
        Method.EXEC_KILL, records.ExecQuery(sandbox=sandbox.id, exec=killed.exec.id, wait_s=10), records.ExecInfo
    )
    await client.call(
        Method.EXEC_SIGNAL,
        ExecSignal(sandbox.id, signalled.exec.id, records.SignalRequest(signal=15)),
        records.ExecInfo,
    )
    two = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=signalled.exec.id, wait_s=10), records.ExecInfo
    )

    assert (one.status, one.signal, one.cause) == ("signaled", 9, "killed")
    assert (two.status, two.signal, two.cause) == ("signaled", 15, None)


async def test_a_timeout_is_told_as_one(client: NodeClient) -> None:
    sandbox = await create(client)

    answer = await start(client, sandbox.id, "sleep", "60", timeout_s=0.05, grace_s=0.05)

    assert answer.exec.cause == "timed_out"


async def test_resize_needs_a_terminal(client: NodeClient) -> None:
    sandbox = await create(client)
    plain = await start(client, sandbox.id, "sleep", "60", wait_s=None)
    tty = await start(client, sandbox.id, "sleep", "60", wait_s=None, tty=records.TtySize())
    size = records.TtySize(100, 40)

    with pytest.raises(InvalidArgumentError):
        await client.call(Method.EXEC_RESIZE, ExecResize(sandbox.id, plain.exec.id, size), records.ExecInfo)

    info = await client.call(Method.EXEC_RESIZE, ExecResize(sandbox.id, tty.exec.id, size), records.ExecInfo)
    assert info.tty


async def test_an_unknown_exec_is_a_typed_error(client: NodeClient) -> None:
    sandbox = await create(client)

    with pytest.raises(ExecNotFoundError):
        await client.call(Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=new_exec_id()), records.ExecInfo)
    with pytest.raises(InvalidArgumentError):
        await client.call(Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec="../x"), records.ExecInfo)


async def test_ended_execs_are_dropped_oldest_first_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.exectable.EXECS_KEPT_MAX", 3)
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)

        made = [(await start(client, sandbox.id, "head", "-c", "200000", "/dev/zero")).exec.id for _ in range(5)]
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)

        assert [exec.id for exec in page.execs] == made[2:]
        files = {path.name for path in (client.node.config.records_dir / sandbox.id).iterdir()}
        assert files == {"execs.log", *(f"{id}.out" for id in made[2:])}


async def test_records_of_one_sandbox_stay_within_their_room(tmp_path: Path) -> None:
    async with fake_node(tmp_path, records_bytes_max=1_000_000) as client:
        sandbox = await create(client)

        for _ in range(6):
            await start(client, sandbox.id, "head", "-c", "400000", "/dev/zero")
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)

        assert len(page.execs) == 2


async def test_the_exec_log_is_rewritten_and_output_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.exectable.EXECS_KEPT_MAX", 4)
    monkeypatch.setattr("dsec.node.exectable._REWRITE_BYTES_MIN", 20_000)
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)

        for i in range(30):
            await start(client, sandbox.id, shell=f"echo {i}; head -c 3000 /dev/zero")
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
        outputs = []
        for exec in page.execs:
            async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=exec.id)) as stream:
                outputs.append(output_of(await stream.all())[1])

        assert [output[:2] for output in outputs] == [b"26", b"27", b"28", b"29"]
        assert (client.node.config.records_dir / sandbox.id / "execs.log").stat().st_size < 60_000


# ---- output ---------------------------------------------------------------------------------------


async def test_output_can_be_followed_from_any_offset(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="seq 1 50000; echo problem >&2", wait_s=None)
    query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id, out=100)

    async with client.stream(Method.EXEC_OUTPUT, query) as stream:
        frames = await stream.all()

    expected = b"".join(b"%d\n" % n for n in range(1, 50_001))
    found = output_of(frames)
    assert found == {1: expected[100:], 2: b"problem\n"}
    assert frames[-1].type == FrameType.END
    assert unpack(frames[-1].body, records.ExecInfo).exit_code == 0


async def test_output_without_following_is_what_is_recorded_now(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="echo begun; sleep 60", wait_s=0.1)
    query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id, follow=False)

    async with client.stream(Method.EXEC_OUTPUT, query) as stream:
        frames = await stream.all()

    assert output_of(frames)[1] == b"begun\n"
    assert unpack(frames[-1].body, records.ExecInfo).state == "running"


async def test_a_flood_stays_within_its_budget_and_states_the_cut(client: NodeClient) -> None:
    sandbox = await create(client)
    size = 20_000_000

    answer = await start(client, sandbox.id, "head", "-c", str(size), "/dev/zero", record_bytes_max=1_000_000)

    info = answer.exec
    gap = sum(gap.end - gap.start for gap in info.gaps)
    assert info.out_bytes == size
    assert answer.out is not None
    assert len(answer.out) + gap == size
    assert len(answer.out) <= 1_000_000
    record = client.node.config.records_dir / sandbox.id / f"{info.id}.out"
    assert record.stat().st_blocks * 512 <= 1_000_000 + 6 * 4096
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=info.id)) as stream:
        frames = await stream.all()
    told = [msgspec.msgpack.decode(frame.body)["gap"] for frame in frames if frame.type == FrameType.EVENT]
    assert told == [msgspec.to_builtins(gap) for gap in info.gaps]


async def test_a_reader_that_does_not_read_holds_up_nobody(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "head", "-c", "5000000", "/dev/zero", wait_s=None)
    query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)

    async with client.stream(Method.EXEC_OUTPUT, query) as stuck:
        info = await client.call(
            Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=20), records.ExecInfo
        )
        async with client.stream(Method.EXEC_OUTPUT, query) as quick:
            whole = output_of(await quick.all())[1]
        late = output_of(await stuck.all())[1]

    assert info.exit_code == 0
    assert len(whole) == len(late) == 5_000_000


async def test_a_follower_that_goes_away_is_forgotten(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "sleep", "60", wait_s=None)

    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        await stream.close()

    found = client.node.registry.find(sandbox.id)
    assert found is not None
    assert found.execs.get(answer.exec.id)._readers == 0


async def test_attach_gives_output_and_takes_input(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "cat", stdin=True, wait_s=None)

    async with client.stream(Method.EXEC_ATTACH, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        await stream.send(Frame(FrameType.DATA, 0, encode_data_body(Channel.IN, 0, 0, b"to and fro")))
        await stream.send(Frame(FrameType.END, 0, pack(agent.StdinEnd(10))))
        frames = await stream.all()

    assert output_of(frames)[1] == b"to and fro"
    assert unpack(frames[-1].body, records.ExecInfo).exit_code == 0


async def test_a_frame_that_does_not_belong_ends_the_stream_with_a_typed_error(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "cat", stdin=True, wait_s=None)

    async with client.stream(Method.EXEC_ATTACH, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        await stream.send(Frame(FrameType.DATA, 0, encode_data_body(Channel.OUT, 0, 0, b"x")))
        with pytest.raises(DsecError):
            await stream.all()
