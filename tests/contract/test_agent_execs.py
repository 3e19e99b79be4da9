"""Execs, the same on every agent: what runs, what comes out, how it ends, and what survives a connection."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from dsec.core.errors import (
    ConflictError,
    DsecError,
    ExecNotFoundError,
    InvalidArgumentError,
    ProtocolError,
    UnavailableError,
)
from dsec.core.ids import new_exec_id
from dsec.core.limits import DATA_BYTES_MAX, EXEC_UNACKED_BYTES_MAX
from dsec.testing.waiting import eventually
from dsec.wire import agent
from dsec.wire.frames import Channel, Data
from tests.contract.agents_under_test import AgentUnderTest, collect, run
from tests.patience import with_a_limit


async def test_hello_names_the_agent_and_its_execs(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    assert client.hello.generation == agent.GENERATION_MAX
    assert client.hello.boot_id
    assert client.hello.execs == []


@pytest.mark.parametrize("code", [0, 1, 7, 255])
async def test_the_exit_code_is_the_command_s(under_test: AgentUnderTest, code: int) -> None:
    result = await run(await under_test.client(), f"exit {code}")

    assert (result.end.status, result.end.code, result.end.signal) == ("exited", code, None)
    assert result.end.cause is None


async def test_argv_runs_without_a_shell(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), argv=[b"echo", b"a  b", b"$HOME", b"\xff"])

    assert result.out == b"a  b $HOME \xff\n"


async def test_a_command_that_kills_itself_ends_by_a_signal(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), "kill -9 $$")

    assert (result.end.status, result.end.code, result.end.signal) == ("signaled", None, 9)


async def test_output_comes_apart_by_channel_and_counts(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), "echo out; echo err >&2; echo more")

    assert (result.out, result.err) == (b"out\nmore\n", b"err\n")
    assert (result.end.out_bytes, result.end.err_bytes) == (9, 4)


async def test_merged_output_keeps_its_order(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), "echo 1; echo 2 >&2; echo 3", merge_stderr=True)

    assert (result.out, result.err) == (b"1\n2\n3\n", b"")


async def test_the_environment_is_the_exec_s_and_has_what_every_program_needs(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), argv=[b"env"], env={b"A": b"1 2", b"B": b"\xfe"})

    lines = result.out.split(b"\n")
    assert {b"A=1 2", b"B=\xfe"} <= set(lines)
    assert {line.split(b"=")[0] for line in lines} >= {b"HOME", b"USER", b"LOGNAME", b"SHELL", b"PATH"}


async def test_the_directory_is_the_one_asked_for(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), "pwd", cwd=under_test.place)

    assert result.out == under_test.place + b"\n"


async def test_the_user_is_the_one_asked_for(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    assert (await run(client, argv=[b"id", b"-u"])).out == b"0\n"
    assert (await run(client, argv=[b"id", b"-u"], user="nobody", cwd=b"/")).out == b"65534\n"
    assert (await run(client, argv=[b"id", b"-g"], user="4321:54", cwd=b"/")).out == b"54\n"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"argv": [b"no-such-program"]}, "command_not_found"),
        ({"argv": [b"/tmp"]}, "not_executable"),
        ({"argv": [b"true"], "cwd": b"/no/such/directory"}, "cwd_not_found"),
        ({"argv": [b"true"], "user": "no-such-user"}, "user_not_found"),
        ({"argv": [b"true", b"x" * 140_000]}, "argument_too_long"),
        ({"argv": [b"true"], "rlimits": {"nofile": 1 << 40}}, "rlimit_refused"),
        ({"argv": [b"true"], "rlimits": {"no-such-limit": 1}}, "invalid"),
        ({"argv": [b"true"], "shell": b"true"}, "invalid"),
        ({}, "invalid"),
        ({"argv": []}, "invalid"),
        ({"argv": [b"a\0b"]}, "invalid"),
        ({"argv": [b"true"], "env": {b"A=B": b""}}, "invalid"),
        ({"argv": [b"true"], "timeout_s": -1.0}, "invalid"),
    ],
)
async def test_what_cannot_start_is_refused_by_name_and_nothing_is_kept(
    under_test: AgentUnderTest, fields: dict[str, object], code: str
) -> None:
    client = await under_test.client()

    with pytest.raises(InvalidArgumentError) as error:
        await run(client, **fields)

    assert error.value.detail["code"] == code
    assert await client.execs() == []


async def test_an_id_that_is_none_is_refused(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    with pytest.raises((InvalidArgumentError, ProtocolError)):
        await client.exec(agent.Exec(id="../../etc", argv=[b"true"]))


async def test_a_session_that_is_not_there_is_named(under_test: AgentUnderTest) -> None:
    with pytest.raises(DsecError) as error:
        await run(await under_test.client(), "true", session="missing")

    assert error.value.code == "session_not_found"


# ---- stdin ---------------------------------------------------------------------------------------


async def test_without_stdin_the_command_reads_nothing(under_test: AgentUnderTest) -> None:
    assert (await run(await under_test.client(), argv=[b"cat"])).out == b""


async def test_stdin_reaches_the_command_up_to_its_end(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"cat"], stdin=True))

    await stream.send_stdin(b"hello ")
    await stream.send_stdin(b"world")
    stream.close_stdin()

    assert (await collect(stream)).out == b"hello world"


async def test_much_stdin_flows_while_output_is_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"wc", b"-c"], stdin=True))

    for _ in range(30):
        await stream.send_stdin(bytes(100_000))
    stream.close_stdin()

    assert int((await collect(stream)).out) == 3_000_000
    assert stream.stdin_offset == 3_000_000


async def test_stdin_waits_for_a_command_that_does_not_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"60"], stdin=True))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await stream.send_stdin(bytes(4_000_000))

    await client.kill(stream.started.id)
    assert (await collect(stream)).end.cause == "killed"


async def test_stdin_goes_on_over_another_connection(under_test: AgentUnderTest) -> None:
    first = await under_test.client()
    id = new_exec_id()
    stream = await first.exec(agent.Exec(id=id, argv=[b"cat"], stdin=True))
    await stream.send_stdin(b"one ")
    assert (await stream.receive()) is not None  # cat has read it

    second = await under_test.client()
    stream = await second.attach(id)
    assert stream.stdin_offset == 4
    await stream.send_stdin(b"two")
    stream.close_stdin()

    assert (await collect(stream)).out == b"one two"


# ---- time, signals, budget -----------------------------------------------------------------------


async def test_a_command_that_takes_too_long_is_terminated(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), argv=[b"sleep", b"60"], timeout_s=0.2)

    assert (result.end.status, result.end.signal, result.end.cause) == ("signaled", signal.SIGTERM, "timed_out")


async def test_a_command_that_ignores_term_is_killed_after_the_grace_period(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    script = "trap '' TERM; echo ready; sleep 60; sleep 60"
    result = await with_a_limit(
        lambda limit_s: run(client, script, timeout_s=limit_s, grace_s=0.2), lambda result: result.out
    )

    assert (result.out, result.end.signal, result.end.cause) == (b"ready\n", signal.SIGKILL, "timed_out")


async def test_a_command_that_ends_in_time_has_no_cause(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), argv=[b"true"], timeout_s=30.0)

    assert (result.end.code, result.end.cause) == (0, None)


async def test_a_kill_that_comes_with_the_start_is_not_lost(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    id = new_exec_id()

    stream, _ = await asyncio.gather(client.exec(agent.Exec(id=id, argv=[b"sleep", b"60"])), client.kill(id))

    async with asyncio.timeout(30):
        result = await collect(stream)
    assert (result.end.signal, result.end.cause) == (signal.SIGKILL, "killed")


async def test_a_signal_reaches_the_command(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"60"]))

    await client.signal(stream.started.id, signal.SIGINT)
    result = await collect(stream)

    assert (result.end.signal, result.end.cause) == (signal.SIGINT, None)


async def test_kill_ends_all_of_it_at_once(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"trap '' TERM; echo up; sleep 60 | cat; echo no"))
    assert (await stream.receive()) is not None

    await client.kill(stream.started.id)
    result = await collect(stream)

    assert (result.out, result.end.signal, result.end.cause) == (b"", signal.SIGKILL, "killed")


async def test_an_ended_exec_takes_signals_without_effect(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"true"]))
    await collect(stream)

    await client.signal(stream.started.id, signal.SIGTERM)
    await client.kill(stream.started.id)

    (state,) = await client.execs()
    assert state.end is not None
    assert state.end.code == 0


async def test_output_above_its_budget_kills_the_exec(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), argv=[b"yes"], output_bytes_max=100_000)

    assert (result.end.signal, result.end.cause) == (signal.SIGKILL, "output_budget")
    assert 0 < len(result.out) <= 100_000 + DATA_BYTES_MAX


async def test_output_within_its_budget_does_not(under_test: AgentUnderTest) -> None:
    result = await run(await under_test.client(), "echo 12345", output_bytes_max=6)

    assert (result.out, result.end.code, result.end.cause) == (b"12345\n", 0, None)


# ---- what the agent keeps ------------------------------------------------------------------------


async def test_the_same_id_attaches_and_never_runs_twice(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    request = agent.Exec(id=new_exec_id(), shell=b"echo x >> once; cat once", cwd=under_test.place)

    first = await collect(await client.exec(request))
    again = await client.exec(request)

    assert again.started.existing
    assert (await collect(again)).out == first.out == b"x\n"


async def test_an_end_is_kept_until_it_is_acknowledged(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"echo hi; exit 3"))
    await collect(stream)

    other = await under_test.client()
    (state,) = other.hello.execs
    assert (state.id, state.out, state.end is not None and state.end.code) == (stream.started.id, 3, 3)

    await other.exit_ack(stream.started.id)
    await other.exit_ack(stream.started.id)
    assert await other.execs() == []
    with pytest.raises(ExecNotFoundError):
        await other.attach(stream.started.id)


async def test_a_running_exec_cannot_be_acknowledged_away(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"60"]))

    with pytest.raises(InvalidArgumentError):
        await client.exit_ack(stream.started.id)

    await client.kill(stream.started.id)
    await collect(stream)


async def test_output_is_kept_until_acknowledged_and_then_named_as_a_gap(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"echo 12345; echo abc >&2"))
    await collect(stream)
    id = stream.started.id

    again = await client.attach(id, out=2, err=1)
    assert again.gaps == ()
    result = await collect(again)
    assert (result.out, result.err) == (b"345\n", b"bc\n")

    await client.ack(id, out=4, err=0)
    late = await client.attach(id)
    assert [(gap.channel, gap.start, gap.end) for gap in late.gaps] == [(Channel.OUT, 0, 4)]
    result = await collect(late)
    assert (result.out, result.err) == (b"5\n", b"abc\n")


async def test_a_command_waits_while_its_output_is_not_acknowledged(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    size = 3 * EXEC_UNACKED_BYTES_MAX
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"head", b"-c", b"%d" % size, b"/dev/zero"]))
    id, got = stream.started.id, 0

    async with asyncio.timeout(60):
        while got < EXEC_UNACKED_BYTES_MAX:
            data = await stream.receive()
            assert data is not None
            got += len(data.payload)
    assert got == EXEC_UNACKED_BYTES_MAX
    (state,) = await client.execs()
    assert (state.out, state.end) == (EXEC_UNACKED_BYTES_MAX, None)

    while True:
        await client.ack(id, out=got, err=0)
        data = await stream.receive()
        if data is None:
            break
        got += len(data.payload)
    assert (got, stream.end.out_bytes, stream.end.code) == (size, size, 0)


async def test_a_reader_that_stops_gets_no_more_than_its_credit(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"head -c 900000 /dev/zero"))

    async def ended() -> bool:
        return (await client.execs())[0].end is not None

    await eventually(ended)

    # All of it is with the agent, and only the credit's worth here; none is lost.
    assert len((await collect(stream)).out) == 900_000


async def test_a_new_connection_takes_over_and_nothing_is_lost(under_test: AgentUnderTest) -> None:
    first = await under_test.client()
    stream = await first.exec(agent.Exec(id=new_exec_id(), shell=b"echo one; cat; echo two", stdin=True))
    data = await stream.receive()
    assert data == Data(Channel.OUT, 0, 0, b"one\n")

    second = await under_test.client()
    with pytest.raises(UnavailableError):
        await stream.receive()
    with pytest.raises(UnavailableError):
        await first.execs()

    again = await second.attach(stream.started.id, out=4)
    again.close_stdin()
    assert (await collect(again)).out == b"two\n"
    assert second.hello.boot_id == first.hello.boot_id


async def test_no_byte_is_lost_or_doubled_over_any_breaks(under_test: AgentUnderTest, rng: random.Random) -> None:
    """The recorder's life: take some, write it down, acknowledge now and then, lose the channel, go on."""
    id, last = new_exec_id(), 300_000
    expected = b"".join(b"%d\n" % n for n in range(1, last + 1))
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=id, shell=b"seq %d; echo end >&2" % last))
    recorded = {int(Channel.OUT): b"", int(Channel.ERR): b""}
    breaks = 0

    async with asyncio.timeout(60):
        while (data := await stream.receive()) is not None:
            assert data.offset == len(recorded[data.channel])
            recorded[data.channel] += data.payload
            out, err = len(recorded[Channel.OUT]), len(recorded[Channel.ERR])
            if rng.random() < 0.7:
                await client.ack(id, out=out, err=err)
            if breaks < 8 and rng.random() < 0.2:
                breaks += 1
                client.close() if rng.random() < 0.5 else stream.cancel()
                client = await under_test.client()
                stream = await client.attach(id, out=out, err=err)
                assert stream.gaps == ()

    assert recorded == {Channel.OUT: expected, Channel.ERR: b"end\n"}
    assert (stream.end.out_bytes, stream.end.err_bytes) == (len(expected), 4)


