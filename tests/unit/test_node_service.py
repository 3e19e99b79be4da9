"""The node's service on the fake backend: what callers can count on."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.core import limits
from dsec.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    DeadlineError,
    DsecError,
    EnvironmentNotFoundError,
    ExecNotFoundError,
    ForbiddenError,
    GoneError,
    IdempotencyError,
    InvalidArgumentError,
    LaunchError,
    LimitError,
    PathNotFoundError,
    SandboxNotFoundError,
    UnsupportedError,
)
from dsec.core.ids import new_exec_id
from dsec.core.spec import Environment, Substrate
from dsec.core.states import EndCause
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import FAKE_SPEC, NodeClient, StreamEnd, caller_of, fake_instance, fake_node
from dsec.testing.waiting import eventually
from dsec.wire import agent, records
from dsec.wire.codec import pack, unpack
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    DirectorySource,
    EnvironmentInfo,
    EnvironmentPage,
    EnvironmentRef,
)
from dsec.wire.frames import Channel, Frame, FrameType, decode_data, encode_data_body
from dsec.wire.node import (
    Done,
    ExecResize,
    ExecSignal,
    ExecStart,
    FileCall,
    Method,
    Nothing,
    OutputQuery,
    Right,
    SessionStart,
    SessionStop,
    SetTtl,
    StdinWrite,
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def create(client: NodeClient, key: str | None = None, **changes: object) -> records.Sandbox:
    spec = msgspec.structs.replace(FAKE_SPEC, **changes)
    return await client.call(Method.CREATE, records.CreateRequest(spec=spec), records.Sandbox, key=key)


async def start(client: NodeClient, sandbox: str, *argv: str, **options: object) -> records.ExecAnswer:
    fields: dict[str, object] = {"id": new_exec_id(), "wait_s": 20.0, **options}
    if argv:
        fields["argv"] = list(argv)
    return await client.call(
        Method.EXEC_START,
        ExecStart(sandbox, records.ExecRequest(**fields)),  # type: ignore[arg-type]
        records.ExecAnswer,
    )


async def get(client: NodeClient, id: str) -> records.Sandbox:
    return await client.call(Method.GET, records.SandboxRef(id), records.Sandbox)


async def destroy(client: NodeClient, id: str) -> records.Sandbox:
    return await client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)


async def file(client: NodeClient, method: Method, id: str, args: object, answer: type = Done) -> object:
    return await client.call(method, FileCall(id, msgspec.Raw(pack(args))), answer)


def host_of(client: NodeClient) -> FakeHost:
    backend = client.node.backends[Substrate.FAKE]
    assert isinstance(backend, FakeBackend)
    return backend.host


def output_of(frames: list[Frame]) -> dict[int, bytes]:
    """Bytes by channel. A gap leaves nothing."""
    found = {1: b"", 2: b""}
    for frame in frames:
        if frame.type == FrameType.DATA:
            data = decode_data(frame.body)
            found[data.channel] += data.payload
    return found


# ---- create and end ------------------------------------------------------------------------------


async def test_a_sandbox_is_created_used_and_destroyed_and_nothing_is_left(client: NodeClient) -> None:
    sandbox = await create(client, name="one", labels={"a": "b"})
    answer = await start(client, sandbox.id, "echo", "hello")
    gone = await destroy(client, sandbox.id)

    assert sandbox.state == "running"
    assert sandbox.create_ms is not None
    assert (answer.out, answer.err, answer.exec.exit_code) == (b"hello\n", b"", 0)
    assert (gone.state, gone.cause) == ("gone", "destroyed")
    assert host_of(client).leftovers() == []
    assert list(client.node.config.sandboxes_dir.iterdir()) == []


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
                Method.CREATE, records.CreateRequest(spec=FAKE_SPEC, timeout_s=0.05), records.Sandbox, key="k"
            )

        assert failed.value.step == "hello"
        assert host.leftovers() == []
        assert client.node.journal.sandboxes() == []
        assert client.node.journal.key("/test", "k") is None


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


# ---- idempotency ---------------------------------------------------------------------------------


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


# ---- listing -------------------------------------------------------------------------------------


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


# ---- execs ---------------------------------------------------------------------------------------


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
        files = {path.name for path in (client.node.config.sandboxes_dir / sandbox.id).iterdir()}
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
        assert (client.node.config.sandboxes_dir / sandbox.id / "execs.log").stat().st_size < 60_000


# ---- output --------------------------------------------------------------------------------------


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
    record = client.node.config.sandboxes_dir / sandbox.id / f"{info.id}.out"
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


# ---- sessions, files, connections ----------------------------------------------------------------


async def test_a_session_keeps_its_directory(client: NodeClient) -> None:
    sandbox = await create(client)
    opened = await client.call(
        Method.SESSION_OPEN, SessionStart(sandbox.id, records.SessionRequest(name="main")), records.SessionInfo
    )
    await start(client, sandbox.id, shell="cd /tmp", session="main")
    where = await start(client, sandbox.id, shell="pwd", session="main")
    page = await client.call(Method.SESSION_LIST, records.SandboxRef(sandbox.id), records.SessionPage)
    await client.call(Method.SESSION_CLOSE, SessionStop(sandbox.id, "main"), Done)
    closed = await client.call(Method.SESSION_LIST, records.SandboxRef(sandbox.id), records.SessionPage)

    assert not opened.existing
    assert where.out == b"/tmp\n"
    assert [session.name for session in page.sessions] == ["main"]
    assert closed.sessions == []


async def test_files_are_made_listed_moved_and_removed(client: NodeClient) -> None:
    id = (await create(client)).id
    await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d"))
    await start(client, id, shell="echo one > /tmp/d/a")
    await file(client, Method.FILE_MOVE, id, agent.MoveArgs(source=b"/tmp/d/a", target=b"/tmp/d/b"))
    await file(client, Method.FILE_CHMOD, id, agent.ChmodArgs(path=b"/tmp/d/b", mode=0o600))
    await file(client, Method.FILE_CHOWN, id, agent.ChownArgs(path=b"/tmp/d/b", owner="5", group="6"))
    await file(client, Method.FILE_SYMLINK, id, agent.SymlinkArgs(path=b"/tmp/d/c", target=b"b"))

    page = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d"), records.FilePage)
    stat = await file(client, Method.FILE_STAT, id, agent.PathArgs(path=b"/tmp/d/b"), records.FileInfo)
    await file(client, Method.FILE_REMOVE, id, agent.RemoveArgs(path=b"/tmp/d", recursive=True))

    assert isinstance(page, records.FilePage)
    assert isinstance(stat, records.FileInfo)
    assert [(entry.name, entry.target) for entry in page.entries] == [("b", None), ("c", "b")]
    assert (stat.size, stat.mode, stat.uid, stat.gid) == (4, 0o600, 5, 6)
    with pytest.raises(PathNotFoundError):
        await file(client, Method.FILE_STAT, id, agent.PathArgs(path=b"/tmp/d"), records.FileInfo)


async def test_a_name_that_is_not_utf8_is_shown_and_told_in_full(client: NodeClient) -> None:
    id = (await create(client)).id
    await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d/\xff\xfe"))

    page = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d"), records.FilePage)

    assert isinstance(page, records.FilePage)
    assert [(entry.name, entry.name_bytes) for entry in page.entries] == [("\ufffd\ufffd", b"\xff\xfe")]


async def test_listing_goes_on_where_a_page_ended(client: NodeClient) -> None:
    id = (await create(client)).id
    for name in (b"a", b"b", b"c"):
        await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d/" + name))

    first = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d", limit=2), records.FilePage)
    assert isinstance(first, records.FilePage)
    rest = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d", after=first.after), records.FilePage)

    assert isinstance(rest, records.FilePage)
    assert [e.name for e in first.entries + rest.entries] == ["a", "b", "c"]
    assert rest.after is None


@pytest.mark.parametrize(
    ("method", "args"),
    [
        (Method.FILE_STAT, agent.PathArgs(path=b"relative")),
        (Method.FILE_STAT, agent.PathArgs(path=b"")),
        (Method.FILE_STAT, agent.PathArgs(path=b"/a\0b")),
        (Method.FILE_STAT, agent.PathArgs(path=b"/" + b"x" * 5_000)),
        (Method.FILE_STAT, agent.PathArgs(path=b"/x", user="")),
        (Method.FILE_LIST, agent.ListArgs(path=b"/x", limit=0)),
        (Method.FILE_LIST, agent.ListArgs(path=b"/x", limit=10**9)),
        (Method.FILE_CHMOD, agent.ChmodArgs(path=b"/x", mode=-1)),
        (Method.FILE_CHMOD, agent.ChmodArgs(path=b"/x", mode=0o100000)),
        (Method.FILE_MOVE, agent.MoveArgs(source=b"/x", target=b"y")),
        (Method.FILE_STAT, {"path": 7}),
        (Method.FILE_STAT, {"path": b"/x", "invented": 1}),
        (Method.FILE_STAT, ["not a map"]),
    ],
)
async def test_arguments_that_cannot_be_never_reach_the_agent(client: NodeClient, method: Method, args: object) -> None:
    id = (await create(client)).id

    with pytest.raises(InvalidArgumentError):
        await file(client, method, id, args)


async def upload(client: NodeClient, id: str, path: bytes, content: bytes, method: Method = Method.FILE_WRITE) -> int:
    args = agent.WriteArgs(path=path) if method is Method.FILE_WRITE else agent.ExtractArgs(path=path)
    async with client.stream(method, FileCall(id, msgspec.Raw(pack(args)))) as stream:
        for offset in range(0, len(content), 100_000):
            body = encode_data_body(Channel.IN, offset, 0, content[offset : offset + 100_000])
            await stream.send(Frame(FrameType.DATA, 0, body))
        await stream.send(Frame(FrameType.END, 0, pack(agent.StdinEnd(len(content)))))
        frames = await stream.all()
    return unpack(frames[-1].body, records.WriteAnswer).bytes


async def download(client: NodeClient, id: str, args: object, method: Method = Method.FILE_READ) -> bytes:
    async with client.stream(method, FileCall(id, msgspec.Raw(pack(args)))) as stream:
        frames = await stream.all()
    assert frames[0].type == FrameType.RES
    assert frames[-1].type == FrameType.END
    return output_of(frames)[1]


async def test_files_go_in_and_come_back(client: NodeClient) -> None:
    id = (await create(client)).id
    content = bytes(range(256)) * 5_000

    assert await upload(client, id, b"/tmp/f", content) == len(content)
    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f")) == content
    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f", offset=10, length=5)) == content[10:15]


async def test_an_upload_whose_caller_goes_away_leaves_no_trace(client: NodeClient) -> None:
    id = (await create(client)).id
    await upload(client, id, b"/tmp/f", b"before")
    call = FileCall(id, msgspec.Raw(pack(agent.WriteArgs(path=b"/tmp/f"))))

    async with client.stream(Method.FILE_WRITE, call) as stream:
        await stream.send(Frame(FrameType.DATA, 0, encode_data_body(Channel.IN, 0, 0, b"after")))

    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f")) == b"before"


async def test_directories_go_in_and_come_back_as_tar(client: NodeClient) -> None:
    id = (await create(client)).id
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("inner/file")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))

    await upload(client, id, b"/tmp/d", buffer.getvalue(), Method.FILE_EXTRACT)
    back = await download(client, id, agent.PathArgs(path=b"/tmp/d"), Method.FILE_ARCHIVE)

    with tarfile.open(fileobj=io.BytesIO(back)) as archive:
        found = archive.extractfile("inner/file")
        assert found is not None
        assert found.read() == b"hello"


async def test_changes_are_told_until_the_caller_has_enough(client: NodeClient) -> None:
    id = (await create(client)).id
    call = FileCall(id, msgspec.Raw(pack(agent.WatchArgs(path=b"/tmp"))))

    async with client.stream(Method.FILE_WATCH, call) as stream:
        assert (await next_frame(stream)).type == FrameType.RES
        await upload(client, id, b"/tmp/new", b"x")
        notice = unpack((await next_frame(stream)).body, records.WatchNotice)
        await stream.send(Frame(FrameType.END, 0, pack(Done())))
        rest = await stream.all()

    assert notice.path == "new"
    assert rest[-1].type == FrameType.END


async def next_frame(stream: StreamEnd) -> Frame:
    async with asyncio.timeout(10):
        frame = await stream.recv()
    assert frame is not None
    return frame


async def test_a_port_that_nobody_listens_on_is_a_typed_error(client: NodeClient) -> None:
    id = (await create(client)).id
    call = FileCall(id, msgspec.Raw(pack(agent.ConnectArgs(port=9))))

    async with client.stream(Method.CONNECT, call) as stream:
        with pytest.raises(DsecError) as refused:
            await stream.all()

    assert refused.value.detail.get("errno") == "ECONNREFUSED"


# ---- pause, resume, time to live -----------------------------------------------------------------


async def test_pause_stops_and_exec_resumes(client: NodeClient) -> None:
    sandbox = await create(client)
    paused = await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
    frozen = fake_instance(client.node, sandbox.id).frozen

    answer = await start(client, sandbox.id, "true")

    assert (paused.state, frozen) == ("paused", True)
    assert answer.exec.exit_code == 0
    assert (await get(client, sandbox.id)).state == "running"


async def test_what_only_looks_does_not_resume(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="echo x; sleep 60", wait_s=0.1)
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    await get(client, sandbox.id)
    await client.call(Method.LIST, records.ListQuery(), records.SandboxPage)
    await client.call(Method.METRICS, records.SandboxRef(sandbox.id), records.Metrics)
    await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
    query = OutputQuery(sandbox=sandbox.id, exec=answer.exec.id, follow=False)
    async with client.stream(Method.EXEC_OUTPUT, query) as stream:
        assert output_of(await stream.all())[1] == b"x\n"

    assert (await get(client, sandbox.id)).state == "paused"


async def test_many_that_need_a_paused_sandbox_resume_it_once(client: NodeClient) -> None:
    sandbox = await create(client)
    await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    answers = await asyncio.gather(*(start(client, sandbox.id, "true") for _ in range(20)))

    assert all(answer.exec.exit_code == 0 for answer in answers)


async def test_pause_and_execs_at_once_never_get_stuck(client: NodeClient) -> None:
    sandbox = await create(client)

    async def pause() -> None:
        for _ in range(10):
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

    async def work() -> None:
        for _ in range(10):
            assert (await start(client, sandbox.id, "echo", "x")).out == b"x\n"

    async with asyncio.timeout(30):
        await asyncio.gather(pause(), work(), work())


async def test_the_idle_are_ended_and_the_busy_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        idle = await create(client, ttl_idle_s=60.0)
        busy = await create(client, ttl_idle_s=60.0)
        await start(client, busy.id, "sleep", "600", wait_s=None)
        await clock.wait_sleepers(1)

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 1)

        assert (await get(client, idle.id)).cause == "ttl_idle"
        assert (await get(client, busy.id)).state == "running"


async def test_use_puts_the_end_off(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_idle_s=60.0)
        for _ in range(4):
            await clock.advance(50)
            await file(client, Method.FILE_STAT, sandbox.id, agent.PathArgs(path=b"/"), records.FileInfo)
        assert (await get(client, sandbox.id)).state == "running"

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 0)

        assert (await get(client, sandbox.id)).cause == "ttl_idle"


async def test_the_time_to_live_ends_even_the_busy(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0)
        answer = await start(client, sandbox.id, "sleep", "600", wait_s=None)
        waiting = asyncio.create_task(
            client.call(
                Method.EXEC_GET,
                records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=30),
                records.ExecInfo,
            )
        )
        await clock.wait_sleepers(1)

        await clock.advance(61)
        info = await waiting
        await eventually(lambda: len(client.node.registry) == 0)

        assert (info.state, info.status) == ("ended", "unknown")
        assert (await get(client, sandbox.id)).cause == "ttl_running"


async def test_the_time_to_live_stands_still_while_paused(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0, ttl_idle_s=30.0)
        await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
        await clock.advance(10_000)
        assert (await get(client, sandbox.id)).state == "paused"
        await client.call(Method.RESUME, records.SandboxRef(sandbox.id), records.Sandbox)
        await clock.advance(20)
        view = await get(client, sandbox.id)
        assert view.state == "running"
        assert view.usage is not None
        assert view.usage.frozen_s == 10_000

        await clock.advance(11)
        await eventually(lambda: len(client.node.registry) == 0)


async def test_a_new_time_to_live_replaces_the_old(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, ttl_running_s=60.0)
        changed = await client.call(
            Method.SET_TTL, SetTtl(sandbox.id, records.TtlRequest(ttl_running_s=600.0)), records.Sandbox
        )
        await clock.advance(500)
        assert (await get(client, sandbox.id)).state == "running"

        await clock.advance(101)
        await eventually(lambda: len(client.node.registry) == 0)

        assert changed.ttl_running_s == 600.0


async def test_background_processes_count_with_keepalive(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock, sleep=clock.sleep) as client:
        kept = await create(client, ttl_idle_s=60.0, keepalive=True)
        bare = await create(client, ttl_idle_s=60.0, keepalive=True)
        await start(client, kept.id, shell="sleep 6000 &")

        await clock.advance(61)
        await eventually(lambda: len(client.node.registry) == 1)

        assert (await get(client, kept.id)).state == "running"
        assert (await get(client, bare.id)).cause == "ttl_idle"


async def test_a_backend_that_cannot_pause_says_so(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        sandbox = await create(client)
        found = client.node.registry.find(sandbox.id)
        assert found is not None
        found.backend = FakeBackend(host_of(client), pause=False)

        with pytest.raises(UnsupportedError):
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)


# ---- faults of a sandbox -------------------------------------------------------------------------


async def test_a_dead_agent_fails_the_sandbox_and_invents_no_exit(client: NodeClient) -> None:
    sandbox = await create(client)
    waiting = asyncio.create_task(start(client, sandbox.id, shell="echo begun; sleep 60"))

    async def has_begun() -> bool:
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
        return [exec.out_bytes for exec in page.execs] == [6]

    await eventually(has_begun)

    await fake_instance(client.node, sandbox.id).crash()
    answer = await waiting
    await eventually(lambda: len(client.node.registry) == 0)

    view = await get(client, sandbox.id)
    assert (answer.exec.status, answer.exec.cause, answer.exec.exit_code) == ("unknown", "agent_lost", None)
    assert (view.state, view.cause) == ("failed", "sandbox_fault")
    assert host_of(client).leftovers() == []


async def test_an_agent_killed_for_memory_is_told_as_that(client: NodeClient) -> None:
    sandbox = await create(client)

    await fake_instance(client.node, sandbox.id).crash(EndCause.OOM, "killed for memory")
    await eventually(lambda: len(client.node.registry) == 0)

    assert (await get(client, sandbox.id)).cause == "oom"


async def test_a_lost_channel_is_opened_again_and_no_output_is_lost(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell="seq 1 1000; sleep 0.3; seq 1001 2000", wait_s=0.1)
    found = client.node.registry.find(sandbox.id)
    assert found is not None
    assert found._link is not None
    agent_client = await found._link.client()

    agent_client.close()
    info = await client.call(
        Method.EXEC_GET, records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=10), records.ExecInfo
    )

    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox.id, exec=answer.exec.id)) as stream:
        output = output_of(await stream.all())[1]
    assert info.exit_code == 0
    assert output == b"".join(b"%d\n" % n for n in range(1, 2_001))


# ---- the service itself --------------------------------------------------------------------------


async def test_every_method_is_served() -> None:
    from dsec.node.service import Service

    service = Service.__new__(Service)
    Service.__init__(service, None)  # type: ignore[arg-type]

    assert set(service._unary) | set(service._streaming) == set(Method)


@pytest.mark.parametrize("method", sorted(Method))
async def test_a_body_that_is_none_is_a_typed_error(client: NodeClient, method: Method) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    for body in (b"", b"\xc1", b"\x81\xa1x\x01", b"\x93\x01\x02\x03"):
        if method in admin.service._unary:
            with pytest.raises(DsecError):
                await admin.service.call(method, body, caller=admin.caller, key=None, timeout_s=5)
        else:
            with pytest.raises(DsecError):
                await admin.service.serve_stream(method, body, StreamEnd(), caller=admin.caller)


async def test_a_call_that_takes_too_long_is_a_typed_error(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "sleep", "60", wait_s=None)

    with pytest.raises(DeadlineError):
        await client.call(
            Method.EXEC_GET,
            records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=30),
            records.ExecInfo,
            timeout_s=0.05,
        )


async def test_expired_credentials_and_missing_rights_are_typed_errors(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ})))
    expired = client.of(msgspec.structs.replace(caller_of(), expires_at=1.0))

    with pytest.raises(ForbiddenError):
        await create(reader)
    with pytest.raises(AuthError):
        await create(expired)
    with pytest.raises(ForbiddenError):
        await client.call(Method.DOCTOR, Nothing(), records.DoctorReport)
    await reader.call(Method.LIST, records.ListQuery(), records.SandboxPage)
    await reader.of(caller_of(rights=frozenset())).call(Method.HEALTH, Nothing(), records.Health)


async def test_environments_are_listed_built_and_removed(client: NodeClient) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    request = BuildRequest(name="more", source=DirectorySource(path="/nowhere"))

    async with admin.stream(Method.ENVIRONMENT_BUILD, request) as stream:
        frames = await stream.all()
    page = await admin.call(Method.ENVIRONMENT_LIST, Nothing(), EnvironmentPage)
    one = await admin.call(Method.ENVIRONMENT_GET, EnvironmentRef("more"), EnvironmentInfo)
    await admin.call(Method.ENVIRONMENT_REMOVE, EnvironmentRef("more"), Done)

    assert [unpack(frame.body, BuildEvent).kind for frame in frames[:-1]] == ["progress", "done"]
    assert unpack(frames[-1].body, EnvironmentInfo).name == "more"
    assert {info.name for info in page.environments} == {"base", "more"}
    assert one.name == "more"
    with pytest.raises(EnvironmentNotFoundError):
        await admin.call(Method.ENVIRONMENT_GET, EnvironmentRef("more"), EnvironmentInfo)


async def test_health_and_doctor_answer(client: NodeClient) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    await create(client)

    health = await client.call(Method.HEALTH, Nothing(), records.Health)
    report = await admin.call(Method.DOCTOR, Nothing(), records.DoctorReport)

    assert health.sandboxes == 1
    assert health.node == client.node.id
    assert report.substrates == {"fake": "ok"}
    assert {"kernel", "cgroups", "disk", "memory", "KVM"} <= {finding.what for finding in report.findings}
    assert {finding.status for finding in report.findings} <= {"ok", "degraded", "missing"}


async def test_metrics_count_what_was_recorded_and_what_was_dropped(client: NodeClient) -> None:
    sandbox = await create(client)
    await start(client, sandbox.id, "head", "-c", "3000000", "/dev/zero", record_bytes_max=1_000_000)

    metrics = await client.call(Method.METRICS, records.SandboxRef(sandbox.id), records.Metrics)

    assert metrics.output_recorded_bytes + metrics.output_dropped_bytes == 3_000_000
    assert metrics.output_recorded_bytes <= 1_000_000


async def test_sub_projects_are_reached_and_siblings_are_not(client: NodeClient) -> None:
    inner = await create(client.of(caller_of("/team/run-7")))
    similar = await create(client.of(caller_of("/team-two")))
    team = client.of(caller_of("/team"))

    page = await team.call(Method.LIST, records.ListQuery(), records.SandboxPage)

    assert [sandbox.id for sandbox in page.sandboxes] == [inner.id]
    assert (await get(team, inner.id)).id == inner.id
    with pytest.raises(SandboxNotFoundError):
        await get(team, similar.id)
    with pytest.raises(SandboxNotFoundError):
        await get(client.of(caller_of("/team/run-7/deeper")), inner.id)
