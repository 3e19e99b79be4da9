"""`dsec top`, `logs`, `doctor`, completion and first-use errors, against the real service with the fake substrate."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec.cli import completion, console, main
from tests.contract.sdk_service import RunningService

DSEC = [sys.executable, "-m", "dsec"]


@pytest.fixture
def sb(service: RunningService) -> Iterator[dsec.Sandbox]:
    with dsec.Client(service.url) as client, client.create("base", backend="fake", name="box") as found:
        yield found


class Here:
    """Commands in this process: nothing of a start is tested here, and each would cost one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        main.app(list(arguments), standalone_mode=False)
        return self._capsys.readouterr().out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def error(self, *arguments: str) -> list[str]:
        """The lines that a command says of the error that it ends with."""
        with pytest.raises(dsec.DsecError) as caught:
            main.app(list(arguments), standalone_mode=False)
        console.fail(caught.value)
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def here(
    service: RunningService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Here]:
    monkeypatch.setenv("DSEC_URL", service.url)
    monkeypatch.delenv("DSEC_TOKEN", raising=False)
    monkeypatch.setattr(console.settings, "json", False)
    yield Here(capsys)
    console.settings.quiet = False


@pytest.fixture(autouse=True)
def _json_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program runs one command; several in one process must not inherit --json."""
    real = main.app.__call__

    def fresh(self: Any, *arguments: Any, **more: Any) -> Any:
        console.settings.json = False
        return real(*arguments, **more)

    monkeypatch.setattr(type(main.app), "__call__", fresh)


# ---- logs ----------------------------------------------------------------------------------------


def test_the_latest_command_is_shown_whole_or_by_its_tail(here: Here, sb: dsec.Sandbox) -> None:
    sb.exec("echo first")
    sb.exec("echo line 1; echo line 2; echo line 3; echo line 4; echo line 5")

    assert here("logs", "box", "latest") == "".join(f"line {i}\n" for i in range(1, 6))
    assert here("logs", "box", "--tail", "2") == "line 4\nline 5\n"
    assert here("logs", "box", "-f") == "".join(f"line {i}\n" for i in range(1, 6))
    pieces = [json.loads(line) for line in here("logs", "box", "--tail", "1", "--json").splitlines()]
    assert [(piece["offset"], piece["text"]) for piece in pieces] == [(28, "line 5\n")]


def test_only_commands_since_are_listed(here: Here, sb: dsec.Sandbox) -> None:
    sb.exec("echo now")

    assert len(here.json("logs", "box", "--since", "10m")) == 1
    assert here.json("logs", "box", "--since", "0s") == []
    assert "has no command on record that was started since" in here.error("logs", "box", "latest", "--since", "0s")[0]


def test_a_tail_is_followed_to_the_end_and_no_byte_comes_twice(service: RunningService, sb: dsec.Sandbox) -> None:
    process = sb.start("echo a; echo b; cat", stdin=True)
    _until(lambda: process.info().out_bytes == 4)
    with subprocess.Popen(
        [*DSEC, "logs", "box", process.id, "-f", "--tail", "1"],
        env=service.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as follower:
        assert follower.stdout is not None
        assert select.select([follower.stdout], [], [], 60)[0]
        assert os.read(follower.stdout.fileno(), 100) == b"b\n"
        process.write("got it\n")
        process.close_stdin()
        out, err = follower.communicate(timeout=60)

    assert (follower.returncode, out, err) == (0, b"got it\n", b"")


def test_ctrl_c_ends_only_the_looking(service: RunningService, sb: dsec.Sandbox) -> None:
    process = sb.start("echo begun; sleep 1000")
    with subprocess.Popen(
        [*DSEC, "logs", "box", "latest", "-f"], env=service.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as follower:
        assert follower.stdout is not None
        assert select.select([follower.stdout], [], [], 60)[0]
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=60)

    assert follower.returncode == 130
    assert b"Traceback" not in said
    assert process.info().state == "running"


def test_what_an_ended_sandbox_said_is_shown(here: Here, service: RunningService) -> None:
    with dsec.Client(service.url) as client:
        sandbox = client.create("base", backend="fake", name="past")
        sandbox.exec("echo said before; exit 3")
        sandbox.start("echo begun; sleep 1000")
        sandbox.destroy()

    for name in (sandbox.id, "past"):
        said, begun = here.json("logs", name)
        assert (said["exit_code"], begun["status"], begun["cause"]) == (3, "unknown", "killed")
        assert here("logs", name, said["id"]) == "said before\n"
        assert here("logs", name, "latest", "-f") == here("logs", name, "--tail", "1") == "begun\n"


def test_commands_of_an_ended_sandbox_that_are_not_on_record_are_said_to_be_gone(
    here: Here, service: RunningService
) -> None:
    with dsec.Client(service.url) as client:
        sandbox = client.create("base", backend="fake")
        sandbox.destroy()

    first, *_, last = here.error("logs", sandbox.id)
    assert "the sandbox is gone: destroyed" in first
    assert "made room" in last


# ---- top -----------------------------------------------------------------------------------------


def test_top_writes_a_table_once_where_there_is_no_terminal(here: Here, sb: dsec.Sandbox) -> None:
    sb.start("sleep 1000")

    heading, line = here("top").splitlines()

    assert heading.split() == [
        "SANDBOX",
        "NAME",
        "STATE",
        "CPU%",
        "MEMORY",
        "LIMIT",
        "DISK",
        "PIDS",
        "EXECS",
        "AGE",
        "PROJECT",
    ]  # fmt: skip
    assert line.split()[:3] == [sb.id, "box", "running"]


def test_top_answers_in_json(here: Here, sb: dsec.Sandbox) -> None:
    (row,) = here.json("top", "--once", "--sort", "memory")

    assert (row["id"], row["name"], row["state"], row["project"]) == (sb.id, "box", "running", "/")
    assert row["memory_limit_bytes"] == sb.info.memory_bytes
    assert set(row) >= {"cpu_percent", "memory_bytes", "disk_used_bytes", "pids", "execs_live", "age_s"}


def test_top_lives_on_a_terminal_takes_keys_and_restores_it(service: RunningService, sb: dsec.Sandbox) -> None:
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (4, 60))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*DSEC, "top", "--interval", "0.2"], env=service.environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    try:
        shown = _read_until(ours, b"by cpu")
        assert b"\x1b[?1049h" in shown
        os.write(ours, b"m")
        _read_until(ours, b"by memory")
        termios.tcsetwinsize(theirs, (10, 200))
        process.send_signal(signal.SIGWINCH)
        _read_until(ours, b"PROJECT")  # fits only now
        os.write(ours, b"q")
        shown = _read_until(ours, b"\x1b[?1049l")
        assert process.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


# ---- completion ----------------------------------------------------------------------------------


def test_sandboxes_environments_and_commands_are_completed(here: Here, sb: dsec.Sandbox) -> None:
    assert completion.complete_sandbox("") == ["box"]
    assert completion.complete_sandbox("sbx_") == [sb.id]
    assert completion.complete_path("b") == ["box:"]
    assert completion.complete_environment("b") == ["base"]
    exec_id = sb.start("sleep 1000").id

    class Context:
        params = {"sandbox": "box"}

    assert completion.complete_exec(Context(), "") == ["latest", exec_id]  # type: ignore[arg-type]


# ---- errors of a first use -----------------------------------------------------------------------


def test_a_name_nearly_right_is_offered(here: Here, sb: dsec.Sandbox) -> None:
    assert here.error("exec", "bxo", "true")[-1] == "  try: did you mean box?"


def test_a_name_of_the_past_says_what_became_of_it(here: Here, service: RunningService) -> None:
    with dsec.Client(service.url) as client:
        client.create("base", backend="fake", name="gone").destroy()

    first, *_, last = here.error("exec", "gone", "true")

    assert first.endswith("(gone) has ended: destroyed")
    assert "ls --all" in last


def test_two_of_one_name_are_told_apart_by_id(here: Here, service: RunningService) -> None:
    with dsec.Client(service.url) as client, client.create("base", backend="fake", name="one") as one:
        assert client.connect("one").id == one.id
        assert client.connect(one.id).id == one.id
        with pytest.raises(dsec.errors.SandboxNotFoundError):
            client.connect("two")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DSEC_URL": "nonsense"}, "write http://host:port"),
        ({"DSEC_URL": "unix:///nowhere/api.sock"}, "`dsec up` starts"),
        ({"DSEC_TOKEN": "a\nb"}, "line break"),
    ],
)
def test_where_the_service_is_not_is_told_with_what_to_do(
    here: Here, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert said in here.error("ls")[-1]


def test_a_wrong_token_says_how_to_get_a_right_one(
    here: Here, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_URL", f"http://127.0.0.1:{service.tcp_port}")
    monkeypatch.setenv("DSEC_TOKEN", "dsec_wrong")

    assert "token create" in here.error("ls")[-1]


def test_a_variable_with_a_letter_wrong_is_said_unless_quiet(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSEC_TOKNE", "x")

    main.app(["ls"], standalone_mode=False)
    assert capsys.readouterr().err == "warning: DSEC_TOKNE is no variable of dsec; did you mean DSEC_TOKEN?\n"
    main.app(["--quiet", "ls"], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_quiet_is_without_talk_but_with_errors(here: Here, service: RunningService) -> None:
    with dsec.Client(service.url) as client:
        id = client.create("base", backend="fake").id

    assert here("--quiet", "rm", id) == ""
    assert here.error("--quiet", "rm", "nobody")[0].startswith("error: ")


def test_what_starts_from_a_snapshot_starts_from_nothing_else(tmp_path: Path) -> None:
    done = _alone(tmp_path, "create", "base", "--snapshot", "built")

    assert done.returncode == 2
    assert "leave the environment out" in done.stderr


# ---- doctor --------------------------------------------------------------------------------------


def test_the_doctor_asks_the_service_that_answers(here: Here) -> None:
    report = here.json("doctor")

    assert report["node"]
    assert report["substrates"] == {"fake": "ok"}
    assert {finding["need"] for finding in report["findings"]} <= {"needed", "advised", "optional"}


def test_the_doctor_works_without_a_service_and_starts_none(tmp_path: Path) -> None:
    done = _alone(tmp_path, "doctor", "--json", DSEC_SUBSTRATES="fake")

    report = json.loads(done.stdout)
    found = {finding["what"]: finding for finding in report["findings"]}
    assert report["node"] == ""
    assert report["substrates"] == {"fake": "ok"}
    assert found["environments"]["hint"] == "dsec env build base --debian"
    lacking = [f for f in report["findings"] if f["need"] == "needed" and f["status"] == "missing"]
    assert done.returncode == (1 if lacking else 0)
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_of_machines_tells_of_them_alone(here: Here, tmp_path: Path) -> None:
    done = _alone(tmp_path, "vm", "doctor", "--json", DSEC_SUBSTRATES="fake,microvm")

    report = json.loads(done.stdout)
    found = {finding["what"] for finding in report["findings"]}
    assert set(report["substrates"]) == {"microvm"}
    assert done.returncode == (0 if report["substrates"]["microvm"] == "ok" else 1)
    assert {"KVM", "substrate microvm"} <= found
    assert not {what for what in found if "fake" in what or what in ("cgroups", "environments", "client")}
    assert _alone(tmp_path, "vm", "doctor", DSEC_SUBSTRATES="fake").returncode == 1


def test_the_doctor_finds_a_wrong_configuration(tmp_path: Path) -> None:
    done = _alone(tmp_path, "doctor", DSEC_LOG_LEVEL="loud", DSEC_TOKNE="x")

    assert done.returncode == 1
    assert "can make no sandboxes" in done.stdout
    assert "log level must be one of" in done.stdout
    assert "did you mean DSEC_TOKEN?" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_service_that_does_not_start_says_why_and_no_more(tmp_path: Path) -> None:
    done = _alone(tmp_path, "ls", DSEC_SUBSTRATES="containr")

    assert done.returncode == 125
    assert done.stderr.splitlines() == [
        "error: the service of this machine does not start: node.substrates (from DSEC_SUBSTRATES): there is no"
        " 'containr'",
        "  try: there are fncall, container, microvm, fullvm, fake",
    ]


def _alone(place: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine on which no service runs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    with tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as run:
        environment |= {"DSEC_RUN_DIR": f"{run}/r", "DSEC_STATE_DIR": str(place / "s"), **variables}
        return subprocess.run(
            [*DSEC, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
        )


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    shown = b""
    while wanted not in shown:
        assert select.select([descriptor], [], [], 60)[0], shown
        shown += os.read(descriptor, 10_000)
    return shown