async def test_attaching_again_supersedes_the_stream_of_before(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"cat"], stdin=True))

    again = await client.attach(stream.started.id)
    with pytest.raises(ConflictError) as error:
        await stream.receive()
    assert error.value.detail["code"] == "superseded"

    await client.detach(stream.started.id)
    with pytest.raises(ConflictError) as error:
        await again.receive()
    assert error.value.detail["code"] == "detached"

    last = await client.attach(stream.started.id)
    last.close_stdin()
    assert (await collect(last)).end.code == 0


async def test_a_cancelled_stream_leaves_the_exec_running(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"cat"], stdin=True))

    stream.cancel()
    with pytest.raises(ConflictError):
        await stream.receive()

    again = await client.attach(stream.started.id)
    await again.send_stdin(b"still here")
    again.close_stdin()
    assert (await collect(again)).out == b"still here"


async def test_sequence_numbers_order_both_channels(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(
        agent.Exec(id=new_exec_id(), shell=b"cat; echo b >&2; cat /dev/null; echo c", stdin=True)
    )
    await stream.send_stdin(b"a\n")
    chunks = [await stream.receive()]
    stream.close_stdin()
    chunks += [data async for data in stream]

    sequences = [data.sequence for data in chunks if data is not None]
    assert sequences == sorted(sequences)
    assert chunks[0] == Data(Channel.OUT, 0, 0, b"a\n")


@pytest.mark.parametrize("method", ["attach", "detach", "kill"])
async def test_an_exec_that_is_not_known_is_not_found(under_test: AgentUnderTest, method: str) -> None:
    client = await under_test.client()

    with pytest.raises(ExecNotFoundError):
        await getattr(client, method)(new_exec_id())


async def test_many_execs_run_at_once(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    results = await asyncio.gather(*(run(client, f"echo {n}; exit {n}") for n in range(50)))

    assert [(result.out, result.end.code) for result in results] == [(b"%d\n" % n, n) for n in range(50)]


# ---- terminals -----------------------------------------------------------------------------------


async def test_a_terminal_is_one_and_has_its_size(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    script = b"test -t 0 && echo tty; stty size; cat; stty size"
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=script, stdin=True, tty=agent.Tty(91, 33)))
    seen = b""
    while b"33 91" not in seen:
        data = await stream.receive()
        assert data is not None
        assert data.channel == Channel.OUT
        seen += data.payload

    await client.resize(stream.started.id, cols=120, rows=40)
    stream.close_stdin()
    seen += (await collect(stream)).out

    assert seen.startswith(b"tty")
    assert b"40 120" in seen


async def test_only_a_terminal_has_a_size(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"sleep", b"60"]))

    with pytest.raises(InvalidArgumentError):
        await client.resize(stream.started.id, cols=80, rows=24)

    await client.kill(stream.started.id)
    await collect(stream)


# ---- background processes ------------------------------------------------------------------------


async def test_an_exec_ends_with_its_leader_not_with_what_holds_its_pipe(under_test: AgentUnderTest) -> None:
    async with asyncio.timeout(60):
        result = await run(await under_test.client(), "sleep 60 & echo done")

    assert (result.out, result.end.code) == (b"done\n", 0)


async def test_output_shortly_after_the_leader_s_end_is_kept(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    # On a loaded machine it may come later than the agent waits for it.
    for _ in range(20):
        result = await run(client, "echo first; sleep 0.05 && echo late &")
        if result.out != b"first\n":
            break

    assert result.out == b"first\nlate\n"


async def test_a_timeout_reaches_a_grandchild_in_a_session_of_its_own(real_only: AgentUnderTest) -> None:
    script = "setsid sh -c 'echo $$; exec sleep 61' & wait"
    client = await real_only.client()
    result = await with_a_limit(
        lambda limit_s: run(client, script, timeout_s=limit_s, grace_s=0.2), lambda result: result.out
    )

    assert result.end.cause == "timed_out"
    pid = int(result.out)
    check = await run(client, f"test -e /proc/{pid}/exe")
    assert check.end.code == 1
