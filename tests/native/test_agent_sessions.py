"""Sessions in the real agent, in bash and in dash."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.native.agent_process import Agent, eventually, is_alive
from tests.native.agent_wire import AgentWire, Refused

SHELLS = [b"/bin/bash", b"/bin/dash"]


@pytest.fixture(params=SHELLS, ids=["bash", "dash"])
def session(request: pytest.FixtureRequest, wire: AgentWire) -> Session:
    if not Path(request.param.decode()).exists():
        pytest.skip("no such shell here")
    args = {"shell": request.param, "cwd": b"/usr", "env": {b"GIVEN": b"yes"}}
    return Session(wire, wire.call("session_open", name="main", **args)["pid"])


class Session:
    def __init__(self, wire: AgentWire, pid: int) -> None:
        self.wire = wire
        self.pid = pid
        self.count = 0

    def run(self, text: str, **args: object) -> tuple[bytes, bytes, dict[str, object]]:
        self.count += 1
        output = self.wire.run(f"s{self.count}", shell=text, session="main", **args)
        return output.out, output.err, output.end["end"]

    def begin(self, text: str, program: str, **args: object) -> int:
        """The stream of a command, whose shell has started this program by now."""
        stream = self.wire.open("exec", id="long", shell=text.encode(), session="main", **args)
        self.wire.result(stream)
        eventually(lambda: program in self._children())
        return stream

    def _children(self) -> list[str]:
        names = []
        for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with suppress(OSError):
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        return names


def test_directory_variables_functions_and_descriptors_persist(session: Session) -> None:
    assert session.run("pwd; echo $GIVEN")[0] == b"/usr\nyes\n"
    session.run("cd /etc; x='a  b'; f() { echo \"f $1\"; }; export Y=exported; exec 5</etc/hostname")

    out = session.run('pwd; echo "$x"; f 1; env | grep ^Y=; cat <&5 >/dev/null && echo fd')[0]

    assert out == b"/etc\na  b\nf 1\nY=exported\nfd\n"


def test_status_and_streams_are_the_commands_own(session: Session) -> None:
    out, err, end = session.run("echo out; echo err >&2; (exit 9)")

    assert (out, err, end["code"], end["session_ended"]) == (b"out\n", b"err\n", 9, False)
    assert session.run("echo $?; echo next")[0].endswith(b"next\n")


@pytest.mark.parametrize("text", ["if then", "echo 'open", "echo $(", "}", "case x in"])
def test_a_syntax_error_does_not_end_the_session(session: Session, text: str) -> None:
    session.run("kept=1")

    _, err, end = session.run(text)

    assert end["code"] != 0
    assert err
    assert session.run("echo $kept")[0] == b"1\n"


def test_text_with_everything_in_it_arrives(session: Session) -> None:
    text = "cat <<'E'\n'\"\\$`!\t\xe9\nE\nprintf '%s' \"it's\"\n# comment"

    assert session.run(text)[0] == "'\"\\$`!\t\xe9\nit's".encode()


def test_a_long_command_arrives(session: Session) -> None:
    assert session.run("echo " + "x" * 200_000 + " | wc -c")[0] == b"200001\n"


def test_commands_do_not_see_the_sessions_descriptors(session: Session) -> None:
    out, _, _ = session.run("ls /proc/self/fd; cat; sh -c 'echo forged >&9'; echo end")

    assert out.split() == [b"0", b"1", b"2", b"3", b"end"]


def test_exit_ends_the_session(session: Session) -> None:
    out, _, end = session.run("echo bye; exit 6")

    assert (out, end["code"], end["session_ended"]) == (b"bye\n", 6, True)
    with pytest.raises(Refused) as refused:
        session.run("true")
    assert refused.value.code == "session_not_found"


def test_replacing_the_shell_ends_the_session_with_its_status(session: Session) -> None:
    out, _, end = session.run("exec sh -c 'echo replaced; exit 3'")

    assert (out, end["code"], end["session_ended"]) == (b"replaced\n", 3, True)


def test_one_command_at_a_time(session: Session) -> None:
    wire = session.wire
    running = session.begin("sleep 600", "sleep")

    with pytest.raises(Refused) as refused:
        session.run("true")

    assert refused.value.code == "session_busy"
    assert wire.call("sessions")["sessions"][0]["busy"] == "long"
    wire.call("kill", id="long")
    end = wire.collect(running).end["end"]
    assert (end["cause"], end["session_ended"]) == ("killed", False)
    assert session.run("echo alive")[0] == b"alive\n"


def test_a_timeout_kills_the_command_and_keeps_the_session(session: Session) -> None:
    session.run("kept=1")

    with session.wire.time_held():
        running = session.begin("sleep 600", "sleep", timeout_s=0.2, grace_s=0.2)
    end = session.wire.collect(running).end["end"]

    assert (end["cause"], end["session_ended"]) == ("timed_out", False)
    assert session.run("echo $kept")[0] == b"1\n"


def test_a_shell_that_does_not_answer_is_killed(session: Session) -> None:
    end = session.run("while :; do :; done", timeout_s=0.2, grace_s=0.1)[2]

    assert (end["cause"], end["signal"], end["session_ended"]) == ("timed_out", 9, True)


def test_a_signal_goes_to_the_command_not_to_the_shell(session: Session) -> None:
    running = session.begin("sleep 600; echo $?", "sleep")

    session.wire.call("signal", id="long", signal=int(signal.SIGINT))

    assert session.wire.collect(running).out == b"130\n"


def test_output_of_the_background_does_not_reach_the_next_command(session: Session, tmp_path: Path) -> None:
    session.run(f"(sleep 0.3; echo late; : > {tmp_path}/said) &")
    eventually((tmp_path / "said").exists)

    assert session.run("echo now")[0] == b"now\n"


def test_merged_streams_keep_their_order(session: Session) -> None:
    out, err, _ = session.run("echo 1; echo 2 >&2; echo 3", merge_stderr=True)

    assert (out, err) == (b"1\n2\n3\n", b"")


def test_output_beyond_the_pipe_is_whole(session: Session) -> None:
    assert len(session.run("head -c 3000000 /dev/zero")[0]) == 3_000_000


def test_what_a_session_does_not_take_is_refused(session: Session) -> None:
    for args in ({"stdin": True}, {"cwd": b"/"}, {"env": {b"A": b"b"}}, {"user": "root"}, {"rlimits": {"core": 0}}):
        with pytest.raises(Refused) as refused:
            session.run("true", **args)
        assert refused.value.code == "invalid"


def test_closing_kills_what_runs_in_it(session: Session, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    session.run(f"sleep 60 & echo $! > {pid_file}")
    pid = int(pid_file.read_text())

    session.wire.call("session_close", name="main")

    eventually(lambda: not is_alive(pid))
    eventually(lambda: session.wire.call("sessions") == {"sessions": []})


def test_opening_twice_is_one_session(agent: Agent) -> None:
    first = agent.connect().call("session_open", name="main")
    again = agent.connect().call("session_open", name="main")

    assert (first["existing"], again["existing"], again["pid"]) == (False, True, first["pid"])
