"""Sessions: a shell that lasts, one command at a time."""

from __future__ import annotations

import asyncio

import pytest

from dsec.core.errors import ConflictError, InvalidArgumentError, SessionNotFoundError
from dsec.core.ids import new_exec_id
from dsec.wire import agent
from tests.contract.agents_under_test import AgentUnderTest, collect, run


async def test_directory_and_variables_last_from_one_command_to_the_next(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    await run(client, f"cd {under_test.place.decode()}; X=5; export Y=6", session="s")
    result = await run(client, "pwd; echo $X; sh -c 'echo $Y'", session="s")

    assert result.out == under_test.place + b"\n5\n6\n"
    assert (result.end.code, result.end.session_ended) == (0, False)


async def test_a_session_is_opened_once(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    first = await client.session_open(agent.SessionOpen(name="s", env={b"A": b"b"}, cwd=under_test.place))
    again = await client.session_open(agent.SessionOpen(name="s"))

    assert (first.existing, again.existing) == (False, True)
    assert first.pid == again.pid
    assert (await run(client, "echo $A; pwd", session="s")).out == b"b\n" + under_test.place + b"\n"
    assert [state.name for state in await client.sessions()] == ["s"]


async def test_the_code_of_a_command_is_its_own(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    codes = [(await run(client, text, session="s")).end.code for text in ("true", "false", "sh -c 'exit 42'", "true")]

    assert codes == [0, 1, 42, 0]


async def test_both_channels_of_each_command_come_apart(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    for n in range(3):
        result = await run(client, f"echo o{n}; echo e{n} >&2", session="s")
        assert (result.out, result.err) == (b"o%d\n" % n, b"e%d\n" % n)


async def test_one_command_at_a_time(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"echo up; sleep 60", session="s"))
    assert (await stream.receive()) is not None

    with pytest.raises(ConflictError) as error:
        await run(client, "true", session="s")
    assert error.value.detail["code"] == "session_busy"
    (state,) = await client.sessions()
    assert state.busy == stream.started.id

    await client.kill(stream.started.id)
    await collect(stream)


async def test_exit_ends_the_session_with_its_code(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    result = await run(client, "echo bye; exit 9", session="s")

    assert (result.out, result.end.code, result.end.session_ended) == (b"bye\n", 9, True)
    assert await client.sessions() == []
    with pytest.raises(SessionNotFoundError):
        await run(client, "true", session="s")


async def test_a_timeout_leaves_the_session_usable(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))
    await run(client, "X=kept", session="s")

    result = await run(client, "sleep 600", session="s", timeout_s=0.3, grace_s=60.0)

    assert (result.end.cause, result.end.session_ended) == ("timed_out", False)
    assert (await run(client, "echo $X", session="s")).out == b"kept\n"


async def test_a_closed_session_is_gone_with_what_ran_in_it(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))
    stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"echo up; sleep 60", session="s"))
    assert (await stream.receive()) is not None

    await client.session_close("s")

    async with asyncio.timeout(60):
        assert (await collect(stream)).end.session_ended
    with pytest.raises(SessionNotFoundError):
        await client.session_close("s")


async def test_stdin_is_refused_in_a_session(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    with pytest.raises(InvalidArgumentError):
        await run(client, "cat", session="s", stdin=True)
    with pytest.raises(InvalidArgumentError):
        await run(client, argv=[b"true"], session="s")
    assert (await run(client, argv=[b"true"])).end.code == 0


async def test_a_session_outlives_the_connection(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))
    await run(client, "X=5", session="s")

    other = await under_test.client()

    assert (await run(other, "echo $X", session="s")).out == b"5\n"


@pytest.mark.parametrize(
    "fields", [{"cwd": b"/"}, {"env": {b"A": b"b"}}, {"user": "root"}, {"rlimits": {"core": 0}}, {"stdin": True}]
)
async def test_an_exec_in_a_session_is_text_alone(under_test: AgentUnderTest, fields: dict[str, object]) -> None:
    client = await under_test.client()
    await client.session_open(agent.SessionOpen(name="s"))

    with pytest.raises(InvalidArgumentError) as error:
        await client.exec(agent.Exec(id=new_exec_id(), shell=b"true", session="s", **fields))  # type: ignore[arg-type]

    assert error.value.detail["code"] == "invalid"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"shell": b"/no/such/shell"}, "command_not_found"),
        ({"cwd": b"/no/such/directory"}, "cwd_not_found"),
        ({"user": "no-such-user"}, "user_not_found"),
    ],
)
async def test_a_session_that_cannot_start_is_refused(
    under_test: AgentUnderTest, fields: dict[str, object], code: str
) -> None:
    client = await under_test.client()

    with pytest.raises(InvalidArgumentError) as error:
        await client.session_open(agent.SessionOpen(name="s", **fields))  # type: ignore[arg-type]

    assert error.value.detail["code"] == code
    assert await client.sessions() == []
