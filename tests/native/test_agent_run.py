"""Commands in the real agent: how they start, what they see, how they end."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from dsec.wire.frames import FrameType, decode_data
from tests.native.agent_process import Agent, eventually, handed_agent, usable_copy
from tests.native.agent_wire import AgentWire, Refused


def test_output_status_and_usage_come_back(wire: AgentWire) -> None:
    output = wire.run("e1", shell="echo out; echo err >&2; exit 3")

    end = output.end["end"]
    assert (output.out, output.err) == (b"out\n", b"err\n")
    assert (end["status"], end["code"], end["signal"], end["cause"]) == ("exited", 3, None, None)
    assert (end["out_bytes"], end["err_bytes"]) == (4, 4)
    assert end["usage"]["wall_us"] > 0
    assert end["usage"]["max_rss_bytes"] > 0


def test_a_request_that_comes_while_a_command_is_being_started_is_answered(wire: AgentWire) -> None:
    for number in range(60):
        started = wire.open("exec", id=f"e{number}", argv=[b"sleep", b"600"])
        time.sleep(number / 100_000)  # the start takes some tenths of a millisecond
        asked = wire.open("usage")

        assert wire.result(asked)["processes"] >= 1
        wire.result(started)
        wire.call("kill", id=f"e{number}")
        wire.collect(started)


def test_a_command_that_dies_by_a_signal_says_which(wire: AgentWire) -> None:
    end = wire.run("e1", shell="kill -USR1 $$").end["end"]

    assert (end["status"], end["code"], end["signal"]) == ("signaled", None, signal.SIGUSR1)


def test_the_environment_is_what_the_protocol_says_and_nothing_more(wire: AgentWire) -> None:
    env = {b"A": b"1", b"PATH": b"/usr/bin", b"RAW": b"\xff"}

    output = wire.run("e1", "env", env=env, user="root")

    seen = dict(line.split(b"=", 1) for line in output.out.splitlines())
    assert {key: seen[key] for key in env} == env
    assert seen.keys() - env.keys() == {b"HOME", b"USER", b"LOGNAME", b"SHELL"}
    assert (seen[b"USER"], seen[b"HOME"]) == (b"root", b"/root")


def test_signals_descriptors_and_umask_are_clean(wire: AgentWire) -> None:
    status = wire.run("e1", "cat", "/proc/self/status").out.decode()
    signals = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Sig")}
    assert (signals["SigBlk"], signals["SigIgn"], signals["SigCgt"]) == ("0" * 16,) * 3

    # 3 is ls reading the directory.
    assert wire.run("e2", shell="ls /proc/self/fd; umask").out.split() == [b"0", b"1", b"2", b"3", b"0022"]


def test_the_working_directory_is_the_one_asked_for(wire: AgentWire, tmp_path: Path) -> None:
    assert wire.run("e1", "pwd", cwd=os.fsencode(tmp_path)).out == os.fsencode(tmp_path) + b"\n"


@pytest.mark.parametrize(
    ("args", "code", "errno"),
    [
        ({"argv": [b"no-such-program"]}, "command_not_found", "ENOENT"),
        ({"argv": [b"/no/such"]}, "command_not_found", "ENOENT"),
        ({"argv": [b"/etc/passwd/x"]}, "command_not_found", "ENOENT"),
        ({"argv": [b"/etc/passwd"]}, "not_executable", "EACCES"),
        ({"argv": [b"/tmp"]}, "not_executable", "EACCES"),
        ({"argv": [b"/bin/true"], "cwd": b"/no/such"}, "cwd_not_found", "ENOENT"),
        ({"argv": [b"/bin/true"], "cwd": b"/etc/passwd"}, "cwd_not_found", "ENOTDIR"),
        ({"argv": [b"/bin/true"], "user": "no-such-user"}, "user_not_found", None),
        ({"argv": [b"/bin/true"], "user": "0:no-such-group"}, "user_not_found", None),
        ({"shell": b"true", "session": "none"}, "session_not_found", None),
    ],
)
def test_what_does_not_start_says_why_and_leaves_nothing(
    agent: Agent, wire: AgentWire, args: dict[str, object], code: str, errno: str | None
) -> None:
    before = agent.descriptors()

    with pytest.raises(Refused) as refused:
        wire.call("exec", id="e1", **args)

    assert (refused.value.code, refused.value.errno) == (code, errno)
    assert wire.call("execs") == {"execs": []}
    assert agent.descriptors() == before


def test_limits_are_set_and_bad_ones_refused(wire: AgentWire) -> None:
    output = wire.run("e1", shell="ulimit -n; ulimit -c", rlimits={"nofile": 77, "core": 0})

    assert output.out == b"77\n0\n"


@pytest.mark.root
def test_a_limit_above_the_hosts_is_refused(agent_binary: Path, agent_directory: Path) -> None:
    with handed_agent(usable_copy(agent_binary, agent_directory), agent_directory, unprivileged=True) as agent:
        with pytest.raises(Refused) as refused:
            agent.connect().call("exec", id="e1", argv=[b"/bin/true"], rlimits={"nofile": 1 << 40})

    assert (refused.value.code, refused.value.errno) == ("rlimit_refused", "EPERM")


def test_stdin_goes_in_and_ends(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", argv=[b"sha256sum"], stdin=True)
    wire.result(stream)
    payload = os.urandom(700_000)

    credit = 256 << 10
    at = 0
    while at < len(payload):
        if credit == 0:
            credit += wire.body(wire.frame(stream), FrameType.CREDIT)["bytes"]
        piece = payload[at : at + min(credit, 50_000)]
        wire.data(stream, at, piece)
        at += len(piece)
        credit -= len(piece)
    wire.end(stream, at)

    out = b""
    while True:
        frame = wire.frame(stream)
        if frame.type == FrameType.DATA:
            out += decode_data(frame.body).payload
        elif frame.type == FrameType.END:
            break
    assert out.split()[0].decode() == hashlib.sha256(payload).hexdigest()


def test_stdin_bytes_that_were_taken_are_skipped_and_holes_refused(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", argv=[b"cat"], stdin=True)
    wire.result(stream)
    wire.data(stream, 0, b"abcd")
    wire.data(stream, 2, b"cdef")
    wire.data(stream, 99, b"hole")

    with pytest.raises(Refused) as refused:
        wire.collect(stream)

    assert refused.value.code == "stdin_gap"
    attached = wire.open("attach", id="e1")
    assert wire.result(attached)["stdin"] == 6
    wire.end(attached, 6)
    assert wire.collect(attached).out == b"abcdef"


def test_without_stdin_it_is_empty(wire: AgentWire) -> None:
    assert wire.run("e1", "wc", "-c").out == b"0\n"


def test_a_terminal_has_its_size_and_follows_resizes(wire: AgentWire) -> None:
    script = b"trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.01; done"
    stream = wire.open("exec", id="e1", shell=script, tty={"cols": 80, "rows": 24})
    wire.result(stream)
    assert wire.shown(stream, b"\n") == b"24 80\r\n"

    wire.call("resize", id="e1", cols=132, rows=50)

    assert wire.collect(stream).out == b"50 132\r\n"


def test_a_terminal_takes_input_and_its_end(wire: AgentWire) -> None:
    stream = wire.open("exec", id="e1", argv=[b"cat"], tty={"cols": 80, "rows": 24}, stdin=True)
    wire.result(stream)
    wire.data(stream, 0, b"no newline")
    wire.end(stream, 10)

    output = wire.collect(stream)

    assert output.out.replace(b"^D\b\b", b"") == b"no newline" * 2
    assert output.end["end"]["code"] == 0


def test_stderr_can_be_merged_in_order(wire: AgentWire) -> None:
    output = wire.run("e1", shell="echo 1; echo 2 >&2; echo 3", merge_stderr=True)

    assert (output.out, output.err) == (b"1\n2\n3\n", b"")


def test_the_same_id_attaches_and_never_runs_twice(wire: AgentWire, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    shell = f"echo x >> {mark}".encode()
    first = wire.open("exec", id="e1", shell=shell)
    assert not wire.result(first)["existing"]
    wire.collect(first)

    second = wire.open("exec", id="e1", shell=shell)
    assert wire.result(second)["existing"]
    wire.collect(second)

    assert mark.read_text() == "x\n"


def test_signals_reach_the_group_or_the_tree(wire: AgentWire) -> None:
    script = b"trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.01; done"
    stream = wire.open("exec", id="e1", shell=script)
    wire.result(stream)
    assert decode_data(wire.frame(stream).body).payload == b"ready\n"

    wire.call("signal", id="e1", signal=int(signal.SIGUSR1))

    output = wire.collect(stream)
    assert (output.out, output.end["end"]["code"]) == (b"got\n", 5)
    assert wire.call("signal", id="e1", signal=9) == {}


def test_ended_execs_stay_until_acknowledged(agent: Agent, wire: AgentWire) -> None:
    wire.run("e1", "true", ack=False)

    (state,) = agent.connect().hello["execs"]
    assert (state["id"], state["end"]["code"]) == ("e1", 0)
    again = agent.connect()
    assert again.call("exit_ack", id="e1") == {}
    assert again.call("exit_ack", id="e1") == {}
    assert again.call("execs") == {"execs": []}


def test_a_running_exec_cannot_be_acknowledged_away(wire: AgentWire) -> None:
    wire.result(wire.open("exec", id="e1", argv=[b"sleep", b"60"]))

    with pytest.raises(Refused) as refused:
        wire.call("exit_ack", id="e1")

    assert refused.value.code == "invalid"


def test_too_many_execs_are_refused_and_the_others_live(wire: AgentWire) -> None:
    codes = []
    streams = [wire.open("exec", id=f"e{number}", argv=[b"sleep", b"60"]) for number in range(515)]
    for stream in streams:
        try:
            wire.result(stream)
        except Refused as refused:
            codes.append(refused.code)

    assert codes == ["too_many_execs"] * 3
    assert len(wire.call("execs")["execs"]) == 512


def test_a_thousand_execs_leak_no_descriptor_and_no_memory(agent: Agent, wire: AgentWire) -> None:
    for number in range(50):
        wire.run(f"warm{number}", "/bin/true")
    descriptors, memory = agent.descriptors(), anonymous_kib(agent)

    for number in range(1_000):
        assert wire.run(f"e{number}", "/bin/true").end["end"]["code"] == 0

    eventually(lambda: agent.descriptors() == descriptors)
    assert anonymous_kib(agent) - memory < 64
    assert wire.call("execs") == {"execs": []}


def anonymous_kib(agent: Agent) -> int:
    match = re.match(r"(\d+) kB", agent.status("RssAnon"))
    assert match is not None
    return int(match[1])


def test_usage_counts_what_runs(wire: AgentWire) -> None:
    wire.result(wire.open("exec", id="e1", argv=[b"sleep", b"60"]))

    usage = wire.call("usage")

    assert (usage["execs"], usage["sessions"]) == (1, 0)
    assert usage["processes"] >= 2
    assert 0 < usage["disk_used_bytes"] < usage["disk_total_bytes"]
    assert 0 < usage["agent_rss_bytes"] < 8 << 20


def test_reseed_answers(wire: AgentWire) -> None:
    assert wire.call("reseed", seed=os.urandom(32)) == {}


def test_between_freeze_prepare_and_clock_no_timeout_fires(wire: AgentWire) -> None:
    """However long the host takes to say for how long it froze us (a loaded one took more than a second)."""
    assert wire.call("freeze_prepare") == {}

    held = wire.run("e1", "sleep", "1.5", timeout_s=0.1)
    other = wire.open("exec", id="e2", argv=[b"sleep", b"60"], timeout_s=0.1)
    wire.result(other)
    assert wire.call("clock", paused_s=0.0, wall_s=None) == {}
    late = wire.collect(other)

    assert (held.end["end"]["code"], held.end["end"]["cause"]) == (0, None)
    assert late.end["end"]["cause"] == "timed_out"
