"""The blocking SDK against the real service; what only it has: threads, Ctrl-C, forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dsec
import libdsec
from dsec import errors
from dsec.backends.fake.transfers import ECHO_PORT
from tests.contract.sdk_service import RunningService


@pytest.fixture
def client(service: RunningService) -> Iterator[dsec.Client]:
    with dsec.Client(service.url) as found:
        yield found


@pytest.fixture
def sb(client: dsec.Client) -> Iterator[dsec.Sandbox]:
    with client.create("base", backend="fake") as found:
        yield found


def test_a_sandbox_is_used_and_destroyed_at_the_end(client: dsec.Client) -> None:
    with dsec.Sandbox.create("base", backend="fake", client=client, labels={"with": "1"}) as sandbox:
        assert sandbox.exec("echo hi").stdout == "hi\n"
        assert [s.id for s in client.list(labels={"with": "1"})] == [sandbox.id]
        assert sandbox.id in repr(sandbox)

    assert client.get(sandbox.id).info.state == "gone"
    with pytest.raises(errors.GoneError):
        dsec.Sandbox.connect(sandbox.id, client=client)


def test_commands_of_an_ended_sandbox_are_read_for_a_day(client: dsec.Client) -> None:
    with client.create("base", backend="fake") as sandbox:
        process = sandbox.start("echo said; echo problem >&2; exit 3")
        process.wait()

    past = client.get(sandbox.id)
    (info,) = past.execs()
    result = past.attach(info.id).wait()

    assert (info.id, info.exit_code) == (process.id, 3)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "said\n", "problem\n")
    with pytest.raises(errors.GoneError):
        past.exec("true")


def test_callbacks_run_in_the_calling_thread(sb: dsec.Sandbox) -> None:
    threads: list[threading.Thread] = []
    heard: list[str] = []

    def out(text: str) -> None:
        threads.append(threading.current_thread())
        heard.append(text)

    result = sb.exec("echo a; echo b >&2", on_stdout=out, on_stderr=out)

    assert set(threads) == {threading.current_thread()}
    assert sorted(heard) == ["a\n", "b\n"]
    assert (result.stdout, result.stderr) == ("a\n", "b\n")


def test_a_callback_may_use_the_sandbox(sb: dsec.Sandbox) -> None:
    inner: list[str] = []

    sb.exec("echo a", on_stdout=lambda text: inner.append(sb.exec(["echo", text.strip() * 2]).stdout))

    assert inner == ["aa\n"]


def test_a_callback_that_raises_kills_the_command(sb: dsec.Sandbox) -> None:
    def bad(text: str) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        sb.exec("echo a; sleep 1000", on_stdout=bad)

    _until(lambda: [e.cause for e in sb.execs()] == ["killed"])


def test_processes_sessions_files_and_ports_are_blocking_ones(sb: dsec.Sandbox) -> None:
    process = sb.start(["cat"], stdin=True)
    process.write("x")
    process.close_stdin()
    assert [chunk.text for chunk in process] == ["x"]
    assert process.wait().ok
    assert isinstance(sb.attach(process.id), dsec.Process)

    with sb.session("main") as shell:
        shell.exec("cd /tmp")
        assert shell.exec("pwd").stdout == "/tmp\n"

    sb.files.write("/f", "abc")
    assert b"".join(sb.files.stream("/f")) == b"abc"
    with sb.files.watch("/tmp") as watch:
        sb.files.write("/tmp/new", "x")
        assert next(iter(watch)).path == "new"

    with sb.connect_port(ECHO_PORT) as connection:
        connection.sendall(b"ping")
        assert connection.recv(4) == b"ping"
        connection.shutdown(1)
        assert list(connection) == []

    with sb.pty(["cat"]) as tty:
        tty.write("hello\n")
        assert tty.read().startswith(b"hello")


def test_leaving_an_iteration_early_is_fine(sb: dsec.Sandbox) -> None:
    process = sb.start("yes")

    for _ in process:
        break
    process.kill()

    assert process.wait().cause == "killed"


def test_many_are_made_with_a_result_each(client: dsec.Client) -> None:
    made = dsec.create_many(5, "base", backend="fake", client=client)
    failed = dsec.create_many(2, "base", backend="microvm", client=client)
    streamed = list(client.iter_create(2, "base", backend="fake"))

    assert all(isinstance(item, dsec.Sandbox) for item in made)
    assert all(isinstance(item, errors.UnsupportedError) for item in failed)
    assert all(isinstance(item.sandbox, dsec.Sandbox) and item.error is None for item in streamed)
    for item in [*made, *(s.sandbox for s in streamed)]:
        assert isinstance(item, dsec.Sandbox)
        item.destroy()


def test_many_threads_use_one_client(client: dsec.Client) -> None:
    def one(n: int) -> str:
        with client.create("base", backend="fake") as sandbox:
            return sandbox.exec(f"echo {n}").stdout

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(40))) == [f"{n}\n" for n in range(40)]


@pytest.mark.parametrize("live", [False, True])
def test_ctrl_c_kills_the_command_and_the_program_ends(
    service: RunningService, client: dsec.Client, sb: dsec.Sandbox, live: bool
) -> None:
    code = (
        f"import dsec\nsb = dsec.Sandbox.connect({sb.id!r})\n"
        f"sb.exec('sleep 1000', on_stdout={'print' if live else 'None'})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=service.environment, stderr=subprocess.PIPE, text=True)
    _until(lambda: [e for e in sb.execs() if e.state == "running"])

    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in said
    _until(lambda: [(e.state, e.cause) for e in sb.execs()] == [("ended", "killed")])


def test_a_forked_child_has_connections_of_its_own(service: RunningService, sb: dsec.Sandbox) -> None:
    code = f"""
