"""Whatever an agent sends, the channel closes with a typed error, at once, in bounded memory, and nobody hangs."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dsec.agent.channel import FRAMES_PER_TURN, UNSENT_BYTES_MAX
from dsec.agent.client import AgentClient
from dsec.agent.execs import ExecStream
from dsec.core.errors import (
    DeadlineError,
    FileError,
    ProtocolError,
    SandboxError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import new_exec_id
from dsec.core.limits import CREDIT_INITIAL_BYTES, PREAMBLE_SCAN_BYTES_MAX, WATCH_EVENTS_QUEUED_MAX
from dsec.testing.leaks import no_leaks_async
from dsec.wire import agent
from dsec.wire.codec import pack
from dsec.wire.frames import FrameType, encode_frame
from tests.contract.agents_under_test import collect
from tests.security.scripted_agent import HELLO, ScriptedAgent, data, frame, scripted_client

EXEC = new_exec_id()
EXITED = agent.ExecEnd(status="exited", code=0)
S = 1  # the first stream that the host opens


async def open_exec(scripted: ScriptedAgent, client: AgentClient) -> ExecStream:
    start = asyncio.create_task(client.exec(agent.Exec(id=EXEC, argv=[b"x"])))
    stream = await scripted.request("exec")
    scripted.send(frame(FrameType.RES, stream, agent.ExecStarted(id=EXEC)))
    return await start


# ---- frames on an exec's stream ------------------------------------------------------------------

ON_EXEC: dict[str, bytes] = {
    "data for a stream never opened": data(999, 1, 0, b"x"),
    "data for an even stream": data(2, 1, 0, b"x"),
    "data for stream 0": data(0, 1, 0, b"x"),
    "a request": frame(FrameType.REQ, 3, agent.Request("exec")),
    "a request on our stream": frame(FrameType.REQ, S, agent.Request("exec")),
    "a second hello": frame(FrameType.HELLO, 0, HELLO),
    "a second reply": frame(FrameType.RES, S, agent.ExecStarted(id=EXEC)),
    "an error for stream 0": frame(FrameType.ERR, 0, agent.AgentError("x", "y")),
    "an event": frame(FrameType.EVENT, S, agent.WatchEvent(kind="created")),
    "stdin from the agent": data(S, 0, 0, b"x"),
    "a channel that does not exist": frame(FrameType.DATA, S, struct.pack(">BQQ", 3, 0, 0) + b"x"),
    "a data body too short": frame(FrameType.DATA, S, b"\1\0\0"),
    "an empty chunk": data(S, 1, 0, b""),
    "a hole": data(S, 1, 0, b"abc") + data(S, 1, 4, b"x"),
    "an offset that goes back": data(S, 1, 0, b"abc") + data(S, 1, 2, b"x"),
    "an offset at the end of numbers": data(S, 1, 2**64 - 1, b"x"),
    "a sequence that falls": data(S, 1, 0, b"a", 5) + data(S, 1, 1, b"b", 4),
    "a sequence at the end of numbers": data(S, 1, 0, b"a", 2**64 - 1),
    "one byte beyond the credit": data(S, 1, 0, bytes(CREDIT_INITIAL_BYTES)) + data(S, 1, CREDIT_INITIAL_BYTES, b"x"),
    "credit of nothing": frame(FrameType.CREDIT, S, agent.Credit(0)),
    "credit below nothing": frame(FrameType.CREDIT, S, agent.Credit(-5)),
    "credit without end": frame(FrameType.CREDIT, S, agent.Credit(2**63 - 1)),
    "credit that sums without end": frame(FrameType.CREDIT, S, agent.Credit(200_000)) * 100,
    "credit in crumbs without end": frame(FrameType.CREDIT, S, agent.Credit(1)) * 5_000,
    "credit of text": frame(FrameType.CREDIT, S, {"bytes": "many"}),
    "credit of a fraction": frame(FrameType.CREDIT, S, {"bytes": 1.5}),
    "the end twice": frame(FrameType.END, S, agent.ExecEnded(EXITED)) * 2,
    "data after the end": frame(FrameType.END, S, agent.ExecEnded(EXITED)) + data(S, 1, 0, b"x"),
    "an end that is no map": frame(FrameType.END, S, b"\x93\1\2\3"),
    "an end without content": frame(FrameType.END, S, {}),
    "an end with an unknown status": frame(FrameType.END, S, {"end": {"status": "fine"}}),
    "an exit without a code": frame(FrameType.END, S, {"end": {"status": "exited"}}),
    "an exit code of 256": frame(FrameType.END, S, {"end": {"status": "exited", "code": 256}}),
    "a signal that does not exist": frame(FrameType.END, S, {"end": {"status": "signaled", "signal": 65}}),
    "a code and a signal": frame(FrameType.END, S, {"end": {"status": "exited", "code": 0, "signal": 9}}),
    "a cause that does not exist": frame(FrameType.END, S, {"end": {"status": "exited", "code": 0, "cause": "bored"}}),
    "a cause that only the node gives": frame(FrameType.END, S, {"end": {"status": "unknown", "cause": "node_lost"}}),
    "negative counts": frame(FrameType.END, S, {"end": {"status": "exited", "code": 0, "out_bytes": -1}}),
    "an error that is none": frame(FrameType.ERR, S, [1, 2]),
    "an error with a code of a number": frame(FrameType.ERR, S, {"code": 5, "message": "x"}),
    "text that is not UTF-8": frame(FrameType.ERR, S, b"\x82\xa4code\xa1\xff\xa7message\xa1x"),
    "an empty body": frame(FrameType.END, S, b""),
    "more than one value": frame(FrameType.END, S, pack(agent.ExecEnded(EXITED)) + b"\xc0"),
    "nesting without end": frame(FrameType.END, S, b"\x81\xa3end" * 100_000),
    "an array that claims a billion": frame(FrameType.END, S, b"\x81\xa3end\xdd\x3b\x9a\xca\x00"),
    "a length of 4": b"\0\0\0\4\7\0\0\0\1",
    "a length of 0": bytes(9),
    "a length of 4 GiB": b"\xff\xff\xff\xff\7\0\0\0\1",
    "a frame of type 0": b"\0\0\0\5\0\0\0\0\1",
    "a frame of type 9": b"\0\0\0\5\x09\0\0\0\1",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("bad", ON_EXEC.values(), ids=ON_EXEC.keys())
async def test_a_violation_closes_the_channel_for_everyone(bad: bytes) -> None:
    scripted, client = await scripted_client()
    stream = await open_exec(scripted, client)
    others = [asyncio.create_task(client.usage()), asyncio.create_task(client.execs())]
    receiving = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)

    scripted.send(bad)

    async with asyncio.timeout(60):
        failure = await client.channel.closed()
        await scripted.lost.wait()
        results = await asyncio.gather(*others, return_exceptions=True)
        await asyncio.wait([receiving])
    assert isinstance(failure, ProtocolError)
    assert [type(result) for result in results] == [ProtocolError, ProtocolError]
    # The exec may have ended properly before the violation came.
    assert isinstance(receiving.exception(), ProtocolError) or receiving.result().end == EXITED
    with pytest.raises(ProtocolError):
        await client.usage()


async def test_both_channels_share_the_credit() -> None:
    scripted, client = await scripted_client()
    await open_exec(scripted, client)

    scripted.send(data(S, 1, 0, bytes(200_000)) + data(S, 2, 0, bytes(62_145)))

    async with asyncio.timeout(60):
        assert isinstance(await client.channel.closed(), ProtocolError)


@pytest.mark.parametrize(
    "reply",
    [
        {"id": new_exec_id()},
        {"id": EXEC, "out": -1},
        {"id": EXEC, "out": 2**63},
        {"id": EXEC, "pid": "one"},
        {"id": 7},
        [EXEC],
        {},
        b"\xc1",
    ],
)
async def test_a_reply_that_is_not_about_the_request_closes_the_channel(reply: Any) -> None:
    scripted, client = await scripted_client()
    start = asyncio.create_task(client.exec(agent.Exec(id=EXEC, argv=[b"x"])))

    scripted.send(frame(FrameType.RES, await scripted.request("exec"), reply))

    with pytest.raises(ProtocolError):
        await start


async def test_output_from_below_the_offset_asked_for_closes_the_channel() -> None:
    scripted, client = await scripted_client()
    start = asyncio.create_task(client.attach(EXEC, out=10))

    scripted.send(frame(FrameType.RES, await scripted.request("attach"), agent.ExecStarted(id=EXEC, out=9)))

    with pytest.raises(ProtocolError):
        await start


@pytest.mark.parametrize(
    "early",
    [
        data(S, 1, 0, b"x"),
        frame(FrameType.END, S, agent.ExecEnded(EXITED)),
        frame(FrameType.EVENT, S, {}),
    ],
)
async def test_nothing_comes_before_the_reply(early: bytes) -> None:
    scripted, client = await scripted_client()
    start = asyncio.create_task(client.exec(agent.Exec(id=EXEC, argv=[b"x"])))
    await scripted.request("exec")

    scripted.send(early)

    with pytest.raises(ProtocolError):
        await start


# ---- replies of unary operations -----------------------------------------------------------------

FILE = {"name": b"f", "kind": "file"}


def entries(*names: bytes) -> dict[str, Any]:
    return {"entries": [{"name": name, "kind": "file"} for name in names]}


LIST = agent.ListArgs(path=b"/", limit=2, after=b"a")
REPLIES: list[tuple[str, Callable[[AgentClient], Awaitable[Any]], Any]] = [
    ("list", lambda c: c.list(LIST), entries(b"b", b"c", b"d")),
    ("list", lambda c: c.list(LIST), entries(b"c", b"b")),
    ("list", lambda c: c.list(LIST), entries(b"b", b"b")),
    ("list", lambda c: c.list(LIST), entries(b"a")),
    ("list", lambda c: c.list(LIST), entries(b"x/../../etc")),
    ("list", lambda c: c.list(LIST), entries(b"b\0")),
    ("list", lambda c: c.list(agent.ListArgs(path=b"/")), entries(b"..")),
    ("list", lambda c: c.list(agent.ListArgs(path=b"/")), entries(b"")),
    ("list", lambda c: c.list(agent.ListArgs(path=b"/")), entries(b"n" * 256)),
    ("list", lambda c: c.list(LIST), {"entries": [], "more": True}),
    ("stat", lambda c: c.stat(agent.PathArgs(path=b"/")), {**FILE, "kind": "portal"}),
    ("stat", lambda c: c.stat(agent.PathArgs(path=b"/")), {**FILE, "size": -1}),
    ("stat", lambda c: c.stat(agent.PathArgs(path=b"/")), {**FILE, "mode": 0o10000}),
    ("stat", lambda c: c.stat(agent.PathArgs(path=b"/")), {**FILE, "target": b"t" * 5000}),
    ("stat", lambda c: c.stat(agent.PathArgs(path=b"/")), {**FILE, "name": "text"}),
    ("execs", lambda c: c.execs(), {"execs": [{"id": "../x"}]}),
    ("execs", lambda c: c.execs(), {"execs": [{"id": EXEC}, {"id": EXEC}]}),
    ("execs", lambda c: c.execs(), {"execs": [{"id": new_exec_id()} for _ in range(1_600)]}),
    ("execs", lambda c: c.execs(), {"execs": [{"id": EXEC, "session": "a b"}]}),
    ("sessions", lambda c: c.sessions(), {"sessions": [{"name": "a"}, {"name": "a"}]}),
    ("sessions", lambda c: c.sessions(), {"sessions": [{"name": f"s{n}"} for n in range(65)]}),
    ("sessions", lambda c: c.sessions(), {"sessions": [{"name": "a", "busy": "b"}]}),
    ("session_open", lambda c: c.session_open(agent.SessionOpen(name="a")), {"name": "b"}),
    ("usage", lambda c: c.usage(), {"processes": -1}),
    ("usage", lambda c: c.usage(), {"processes": 2**64 - 1}),
]


@pytest.mark.parametrize(("op", "call", "reply"), REPLIES)
async def test_a_reply_outside_the_contract_closes_the_channel(
    op: str, call: Callable[[AgentClient], Awaitable[Any]], reply: Any
) -> None:
    scripted, client = await scripted_client()
    calling = asyncio.ensure_future(call(client))

    scripted.send(frame(FrameType.RES, await scripted.request(op), reply))

    with pytest.raises(ProtocolError):
        await calling
    assert isinstance(client.channel.failure, ProtocolError)


async def test_unary_streams_end_with_their_answer() -> None:
    scripted, client = await scripted_client()
    calling = asyncio.ensure_future(client.usage())
    stream = await scripted.request("usage")

    scripted.send(frame(FrameType.RES, stream, agent.UsageReply()) * 2)

    await calling
    assert isinstance(await client.channel.closed(), ProtocolError)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "exploded"},
        {"kind": "created", "path": b"/etc/passwd"},
        {"kind": "created", "path": b"a/../../b"},
        {"kind": "moved", "path": b"a", "source": b".."},
        {"kind": "created", "path": b"p" * 5000},
        {"kind": "created", "path": 5},
    ],
)
async def test_a_watch_event_outside_its_directory_closes_the_channel(event: Any) -> None:
    scripted, client = await scripted_client()
    opening = asyncio.ensure_future(client.watch(agent.WatchArgs(path=b"/w")))
    stream = await scripted.request("watch")
    scripted.send(frame(FrameType.RES, stream, {}) + frame(FrameType.EVENT, stream, event))

    watch = await opening
    with pytest.raises(ProtocolError):
        await watch.receive()


async def test_a_download_gives_no_more_than_was_asked_for() -> None:
    scripted, client = await scripted_client()
    opening = asyncio.ensure_future(client.read(agent.ReadArgs(path=b"/f", offset=5, length=3)))
    stream = await scripted.request("read")
    scripted.send(frame(FrameType.RES, stream, FILE) + data(stream, 1, 5, b"abcd"))

    download = await opening
    with pytest.raises(ProtocolError):
        await download.receive()


async def test_text_of_an_error_is_cut_and_made_printable() -> None:
    scripted, client = await scripted_client()
    calling = asyncio.ensure_future(client.stat(agent.PathArgs(path=b"/")))
    stream = await scripted.request("stat")
    hostile = agent.AgentError("DROP TABLE", "\x1b[2J\n" + "x" * 100_000, "rm -rf")

    scripted.send(frame(FrameType.ERR, stream, hostile))

    with pytest.raises(SandboxError) as error:
        await calling
    assert error.value.detail == {"code": "unknown"}
    assert len(str(error.value)) < 600
    assert str(error.value).isprintable()
    assert client.channel.failure is None
    client.close()


# ---- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hello",
    [
        agent.HelloReply(2, "v", "b"),
        agent.HelloReply(0, "v", "b"),
        agent.HelloReply(1, "v", ""),
        agent.HelloReply(1, "v" * 1000, "b"),
        agent.HelloReply(1, "v\n", "b"),
        agent.HelloReply(1, "v", "b", [agent.ExecState(id=EXEC), agent.ExecState(id=EXEC)]),
        agent.HelloReply(1, "v", "b", [agent.ExecState(id=new_exec_id()) for _ in range(1_600)]),
        agent.HelloReply(1, "v", "b", [agent.ExecState(id=EXEC, out=-1)]),
        agent.HelloReply(1, "v", "b", [], ["f"] * 100),
        {"generation": "1", "version": "v", "boot_id": "b"},
        frame(FrameType.RES, 0, {}),
        frame(FrameType.HELLO, 1, HELLO),
        frame(FrameType.HELLO, 0, b""),
        b"\xff" * 100,
    ],
)
async def test_a_hello_outside_the_contract_opens_nothing(hello: Any) -> None:
    with pytest.raises(ProtocolError):
        await scripted_client(hello=hello)


async def test_an_agent_without_a_common_generation_is_unsupported() -> None:
    refusal = frame(FrameType.ERR, 0, agent.AgentError("no_common_generation", "I speak 7 to 9"))

    with pytest.raises(UnsupportedError):
        await scripted_client(hello=refusal)


async def test_what_precedes_the_echo_is_skipped() -> None:
    _, client = await scripted_client(noise=b"DSEC" * 1000 + bytes(range(256)) * 100)

    assert client.hello == HELLO
    client.close()


async def test_noise_without_end_is_given_up() -> None:
    scripted = ScriptedAgent(noise=b"DSE" * PREAMBLE_SCAN_BYTES_MAX, echo=False)

    with pytest.raises(ProtocolError, match="preamble"):
        await AgentClient.connect(scripted.connect, sandbox="sbx", open_timeout_s=60)
    async with asyncio.timeout(60):
        await scripted.lost.wait()


@pytest.mark.parametrize("options", [{"echo": False}, {"hello": b""}, {"hello": b"\0\0"}])
async def test_an_agent_that_falls_silent_is_given_up(options: dict[str, Any]) -> None:
    scripted = ScriptedAgent(**options)

    with pytest.raises(DeadlineError):
        await AgentClient.connect(scripted.connect, sandbox="sbx", open_timeout_s=0.1)
    async with asyncio.timeout(60):
        await scripted.lost.wait()


async def test_an_echo_that_comes_byte_by_byte_is_found() -> None:
    class Slow(ScriptedAgent):
        def send(self, data: bytes) -> None:
            for index in range(len(data)):
                super().send(data[index : index + 1])

    slow = Slow(noise=b"DSECDSE")
    client = await AgentClient.connect(slow.connect, sandbox="sbx")

    assert client.hello == HELLO
    client.close()


# ---- silence and floods --------------------------------------------------------------------------


async def test_a_lost_connection_fails_everyone_at_once() -> None:
    scripted, client = await scripted_client()
    stream = await open_exec(scripted, client)
    waiting = [asyncio.ensure_future(client.usage()), asyncio.ensure_future(stream.receive())]
    await asyncio.sleep(0)
    scripted.send(data(S, 1, 0, b"never read")[:-3])
    assert scripted.transport is not None

    scripted.transport.close()

    async with asyncio.timeout(60):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError, UnavailableError]


async def test_an_unanswered_request_has_a_deadline_and_a_late_answer_does_no_harm() -> None:
    scripted, client = await scripted_client()
    slow = AgentClient(client.channel, timeout_s=0.05)

    with pytest.raises(DeadlineError):
        await slow.usage()
    with pytest.raises(DeadlineError):
        await slow.exec(agent.Exec(id=EXEC, argv=[b"x"]))

    first, second = await scripted.request("usage"), await scripted.request("exec")
    scripted.send(frame(FrameType.RES, first, agent.UsageReply()))
    scripted.send(frame(FrameType.RES, second, agent.ExecStarted(id=EXEC)) + data(second, 1, 0, b"x"))
    scripted.send(frame(FrameType.ERR, second, agent.AgentError("cancelled", "")))
    calling = asyncio.ensure_future(client.execs())
    scripted.send(frame(FrameType.RES, await scripted.request("execs"), {}))
    assert await calling == []
    client.close()


async def test_an_agent_that_does_not_read_is_noticed() -> None:
    scripted, client = await scripted_client()
    assert scripted.transport is not None
    scripted.transport.pause_reading()
    slow = AgentClient(client.channel, timeout_s=0.1)

    # A request waits for room, with its deadline; frames of control do not wait, and their sum is bounded.
    for _ in range(10):
        with pytest.raises(DeadlineError):
            await slow.reseed(bytes(500_000))
    credit = encode_frame(FrameType.CREDIT, S, bytes(1000))
    for _ in range(UNSENT_BYTES_MAX // len(credit) + 1):
        client.channel.write(credit)

    assert isinstance(client.channel.failure, ProtocolError)


async def test_frames_for_streams_that_are_over_are_bounded() -> None:
    scripted, client = await scripted_client()
    stream = await open_exec(scripted, client)
    scripted.send(frame(FrameType.END, S, agent.ExecEnded(EXITED)))
    await collect(stream)

    scripted.send(frame(FrameType.CREDIT, S, agent.Credit(1)) * 100)
    calling = asyncio.ensure_future(client.execs())
    scripted.send(frame(FrameType.RES, await scripted.request("execs"), {}))
    assert await calling == []

    scripted.send(frame(FrameType.CREDIT, S, agent.Credit(1)) * 10_000)
    async with asyncio.timeout(60):
        assert isinstance(await client.channel.closed(), ProtocolError)


async def test_a_flood_of_events_is_kept_in_bounds_and_said() -> None:
    scripted, client = await scripted_client()
    opening = asyncio.ensure_future(client.watch(agent.WatchArgs(path=b"/w")))
    stream = await scripted.request("watch")
    scripted.send(frame(FrameType.RES, stream, {}))
    watch = await opening
    event = frame(FrameType.EVENT, stream, agent.WatchEvent(kind="created", path=b"p" * 2000))

    tracemalloc.start()
    try:
        for _ in range(40_000):
            scripted.send(event)
            await scripted.delivered(below=1_000_000)
        scripted.send(frame(FrameType.END, stream, {}))
        await scripted.delivered()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    events = [event async for event in watch]
    assert peak < 30_000_000
    assert len(events) <= WATCH_EVENTS_QUEUED_MAX + 1
    assert [event.kind for event in events].count("overflow") == 1
    assert events[-1].kind == "overflow"
    client.close()


async def test_tiny_alternating_chunks_cost_little_and_none_is_lost() -> None:
    scripted, client = await scripted_client()
    stream = await open_exec(scripted, client)
    count = 30_000

    tracemalloc.start()
    try:
        for at in range(count):
            scripted.send(data(S, 1, at, b"%d" % (at % 10), 2 * at) + data(S, 2, at, b"x", 2 * at + 1))
            if at % 1000 == 0:
                await asyncio.sleep(0)
        scripted.send(frame(FrameType.END, S, agent.ExecEnded(EXITED)))
        await scripted.delivered()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    next_offset = {1: 0, 2: 0}
    received = {1: b"", 2: b""}
    async for chunk in stream:
        assert chunk.offset == next_offset[chunk.channel]
        next_offset[chunk.channel] += len(chunk.payload)
        received[chunk.channel] += chunk.payload
    assert peak < 6_000_000
    assert received == {1: (b"0123456789" * count)[:count], 2: b"x" * count}
    client.close()


async def test_a_flood_of_tiny_frames_lets_others_run() -> None:
    scripted, client = await scripted_client()
    await open_exec(scripted, client)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while not client.channel.failure:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    scripted.send(b"".join(data(S, 1, at, b"x") for at in range(10_000)))
    scripted.send(data(999, 1, 0, b"x"))
    async with asyncio.timeout(60):
        await watching

    assert turns >= 10_000 // FRAMES_PER_TURN


async def test_a_channel_that_closes_leaves_nothing_behind() -> None:
    async with no_leaks_async():
        scripted, client = await scripted_client()
        stream = await open_exec(scripted, client)
        scripted.send(ON_EXEC["a hole"])
        with pytest.raises(ProtocolError):
            await collect(stream)


async def test_a_file_error_does_not_close_the_channel() -> None:
    scripted, client = await scripted_client()
    calling = asyncio.ensure_future(client.stat(agent.PathArgs(path=b"/x")))
    stream = await scripted.request("stat")
    scripted.send(frame(FrameType.ERR, stream, agent.AgentError("file", "no", "EACCES")))

    with pytest.raises(FileError):
        await calling
    assert client.channel.failure is None
    client.close()
