"""Output of execs in the real agent: kept until acknowledged, sent again from any offset, never lost or doubled."""

from __future__ import annotations

import hashlib
import time

import pytest

from dsec.core.limits import CREDIT_INITIAL_BYTES, EXEC_UNACKED_BYTES_MAX
from dsec.wire.frames import Channel, FrameType, decode_data
from tests.native.agent_process import Agent, eventually
from tests.native.agent_wire import AgentWire, Refused

SIZE = 5_000_000
NUMBERS = f"seq -f %09.0f {SIZE // 10}"


def test_what_is_not_acknowledged_comes_again_and_nothing_is_lost_or_doubled(agent: Agent) -> None:
    expected = b"".join(b"%09d\n" % number for number in range(1, SIZE // 10 + 1))
    wire = agent.connect()
    wire.result(wire.open("exec", id="e1", shell=NUMBERS.encode()))
    received = b""

    ended = False
    while not ended:
        # A connection that is lost in the middle of everything, again and again.
        wire = agent.connect()
        stream = wire.open("attach", id="e1", out=len(received), err=0)
        assert wire.result(stream)["out"] == len(received)
        budget = 700_000
        while budget > 0 and not ended:
            frame = wire.frame(stream)
            if frame.type == FrameType.END:
                ended = True
                continue
            data = decode_data(frame.body)
            assert data.offset == len(received)
            received += data.payload
            budget -= len(data.payload)
            wire.credit(stream, len(data.payload))
            wire.send(FrameType.REQ, wire_stream(wire), {"op": "ack", "args": ack(received)})
        wire.close()

    assert hashlib.sha256(received).digest() == hashlib.sha256(expected).digest()


def ack(received: bytes) -> dict[str, object]:
    # A little behind, as a recorder is that has not synced its last write.
    return {"id": "e1", "out": max(0, len(received) - 100_000), "err": 0}


def wire_stream(wire: AgentWire) -> int:
    wire._next_stream += 2
    return wire._next_stream - 2


def test_a_full_buffer_makes_the_process_wait_and_an_acknowledgement_lets_it_go(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", shell=b"head -c 3000000 /dev/zero; echo done >&2")
    wire.result(stream)
    eventually(lambda: wire.call("execs")["execs"][0]["out"] == EXEC_UNACKED_BYTES_MAX)
    time.sleep(0.1)
    (state,) = wire.call("execs")["execs"]
    assert (state["out"], state["err"], state["end"]) == (EXEC_UNACKED_BYTES_MAX, 0, None)

    output = wire.collect(stream, ack="e1")

    assert (len(output.out), output.err) == (3_000_000, b"done\n")


def test_without_credit_no_more_than_the_initial_credit_is_sent(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", shell=b"head -c 600000 /dev/zero")
    wire.result(stream)
    eventually(lambda: wire.call("execs")["execs"][0]["end"])

    sent = 0
    while sent < CREDIT_INITIAL_BYTES:
        sent += len(decode_data(wire.frame(stream).body).payload)

    assert sent == CREDIT_INITIAL_BYTES
    assert wire.none_within(stream, 0.3)
    wire.credit(stream, 1_000_000)
    assert len(wire.collect(stream).out) == 600_000 - CREDIT_INITIAL_BYTES


def test_sequence_numbers_order_the_chunks_of_both_channels(wire: AgentWire) -> None:
    script = b"for i in 1 2 3; do echo o$i; read on; echo e$i >&2; read on; done"
    stream = wire.open("exec", id="e1", shell=script, stdin=True)
    wire.result(stream)
    chunks = []
    while len(chunks) < 6:  # each waits until the one before it has come
        frame = wire.frame(stream)
        if frame.type == FrameType.DATA:
            chunks.append(decode_data(frame.body))
            wire.data(stream, len(chunks) - 1, b"\n")
    wire.end(stream, 6)

    assert [chunk.payload for chunk in chunks] == [b"o1\n", b"e1\n", b"o2\n", b"e2\n", b"o3\n", b"e3\n"]
    sequences = [chunk.sequence for chunk in chunks]
    assert sequences == sorted(set(sequences))

    again = wire.open("attach", id="e1", out=1, err=3)
    wire.result(again)
    chunks = wire.collect(again).chunks
    assert [(c.channel, c.offset, c.payload) for c in chunks] == [
        (Channel.OUT, 1, b"1\n"),
        (Channel.OUT, 3, b"o2\n"),
        (Channel.ERR, 3, b"e2\n"),
        (Channel.OUT, 6, b"o3\n"),
        (Channel.ERR, 6, b"e3\n"),
    ]
    assert chunks[0].sequence == sequences[0]


def test_an_attach_to_acknowledged_output_says_where_it_begins(wire: AgentWire) -> None:
    wire.run("e1", shell="printf 0123456789", ack=False)
    wire.call("ack", id="e1", out=4, err=99)

    stream = wire.open("attach", id="e1", out=1, err=0)

    assert (wire.result(stream)["out"], wire.collect(stream).out) == (4, b"456789")
    wire.call("ack", id="e1", out=10**12, err=0)
    stream = wire.open("attach", id="e1")
    assert (wire.result(stream)["out"], wire.collect(stream).out) == (10, b"")


def test_a_newer_stream_supersedes_and_detach_leaves_the_exec_running(wire: AgentWire) -> None:
    first = wire.open("exec", id="e1", argv=[b"cat"], stdin=True)
    wire.result(first)
    second = wire.open("attach", id="e1")
    wire.result(second)
    with pytest.raises(Refused) as refused:
        wire.collect(first)
    assert refused.value.code == "superseded"

    assert wire.call("detach", id="e1") == {}
    with pytest.raises(Refused) as refused:
        wire.collect(second)

    assert refused.value.code == "detached"
    third = wire.open("attach", id="e1")
    wire.result(third)
    wire.end(third)
    assert wire.collect(third).end["end"]["code"] == 0


def test_cancelling_an_exec_stream_detaches_it(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", argv=[b"cat"], stdin=True)
    wire.result(stream)
    wire.send(FrameType.ERR, stream, {"code": "cancelled", "message": ""})

    with pytest.raises(Refused) as refused:
        wire.collect(stream)

    assert refused.value.code == "cancelled"
    assert wire.call("execs")["execs"][0]["end"] is None


def test_output_over_the_budget_kills_the_exec(wire: AgentWire) -> None:
    output = wire.run("e1", shell="yes", output_bytes_max=100_000)

    end = output.end["end"]
    assert (end["status"], end["signal"], end["cause"]) == ("signaled", 9, "output_budget")
    assert 100_000 < len(output.out) <= 100_000 + (64 << 10) * 4
    assert end["out_bytes"] == len(output.out)


def test_a_flood_can_be_killed_while_nobody_reads(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", shell=b"yes")
    wire.result(stream)
    eventually(lambda: wire.call("execs")["execs"][0]["out"] == EXEC_UNACKED_BYTES_MAX)

    wire.call("kill", id="e1")

    end = wire.collect(stream, ack="e1").end["end"]
    assert (end["signal"], end["cause"]) == (9, "killed")


def test_one_byte_writes_do_not_outgrow_the_bound(agent: Agent, wire: AgentWire) -> None:
    # Each byte of one channel is followed by one of the other, so that no two can share a chunk.
    code = b"import os\nwhile True:\n os.write(1, b'o'); os.write(2, b'e')"
    stream = wire.open("exec", id="e1", argv=[b"python3", b"-c", code])
    wire.result(stream)

    before = -1
    while (state := wire.call("execs")["execs"][0])["out"] != before:
        before = state["out"]
        time.sleep(0.2)

    assert int(agent.status("RssAnon").split()[0]) < 3_000
    wire.call("kill", id="e1")


def test_a_thousand_kept_execs_hold_a_bounded_amount(agent: Agent, wire: AgentWire) -> None:
    for number in range(100):
        stream = wire.open("exec", id=f"e{number}", shell=b"head -c 1000000 /dev/zero")
        wire.result(stream)

    def total() -> int:
        return sum(state["out"] for state in wire.call("execs")["execs"])

    eventually(lambda: total() >= 64 << 20)
    before = -1
    while before != (before := total()):  # until nothing moves any more
        time.sleep(0.3)

    assert before < (64 << 20) + 100 * (128 << 10)
    for number in range(100):
        attached = wire.open("attach", id=f"e{number}")
        wire.result(attached)
        assert len(wire.collect(attached, ack=f"e{number}").out) == 1_000_000
