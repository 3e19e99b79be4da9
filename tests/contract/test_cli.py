"""The `dsec` command, as a program, against the real service."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec.cli import lists, main
from tests.contract.sdk_service import RunningService

DSEC = [sys.executable, "-m", "dsec"]


@dataclass
class Command:
    service: RunningService

    def __call__(self, *arguments: str, status: int = 0, stdin: bytes = b"", **more: str) -> bytes:
        """stdout of a command that must end with `status`."""
        done = self.run(*arguments, stdin=stdin, **more)
        assert done.returncode == status, done.stderr.decode()
        return done.stdout

    def run(self, *arguments: str, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**self.service.environment, **more}
        return subprocess.run([*DSEC, *arguments], input=stdin, capture_output=True, env=environment, timeout=200)

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", status=status))


@pytest.fixture
def cli(service: RunningService) -> Command:
    return Command(service)


@pytest.fixture
def sb(service: RunningService) -> Iterator[dsec.Sandbox]:
    with dsec.Client(service.url) as client, client.create("base", backend="fake", name="box") as found:
        yield found


def test_a_sandbox_is_created_listed_and_removed(cli: Command) -> None:
    id = cli("create", "--backend", "fake", "--name", "one", "--label", "a=b").decode().strip()

    assert id in cli("ls").decode()
    assert cli("ls", "-q", "--label", "a=b").decode().split() == [id]
    assert cli.json("ls", "--name", "one")[0]["labels"] == {"a": "b"}

    cli("rm", "one")

    assert cli("ls", "-q").decode().split() == []
    assert cli.json("ls", "--all", "--label", "a=b")[0]["cause"] == "destroyed"


def test_create_answers_in_json(cli: Command) -> None:
    made = cli.json("create", "--backend", "fake", "--memory", "64MiB", "--ttl-idle", "60")

    assert (made["memory_bytes"], made["ttl_idle_s"]) == (64 << 20, 60)
    assert cli.json("rm", made["id"]) == {"removed": [made["id"]], "destroyed": [made["id"]]}


def test_sandboxes_are_paused_and_resumed(cli: Command, sb: dsec.Sandbox) -> None:
    assert f"{sb.id} is paused" in cli.run("pause", "box", sb.id).stderr.decode()
    assert cli.json("ls")[0]["state"] == "paused"
    assert [info["state"] for info in cli.json("resume", "box")] == ["running"]
    cli("pause", "--deep", "box", status=125)  # that is of virtual machines
    cli("pause", "nobody", status=125)


def test_what_a_sandbox_reaches_is_shown_and_replaced(cli: Command, sb: dsec.Sandbox) -> None:
    options = ("--backend", "fake", "--network", "proxied")
    id = cli("create", *options, "--egress", "packages.example", "--egress", "*.mirror.example:80").decode().strip()

    assert cli("egress", id) == b"packages.example\n*.mirror.example:80\n"
    assert cli("egress", id, "--allow", "A.example:443,80") == b"a.example\n"
    assert cli("egress", id, "--allow", "none") == b"nothing\n"
    assert cli("egress", id, "--public") == b"all that is public\n"
    assert cli.json("egress", id)["egress"] is None
    assert cli("egress", "box") == b"nothing: its network is none\n"
    cli("egress", "box", "--allow", "packages.example", status=125)
    cli("egress", id, "--allow", "packages.example", "--public", status=2)
    cli("create", "--backend", "fake", "--egress", "packages.example", status=2)
    cli("rm", id)


def test_a_command_has_its_output_and_status(cli: Command, sb: dsec.Sandbox) -> None:
    done = cli.run("exec", "-c", "box", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_an_environment_that_is_given_as_the_command_is_seen(cli: Command) -> None:
    done = cli.run("run", "--backend", "fake", "tools", "--", "true")

    assert done.returncode == 127
    assert b"dsec run -E tools -- true" in done.stderr


def test_wrong_usage_that_only_the_sdk_sees_is_wrong_usage(cli: Command, sb: dsec.Sandbox) -> None:
    assert cli.run("create", "--backend", "fake", "--memory", "5Q").returncode == 2
    assert cli.run("create", "--backend", "fake", "--cpu", "0").returncode == 2
    assert cli.run("exec", sb.id, "-w", "relative", "true").returncode == 2
    assert cli.run("exec", "nobody", "true").returncode == 125


def test_arguments_reach_the_command_as_they_are(cli: Command, sb: dsec.Sandbox) -> None:
    assert cli("exec", sb.id, "--", "echo", "-n", "--json", "a  b") == b"--json a  b"
    assert cli("exec", sb.id, "echo", "--help") == b"--help\n"


def test_bytes_pass_unchanged_both_ways(cli: Command, sb: dsec.Sandbox) -> None:
    data = os.urandom(600_000)

    assert cli("exec", "-i", "box", "cat", stdin=data) == data


def test_options_of_a_command_are_passed(cli: Command, sb: dsec.Sandbox) -> None:
    out = cli(
        "exec", "-w", "/tmp", "-e", "A=1", "-e", "B", "--secret", "S", "-c", "box", "pwd; echo $A $B $S", B="2", S="3"
    )

    assert out == b"/tmp\n1 2 3\n"


def test_a_command_answers_in_json(cli: Command, sb: dsec.Sandbox) -> None:
    told = cli.run("exec", "--json", "-c", "box", "echo out; exit 7")
    result = json.loads(told.stdout)

    assert told.returncode == 7
    assert (result["exit_code"], result["stdout"], result["timed_out"], result["truncated"]) == (
        7,
        "out\n",
        False,
        False,
    )


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--timeout", "0.2", "-c", "box", "sleep 60"], 124),
        (["-c", "box", "kill -9 $$"], 137),
        (["box", "no-such-program"], 127),
        (["nobody", "true"], 125),
        (["--no-such-option", "box", "true"], 2),
        ([], 2),
    ],
)
def test_the_status_says_what_happened(cli: Command, sb: dsec.Sandbox, arguments: list[str], status: int) -> None:
    done = cli.run("exec", *arguments)

    assert done.returncode == status
    assert done.stderr
    assert b"Traceback" not in done.stderr


def test_errors_end_with_what_to_try(cli: Command) -> None:
    done = cli.run("exec", "nobody", "true")

    assert done.stdout == b""
    assert done.stderr.decode().splitlines()[-1].startswith("  try: `dsec ls` shows the sandboxes that live")


def test_options_behind_the_sandbox_are_told_apart_from_commands(cli: Command, sb: dsec.Sandbox) -> None:
    wrong = cli.run("exec", "box", "-c", "echo hi")

    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert b"options come before" in wrong.stderr
    assert cli("exec", "box", "--", "echo", "-c") == b"-c\n"


def test_sizes_out_of_bounds_are_named_as_people_write_them(cli: Command) -> None:
    wrong = cli.run("create", "--backend", "fake", "--memory", "12")

    assert b"between 8.0 MiB and 16.0 TiB, and is 12 B" in wrong.stderr
    assert cli("--version").startswith(b"dsec 0")


def test_errors_answer_in_json_too(cli: Command) -> None:
    told = json.loads(cli("exec", "--json", "nobody", "true", status=125))

    assert (told["error"]["code"], told["error"]["outcome"]) == ("sandbox_not_found", "unchanged")


def test_a_service_that_is_away_is_an_error_in_words(cli: Command, tmp_path: Path) -> None:
    done = cli.run("ls", DSEC_URL=f"unix://{tmp_path}/none.sock")

    assert done.returncode == 125
    assert b"cannot be reached" in done.stderr
    assert b"Traceback" not in done.stderr


def test_run_makes_a_sandbox_and_takes_it_away(cli: Command) -> None:
    assert cli("run", "--backend", "fake", "--", "echo", "hi") == b"hi\n"
    assert cli("run", "--backend", "fake", "-i", "--", "cat", stdin=b"abc") == b"abc"
    assert cli.json("ls") == []

    cli("run", "--backend", "fake", "--", "false", status=1)
    kept = cli.run("run", "--backend", "fake", "--keep", "--", "true").stderr.decode().split()[-1]

    assert [s["id"] for s in cli.json("ls")] == [kept]
    cli("rm", "--all")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_ctrl_c_and_what_ends_programs_kill_the_command(
    cli: Command, service: RunningService, sb: dsec.Sandbox, number: int, status: int
) -> None:
    process = subprocess.Popen([*DSEC, "exec", "box", "sleep", "1000"], env=service.environment, stderr=subprocess.PIPE)
    _until(lambda: any(e.state == "running" for e in sb.execs()))

    process.send_signal(number)
    _, said = process.communicate(timeout=60)

    assert process.returncode == status
    assert b"Traceback" not in said
    _until(lambda: [e.cause for e in sb.execs()] == ["killed"])


def test_a_run_that_is_ended_takes_its_sandbox_away(cli: Command, service: RunningService) -> None:
    # As by timeout(1): what was made for this run alone is nobody's afterwards.
    command = [*DSEC, "run", "--backend", "fake", "--", "sleep", "1000"]
    process = subprocess.Popen(command, env=service.environment, stderr=subprocess.PIPE)
    with dsec.Client(service.url) as client:
        _until(lambda: [e for sandbox in client.list() for e in sandbox.execs() if e.state == "running"])

    process.terminate()
    process.communicate(timeout=60)

    assert process.returncode == 143
    assert cli.json("ls") == []


def test_who_ignores_hangups_goes_on(cli: Command, service: RunningService, sb: dsec.Sandbox) -> None:
    command = ["nohup", *DSEC, "exec", "-c", "box", "sleep 1; echo through"]
    process = subprocess.Popen(command, env=service.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _until(lambda: any(e.state == "running" for e in sb.execs()))

    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=60)

    assert (process.returncode, out) == (0, b"through\n")


def test_a_detached_command_is_found_in_the_logs(cli: Command, sb: dsec.Sandbox) -> None:
    exec_id = cli("exec", "-d", "-c", "box", "echo a; echo b >&2").decode().strip()

    followed = cli.run("logs", "box", exec_id, "-f")
    listed = cli("logs", "box").decode()
    lines = [json.loads(line) for line in cli("logs", "--json", "box", exec_id).splitlines()]

    assert (followed.stdout, followed.stderr) == (b"a\n", b"b\n")
    assert exec_id in listed
    assert sorted((line["stream"], line["text"]) for line in lines) == [("stderr", "b\n"), ("stdout", "a\n")]


def test_create_hands_its_switches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *error: object) -> None:
            return None

        async def create(self, environment: str, **options: Any) -> None:
            given.update(options)
            raise dsec.errors.CapacityError("full")

    monkeypatch.setattr(lists, "client", Client)
    arguments = ["create", "--privilege-gain", "--keepalive", "--start", "--ready-port", "80"]

    with pytest.raises(dsec.errors.CapacityError):
        main.app(arguments, standalone_mode=False)

    assert (given["privilege_gain"], given["keepalive"]) == (True, True)
    assert (given["start"], given["ready"]) == (True, {"port": 80, "shell": None})


def test_the_program_of_an_environment_is_started_and_shown_as_main(cli: Command) -> None:
    id = cli("create", "--backend", "fake", "--start", "--ready-shell", "echo up").decode().strip()

    shown = json.loads(cli("logs", "--json", id))
    assert [(e["name"], e["state"]) for e in shown] == [("main", "running")]
    assert cli("logs", id, "main") == b""
    cli("rm", id)


def test_a_session_keeps_its_state(cli: Command, sb: dsec.Sandbox) -> None:
    cli("exec", "--session", "s", "-c", "box", "cd /tmp; export X=1")

    assert cli("exec", "--session", "s", "-c", "box", "pwd; echo $X") == b"/tmp\n1\n"
    assert cli("exec", "--session", "s", "box", "echo", "a  b") == b"a  b\n"


def test_a_session_begins_as_its_first_command_says(cli: Command, sb: dsec.Sandbox) -> None:
    begun = cli(
        "exec", "--session", "s", "--cwd", "/tmp", "--env", "X=1", "--user", "nobody", "-c", "box", "pwd; echo $X"
    )

    assert begun == b"/tmp\n1\n"


@pytest.mark.parametrize("option", [("--secret", "A=b"), ("--stdin",), ("--detach",)])
def test_what_a_session_does_not_take_is_wrong_usage(cli: Command, sb: dsec.Sandbox, option: tuple[str, ...]) -> None:
    cli("exec", "--session", "s", *option, "box", "true", status=2)


def test_files_are_copied_both_ways(cli: Command, sb: dsec.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/sub/f").write_bytes(b"abc")

    cli("cp", str(tmp_path / "d"), "box:/w")
    cli("cp", "box:/w/sub/f", str(tmp_path / "back"))
    told = cli.json("cp", "box:/w", str(tmp_path / "tree"))

    assert (tmp_path / "back").read_bytes() == b"abc"
    assert (tmp_path / "tree/sub/f").read_bytes() == b"abc"
    assert told["skipped"] == []
    assert cli.run("cp", "a", "b").returncode == 2
    assert cli.run("cp", "--resume", "-", "box:/w/new", stdin=b"x").returncode == 2
    assert cli.run("cp", "box:/no", str(tmp_path)).returncode == 125


def test_a_file_comes_from_standard_input_and_goes_to_standard_output(cli: Command, sb: dsec.Sandbox) -> None:
    content = bytes(range(256)) * 4_000

    told = cli.run("cp", "-", "box:/new/f", stdin=content)

    assert (told.returncode, told.stdout) == (0, b"")
    assert sb.files.read_bytes("/new/f") == content
    assert cli("cp", "box:/new/f", "-") == content
    assert cli("cp", "box:/new/f", "-", "--json") == content
    assert b"directory" in cli.run("cp", "box:/new", "-").stderr
    assert cli.run("cp", "-", "box:/new/", stdin=b"x").returncode == 2
    assert cli.run("cp", "-", "box:/new", stdin=b"x").returncode == 125
    assert [entry.name for entry in sb.files.list("/new")] == ["f"]


def test_names_of_any_bytes_are_copied_and_shown(cli: Command, sb: dsec.Sandbox, tmp_path: Path) -> None:
    name = b"\xff\xfe line\nbreak"
    (tmp_path / os.fsdecode(name)).write_bytes(name)

    cli("cp", str(tmp_path / os.fsdecode(name)), "box:/w/")
    cli("cp", "box:/w/" + os.fsdecode(name), str(tmp_path / "one"))
    cli("cp", "box:/w", str(tmp_path / "tree"))

    assert (tmp_path / "one").read_bytes() == name
    assert (tmp_path / "tree" / os.fsdecode(name)).read_bytes() == name


def test_a_shell_is_a_terminal_and_ours_is_restored(cli: Command, service: RunningService, sb: dsec.Sandbox) -> None:
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*DSEC, "shell", "box", "cat"], env=service.environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    try:
        _until(lambda: any(e.state == "running" for e in sb.execs()))
        _until(lambda: not termios.tcgetattr(theirs)[3] & termios.ECHO)
        os.write(ours, b"hello\n")
        shown = b""
        while b"hello" not in shown:
            assert select.select([ours], [], [], 20)[0]
            shown += os.read(ours, 1_000)
        assert termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON | termios.ISIG) == 0
        sb.attach(next(e.id for e in sb.execs())).kill()
        assert process.wait(60) == 137
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_shell_without_a_terminal_says_what_to_use(cli: Command, sb: dsec.Sandbox) -> None:
    done = cli.run("shell", "box")

    assert done.returncode == 2
    assert b"exec -i" in done.stderr


def test_environments_and_tokens_are_managed(cli: Command) -> None:
    assert [e["name"] for e in cli.json("env", "ls")] == ["base"]
    assert "base" in cli("env", "ls").decode()
    assert cli.json("env", "show", "base")["kind"] == "fake"
    assert cli.run("env", "build", "x", "--debian").returncode == 125
    assert cli.run("env", "build", "x").returncode == 2

    token = cli("token", "create", "me", "--project", "/team").decode().strip()
    listed = cli.json("token", "ls")
    (mine,) = [t for t in listed if t["project"] == "/team"]
    assert token not in json.dumps(listed)
    cli("token", "rm", mine["id"])
    assert "revoked" in cli("token", "ls").decode()


def test_the_doctor_says_what_there_is(cli: Command) -> None:
    assert b"can make sandboxes: fake." in cli("doctor")
    assert cli.json("doctor")["substrates"] == {"fake": "ok"}


def test_what_a_sandbox_says_does_not_steer_the_terminal_in_lists(cli: Command, sb: dsec.Sandbox) -> None:
    sb.exec(["echo", "\x1b[31m"])

    assert b"\x1b" not in cli("logs", "box")


@pytest.mark.parametrize(
    "arguments", [["ls"], ["completion", "bash"], ["help"], ["--help"], ["doctor", "--help"]], ids=" ".join
)
def test_output_that_nobody_reads_is_told_from_a_failure(service: RunningService, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*DSEC, *arguments], env=service.environment, stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


def test_a_reader_that_goes_away_is_no_crash(cli: Command, service: RunningService, sb: dsec.Sandbox) -> None:
    process = subprocess.Popen(
        [*DSEC, "exec", "box", "yes"], env=service.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    process.wait(60)

    assert process.returncode == 141
    assert b"Traceback" not in said
    _until(lambda: all(e.state == "ended" for e in sb.execs()))


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_service_is_started_told_about_and_stopped(short_tmp: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    environment |= {
        "DSEC_RUN_DIR": str(short_tmp / "r"),
        "DSEC_STATE_DIR": str(short_tmp / "s"),
        "DSEC_SUBSTRATES": "fake",
    }

    def dsec_says(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*DSEC, *arguments], env=environment, capture_output=True, text=True, timeout=100, cwd=short_tmp
        )

    assert "--detach" in dsec_says("up", "--help").stdout
    try:
        assert dsec_says("up", "--detach").returncode == 0
        assert dsec_says("run", "--backend", "fake", "--", "echo", "hi").stdout == "hi\n"
        assert dsec_says("create", "--backend", "fake", "--name", "stays").returncode == 0
        mistaken = dsec_says("rm", "stays", "mistyped")
        assert "nothing was destroyed" in mistaken.stderr
        stopped = json.loads(dsec_says("down", "--json").stdout)
        assert (stopped["sandboxes"], stopped["destroyed"]) == (1, 0)
        config = short_tmp / "wrong.toml"
        config.write_text("[nod]\nx = 1")
        relative = dsec_says("up", "--detach", "--run-dir", "r2", "--state-dir", "s2")
        assert relative.returncode == 0, relative.stderr
        done = dsec_says("down", "--config", str(config), "--run-dir", "r2")
        assert done.returncode == 0
        assert "the configuration is wrong" in done.stderr
        assert "has ended" in done.stderr
    finally:
        assert dsec_says("down", "--run-dir", "r2").returncode == 0
        assert dsec_says("down").returncode == 0
    assert dsec_says("down").returncode == 0
