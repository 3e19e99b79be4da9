"""Ends of process trees in the real agent, with and without cgroups."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from dsec.wire.frames import decode_data
from tests.native.agent_process import Agent, cgroup2_root, eventually, handed_agent, is_alive
from tests.native.agent_wire import AgentWire

SEIZE, WALL = 0x4206, 0x40000000  # of ptrace(2) and waitpid(2)
# A daemon as they come: forked twice, a session of its own, deaf to TERM; it leaves its pid.
DAEMON = "(setsid sh -c 'trap \"\" TERM; echo $$ > {pid}; while :; do sleep 0.05; done' >/dev/null 2>&1 &) ; "


@contextmanager
def work_cgroup() -> Iterator[Path]:
    root = cgroup2_root()
    if root is None:
        pytest.skip("no cgroup2 on this host")
    sandbox = root / f"dsec-agent-test-{uuid4().hex[:8]}"
    (sandbox / "work").mkdir(parents=True)
    try:
        yield sandbox
    finally:
        # What lives on after its exec dies with the agent; its cgroup is the launcher's to remove, here ours.
        for left in [*(sandbox / "work").glob("*/"), sandbox / "work", sandbox]:
            eventually(lambda left=left: (left / "cgroup.procs").read_text() == "")
            left.rmdir()


@pytest.fixture(params=["walk", pytest.param("cgroup", marks=pytest.mark.root)])
def tree_agent(
    request: pytest.FixtureRequest, agent_binary: Path, agent_directory: Path
) -> Iterator[tuple[Agent, Path | None]]:
    if request.param == "walk":
        yield request.getfixturevalue("agent"), None
        return
    with work_cgroup() as sandbox, handed_agent(agent_binary, agent_directory, cgroup=sandbox) as agent:
        yield agent, sandbox / "work"


@pytest.fixture
def tree(tree_agent: tuple[Agent, Path | None]) -> AgentWire:
    return tree_agent[0].connect()


def written_pid(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def test_a_timeout_takes_daemons_along(tree: AgentWire, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with tree.time_held():
        stream = tree.open(
            "exec", id="e1", shell=(DAEMON.format(pid=pid_file) + "sleep 100").encode(), timeout_s=0.5, grace_s=0.3
        )
        tree.result(stream)
        daemon = written_pid(pid_file)

    end = tree.collect(stream).end["end"]

    assert (end["status"], end["cause"]) == ("signaled", "timed_out")
    assert end["usage"]["wall_us"] >= 500_000
    eventually(lambda: not is_alive(daemon))


def test_a_leader_that_ignores_term_gets_its_grace_and_no_more(tree: AgentWire) -> None:
    script = b"trap '' TERM; echo ready; while :; do sleep 0.05; done"
    with tree.time_held():
        stream = tree.open("exec", id="e1", shell=script, timeout_s=0.2, grace_s=0.4)
        tree.result(stream)
        assert tree.shown(stream, b"ready\n")

    end = tree.collect(stream).end["end"]

    assert (end["signal"], end["cause"]) == (9, "timed_out")
    assert end["usage"]["wall_us"] >= 600_000


def test_a_command_may_clean_up_in_its_grace(tree: AgentWire) -> None:
    script = b"trap 'sleep 0.2; echo cleaned; exit 7' TERM; echo ready; while :; do sleep 0.02; done"
    with tree.time_held():
        stream = tree.open("exec", id="e1", shell=script, timeout_s=0.2, grace_s=60.0)
        tree.result(stream)
        assert tree.shown(stream, b"ready\n")

    output = tree.collect(stream)

    assert (output.out, output.end["end"]["code"], output.end["end"]["cause"]) == (b"cleaned\n", 7, "timed_out")


def test_a_child_has_its_grace_when_the_leader_dies_at_once(tree: AgentWire, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"(trap 'sleep 0.2; echo done > {mark}; exit' TERM; echo ready; while :; do sleep 0.02; done) & wait"
    with tree.time_held():
        stream = tree.open("exec", id="e1", shell=child.encode(), timeout_s=0.3, grace_s=60.0)
        tree.result(stream)
        assert tree.shown(stream, b"ready\n")

    tree.collect(stream)

    assert mark.read_text() == "done\n"


def test_kill_ends_everything_at_once(tree: AgentWire, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stream = tree.open("exec", id="e1", shell=(DAEMON.format(pid=pid_file) + "sleep 100").encode())
    tree.result(stream)
    daemon = written_pid(pid_file)

    tree.call("kill", id="e1")

    end = tree.collect(stream).end["end"]
    assert (end["signal"], end["cause"]) == (9, "killed")
    eventually(lambda: not is_alive(daemon))


@pytest.mark.root
def test_a_command_whose_end_a_tracer_keeps_to_itself_ends_all_the_same(tree: AgentWire) -> None:
    """Who traces a process hears of its end first, and its parent not before that is taken."""
    stream = tree.open("exec", id="e1", argv=[b"sleep", b"600"])
    pid = tree.result(stream)["pid"]
    assert trace(SEIZE, pid) == 0

    tree.call("kill", id="e1")

    end = tree.collect(stream).end["end"]
    assert (end["status"], end["signal"], end["cause"]) == ("signaled", 9, "killed")
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    os.waitpid(pid, WALL)
    assert tree.run("e2", shell="echo goes on").out == b"goes on\n"


@pytest.mark.slow
@pytest.mark.root
def test_a_shell_whose_end_a_tracer_keeps_to_itself_ends_its_session(wire: AgentWire) -> None:
    pid = wire.call("session_open", name="main")["pid"]
    stream = wire.open("exec", id="e1", shell=b"while :; do :; done", session="main")
    wire.result(stream)
    assert trace(SEIZE, pid) == 0

    wire.call("kill", id="e1")

    end = wire.collect(stream).end["end"]
    assert (end["signal"], end["cause"], end["session_ended"]) == (9, "killed", True)
    os.waitpid(pid, WALL)
    assert wire.call("sessions") == {"sessions": []}


def trace(request: int, pid: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).ptrace(request, pid, None, None))


def test_a_fork_bomb_is_killed(tree: AgentWire) -> None:
    one = "(while :; do sleep 0.01; done) & i=$((i+1)); [ $i != 50 ] || echo half"
    bomb = f"i=0; while [ $i -lt 100 ]; do {one}; done; wait"
    stream = tree.open("exec", id="e1", shell=bomb.encode())
    tree.result(stream)
    assert tree.shown(stream, b"half\n")

    tree.call("kill", id="e1")

    assert tree.collect(stream).end["end"]["cause"] == "killed"


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_exec(tree: AgentWire, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    output = tree.run("e1", shell=f"echo before; (sleep 600 & echo $! > {pid_file}); exit 4")

    assert (output.out, output.end["end"]["code"]) == (b"before\n", 4)
    # It was not asked to end, so it lives on.
    assert is_alive(int(pid_file.read_text()))


def test_a_grandchild_that_keeps_writing_does_not_hold_the_exec(tree: AgentWire) -> None:
    stream = tree.open("exec", id="e1", shell=b"(while echo x; do sleep 0.05; done) & exit 0")
    tree.result(stream)

    output = tree.collect(stream, ack="e1")

    assert output.end["end"]["code"] == 0


def test_a_signal_to_the_tree_reaches_other_groups(tree: AgentWire) -> None:
    script = (
        b"setsid sh -c 'trap \"echo got; exit\" USR2; echo ready; while :; do sleep 0.02; done' & trap '' USR2; wait"
    )
    stream = tree.open("exec", id="e1", shell=script)
    tree.result(stream)
    assert decode_data(tree.frame(stream).body).payload == b"ready\n"

    tree.call("signal", id="e1", signal=12, tree=True)

    assert tree.collect(stream).out == b"got\n"


def test_a_pause_extends_a_timeout(tree: AgentWire) -> None:
    tree.call("freeze_prepare")
    stream = tree.open("exec", id="e1", shell=b"sleep 1; echo slept", timeout_s=0.5)
    tree.result(stream)
    tree.call("clock", paused_s=60.0)

    assert tree.collect(stream).out == b"slept\n"


def test_cgroups_of_ended_execs_go_when_they_are_empty(tree_agent: tuple[Agent, Path | None], tmp_path: Path) -> None:
    agent, work = tree_agent
    if work is None:
        pytest.skip("no cgroups in this mode")
    wire = agent.connect()
    wire.run("e1", "true")
    assert list(work.glob("*/")) == []

    wire.run("e2", shell=f"sleep 30 >/dev/null 2>&1 & echo $! > {tmp_path / 'pid'}")

    (left,) = work.glob("*/")
    pid = int((tmp_path / "pid").read_text())
    assert (left.name, (left / "cgroup.procs").read_text()) == ("e2", f"{pid}\n")
    stream = wire.open("exec", id="e3", shell=f"cat /proc/self/cgroup; kill {pid}".encode())
    wire.result(stream)
    assert b"/work/e3\n" in wire.collect(stream).out
    eventually(lambda: wire.call("usage") and not left.exists())


def test_shutdown_leaves_nothing(tree_agent: tuple[Agent, Path | None], tmp_path: Path) -> None:
    agent, _ = tree_agent
    wire = agent.connect()
    pid_file = tmp_path / "pid"
    wire.result(wire.open("exec", id="e1", shell=(DAEMON.format(pid=pid_file) + "trap '' TERM; sleep 100").encode()))
    session = wire.call("session_open", name="main")["pid"]
    daemon = written_pid(pid_file)

    assert wire.call("shutdown") == {}

    eventually(lambda: not is_alive(agent.pid))
    eventually(lambda: not is_alive(daemon) and not is_alive(session))