import os, dsec
sb = dsec.Sandbox.connect({sb.id!r})
assert sb.exec('echo parent').stdout == 'parent\\n'
child = os.fork()
if child == 0:
    os._exit(0 if sb.exec('echo child').stdout == 'child\\n' else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert sb.exec('echo again').stdout == 'again\\n'
print('fine')
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=service.environment, capture_output=True, text=True, timeout=60
    )

    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_a_program_that_closes_nothing_ends_without_warnings(service: RunningService) -> None:
    code = """
import asyncio, dsec
sb = dsec.Sandbox.create(backend='fake')
sb.exec('true')
async def main():
    other = await dsec.AsyncSandbox.connect(sb.id)
    assert (await other.exec('echo x')).stdout == 'x\\n'
    await other.destroy()
asyncio.run(main())
asyncio.run(dsec.AsyncSandbox.list())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=service.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- the service is started when it does not run ----


def _own_environment(directory: Path, substrates: str = "fake") -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
    return {
        **environment,
        "DSEC_RUN_DIR": str(directory / "r"),
        "DSEC_STATE_DIR": str(directory / "s"),
        "DSEC_SUBSTRATES": substrates,
    }


def test_many_programs_at_once_start_one_service(short_tmp: Path) -> None:
    environment = _own_environment(short_tmp)
    code = "import dsec; print(dsec.Client().health().pid)"
    try:
        several = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        pids = {process.communicate(timeout=100)[0].strip() for process in several}
    finally:
        subprocess.run([sys.executable, "-m", "dsec.serve", "down"], env=environment, check=True, timeout=60)

    assert len(pids) == 1
    assert pids.pop().isdigit()


def test_a_service_that_was_stopped_is_not_started_again_by_who_used_it(short_tmp: Path) -> None:
    environment = _own_environment(short_tmp)
    code = """
import subprocess, sys, dsec, dsec.sdk.retry
dsec.sdk.retry.ATTEMPTS_KNOWN_MAX = 8  # not as long as one that is restarted takes
client = dsec.Client()
client.health()
subprocess.run([sys.executable, "-m", "dsec.serve", "down"], check=True, stderr=subprocess.DEVNULL)
try:
    client.list()
except dsec.errors.UnavailableError as error:
    print("down", error.hint)
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
        )
    finally:
        subprocess.run([sys.executable, "-m", "dsec.serve", "down"], env=environment, timeout=60)

    assert done.stdout.startswith("down"), done.stderr
    assert "dsec up" in done.stdout


def test_a_service_that_does_not_start_says_why(short_tmp: Path) -> None:
    environment = _own_environment(short_tmp, substrates="nonsense")
    code = "import dsec\ntry: dsec.Client().health()\nexcept dsec.errors.HostError as e: print(e)"

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)

    assert "nonsense" in done.stdout
    assert "DSEC_SUBSTRATES" in done.stdout


# ---- the published names ----


async def test_the_published_client_works_as_published(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = libdsec.DSecClient(url=service.url)
    await client.open()
    args = libdsec.DSecContainerRunArgs(
        container_image="base",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": False},
        init_user="root",
        backend="fake",
    )

    sandbox = await client.run_container(args, timeout=120)
    done = await sandbox.run_shell("echo hi; echo err >&2; exit 3")
    output, status = done

    assert (output, status) == (done.output, done.status) == ("hi\nerr\n", 3)
    assert sandbox.sandbox.info.memory_bytes == 4096 << 20
    assert sandbox.sandbox.info.ttl_running_s == 300
    await sandbox.stop()
    await sandbox.stop()
    await client.close()


async def test_network_that_there_is_not_yet_is_refused_and_not_ignored(service: RunningService) -> None:
    async with libdsec.DSecClient(url=service.url) as client:
        with pytest.raises(errors.UnsupportedError, match="pypi"):
            await client.run_container(
                libdsec.DSecContainerRunArgs(container_image="base", network_rules={"npm": False, "pypi": True})
            )


def test_it_speaks_tcp(service: RunningService) -> None:
    with dsec.Client(f"http://127.0.0.1:{service.tcp_port}") as far, pytest.raises(errors.AuthError):
        far.list()
    with dsec.Client("http://127.0.0.1:1") as nowhere, pytest.raises(errors.UnavailableError):
        nowhere.list()


def test_what_is_of_the_wrong_type_is_refused(client: dsec.Client, sb: dsec.Sandbox) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="data must be text or bytes, not int"):
        sb.files.write("/tmp/number", 5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="a snapshot is a name"):
        sb.rollback(5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="toolkits must be a list"):
        client.environments.create("x", "base", toolkits="ripgrep:14")
    (refused,) = client.call_many(["print(1)"])  # type: ignore[list-item]
    assert isinstance(refused, errors.InvalidArgumentError)
