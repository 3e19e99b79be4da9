"""Opening a connection to the real agent, and breaking the protocol on it."""

from __future__ import annotations

import contextlib
import socket

import pytest

from dsec.wire.frames import Channel, FrameType, encode_data, encode_frame
from tests.native.agent_process import Agent, eventually
from tests.native.agent_wire import AgentWire, Refused


def test_hello_names_the_agent_and_what_it_knows(agent: Agent) -> None:
    first, second = agent.connect(), agent.connect()

    assert first.hello["generation"] == 1
    assert first.hello["boot_id"] == second.hello["boot_id"]
    assert len(first.hello["boot_id"]) == 32
    assert first.hello["execs"] == []


def test_noise_before_the_preamble_is_discarded(agent: Agent) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(agent.socket))
        preamble = b"DSEC" + bytes(range(16))
        for piece in (b"\x00\xffDSE" * 5_000, b"DS", preamble[2:7], preamble[7:]):
            raw.sendall(piece)
        raw.settimeout(60)

        echo = raw.recv(20, socket.MSG_WAITALL)

    assert echo == preamble


def test_the_newest_connection_wins(agent: Agent) -> None:
    old = agent.connect()
    new = agent.connect()

    with pytest.raises(ConnectionError):
        old.call("execs")
    assert new.call("execs") == {"execs": []}


def test_a_connection_without_preamble_disturbs_nobody(agent: Agent, wire: AgentWire) -> None:
    idlers = []
    for _ in range(40):
        idler = socket.socket(socket.AF_UNIX)
        idler.connect(str(agent.socket))
        idlers.append(idler)

    assert wire.call("execs") == {"execs": []}
    eventually(lambda: agent.descriptors() < 24)
    for idler in idlers:
        idler.close()


def test_generations_without_overlap_are_refused(agent: Agent) -> None:
    wire = agent.connect(hello=False)
    wire.send(FrameType.HELLO, 0, {"generation_min": 2, "generation_max": 9, "sandbox": "test"})

    body = wire.body(wire.frame(0), FrameType.ERR)

    assert body["code"] == "no_common_generation"
    with pytest.raises(ConnectionError):
        wire.frame(0)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xff\xff\xff\xff" + bytes(10), id="length"),
        pytest.param(encode_frame(3, 1, b"\x80"), id="res-from-the-host"),
        pytest.param(encode_frame(2, 2, b"\x81\xa2op\xa5execs"), id="even-stream"),
        pytest.param(encode_frame(2, 1, b"\x91\xa2op"), id="no-map"),
        pytest.param(encode_frame(2, 1, b"\x82\xa2op\xa5execs\xa1x\x01"), id="unknown-field"),
        pytest.param(encode_frame(1, 0, b"\x80"), id="second-hello"),
    ],
)
def test_a_violation_closes_the_channel_and_only_that(agent: Agent, raw: bytes) -> None:
    wire = agent.connect()
    wire.socket.sendall(raw)

    with pytest.raises(ConnectionError):
        wire.frame(99)
    assert agent.connect().call("execs") == {"execs": []}


def test_data_beyond_the_credit_closes_the_channel(agent: Agent) -> None:
    wire = agent.connect()
    stream = wire.open("exec", id="e1", argv=[b"/bin/sleep", b"60"], stdin=True)
    wire.result(stream)

    frames = [encode_data(stream, Channel.IN, offset, 0, bytes(1 << 16)) for offset in range(0, 3 << 18, 1 << 16)]
    with contextlib.suppress(ConnectionError):
        wire.socket.sendall(b"".join(frames))

    with pytest.raises(ConnectionError):
        wire.frame(99)
    (state,) = agent.connect().hello["execs"]
    assert (state["id"], state["end"]) == ("e1", None)
    # The credit, and once more what fits the pipe.
    assert state["stdin"] <= (1 << 18) + (1 << 16)


@pytest.mark.parametrize(
    ("op", "args", "code"),
    [
        ("no_such", {}, "unknown_op"),
        ("execs", {"x": 1}, "invalid"),
        ("exec", {}, "invalid"),
        ("exec", {"id": "e", "argv": [], "shell": None}, "invalid"),
        ("exec", {"id": "e", "argv": [b"a"], "shell": b"a"}, "invalid"),
        ("exec", {"id": "../e", "argv": [b"a"]}, "invalid"),
        ("exec", {"id": "e", "argv": [b"a\0b"]}, "invalid"),
        ("exec", {"id": "e", "argv": [b"/bin/true"], "env": {b"A=B": b""}}, "invalid"),
        ("exec", {"id": "e", "argv": [b"/bin/true"], "timeout_s": -1.0}, "invalid"),
        ("exec", {"id": "e", "argv": [b"/bin/true"], "timeout_s": float("nan")}, "invalid"),
        ("exec", {"id": "e", "argv": [b"/bin/true"], "cwd": b"relative"}, "invalid"),
        ("exec", {"id": "e", "argv": [b"/bin/true"], "rlimits": {"none": 1}}, "invalid"),
        ("exec", {"id": "e", "argv": [b"x" * 600_000]}, "argument_too_long"),
        ("attach", {"id": "e"}, "exec_not_found"),
        ("ack", {"id": "e", "out": 0, "err": 0}, "exec_not_found"),
        ("stat", {"path": b"relative"}, "invalid"),
        ("stat", {"path": b"/a\0b"}, "invalid"),
        ("list", {"path": b"/", "limit": 0}, "invalid"),
        ("connect", {}, "invalid"),
        ("connect", {"host": "example.invalid", "port": 1}, "invalid"),
        ("clock", {"paused_s": float("inf")}, "invalid"),
        ("session_close", {"name": "none"}, "session_not_found"),
        ("session_open", {"name": "a/b"}, "invalid"),
    ],
)
def test_bad_arguments_get_their_code_and_the_channel_lives(
    wire: AgentWire, op: str, args: dict[str, object], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        wire.call(op, **args)

    assert refused.value.code == code
    assert wire.call("execs") == {"execs": []}


def test_frames_for_a_stream_that_is_over_are_ignored(wire: AgentWire) -> None:
    wire.data(77, 0, b"late")
    wire.credit(77, 5)
    wire.end(77)
    wire.send(FrameType.ERR, 77, {"code": "cancelled", "message": ""})

    assert wire.call("execs") == {"execs": []}


def test_streams_are_bounded(wire: AgentWire) -> None:
    wire.result(wire.open("exec", id="e1", argv=[b"/bin/sleep", b"60"]))
    streams = [wire.open("watch", path=b"/tmp") for _ in range(17)]

    results = []
    for stream in streams:
        try:
            results.append(wire.result(stream))
        except Refused as refused:
            results.append({"code": refused.code})

    assert results == [{}] * 16 + [{"code": "too_many_watches"}]
