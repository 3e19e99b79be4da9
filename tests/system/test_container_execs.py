"""Commands in real containers: floods, trees that are to be killed, leaders that leave children, users, terminals."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError
from dsec.core.limits import MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.security import capabilities
from dsec.testing.waiting import eventually
from tests.patience import with_a_limit
from tests.system.container_place import ENVIRONMENT, Place

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(node: tuple[Place, AsyncClient]) -> AsyncIterator[AsyncSandbox]:
    async with await node[1].create(ENVIRONMENT, memory="256MiB", pids=128) as sandbox:
        yield sandbox


async def processes(sandbox: AsyncSandbox) -> list[str]:
    """Names of what runs inside, besides the agent and those who look."""
    shown = (await sandbox.exec(["ps", "-A", "-o", "comm="])).stdout.split()
    return [name for name in shown if name not in ("ps", "memfd:dsec-agen", "dsec-agent")]


# ---- output --------------------------------------------------------------------------------------

_PIECES = """
import os, sys, time
for i in range(20000):
    os.write(1 + (i % 2 if len(sys.argv) > 1 else 0), b".")
    time.sleep(0.0001)
"""


@pytest.mark.parametrize("both", [False, True], ids=["one channel", "both channels"])
async def test_many_small_pieces_of_output_all_come(sandbox: AsyncSandbox, both: bool) -> None:
    """More pieces than the agent keeps unacknowledged, in far fewer bytes."""
    result = await sandbox.exec(["python3", "-c", _PIECES, *(["both"] if both else [])], timeout_s=250)

    assert (result.exit_code, result.cause) == (0, None)
    assert len(result.stdout_bytes) + len(result.stderr_bytes) == 20_000


async def test_a_flood_is_recorded_within_its_budget_and_the_gap_is_said(sandbox: AsyncSandbox) -> None:
    budget = 1 * MIB
    before = _resident_bytes()

    process = await sandbox.start("yes 0123456789abcde | head -c 220000000; echo tail", record_bytes_max=budget)
    peak, until = 0, time.monotonic() + 200
    while (await process.info()).state == "running":
        peak = max(peak, _resident_bytes())
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    info = await process.info()
    sandbox_again = await (await sandbox.attach(process.id)).wait(60)

    assert info.out_bytes == 220_000_005
    kept = sandbox_again.stdout_bytes
    assert len(kept) <= budget
    assert kept.startswith(b"0123456789abcde\n" * 100)
    assert kept.endswith(b"0123456789abcde\ntail\n")
    assert sandbox_again.truncated
    assert sum(gap.end - gap.start for gap in info.gaps) == info.out_bytes - len(kept)
    assert peak - before < 64 * MIB


async def test_output_above_its_bound_kills_the_command(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("yes", output_bytes_max=100_000, timeout_s=60)

    assert result.cause == "output_budget"
    assert 100_000 < len(result.stdout_bytes) <= 100_000 + MIB
    await eventually(lambda: _is_empty(sandbox))


async def test_binary_output_and_input_pass_unchanged(sandbox: AsyncSandbox) -> None:
    data = bytes(range(256)) * 20_000

    result = await sandbox.exec("cat", stdin=data)

    assert result.stdout_bytes == data


# ---- ends ----------------------------------------------------------------------------------------

_DAEMONS = """
import os, signal, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.chdir("/")
            for fd in range(3): os.close(fd)
            time.sleep(600)
        os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


async def test_a_timeout_kills_a_tree_with_daemons_that_ignore_terms(sandbox: AsyncSandbox) -> None:
    result = await with_a_limit(
        lambda limit_s: sandbox.exec(["python3", "-c", _DAEMONS], timeout_s=limit_s, grace_s=0.2),
        lambda result: result.stdout,
    )

    assert (result.timed_out, result.signal, result.stdout) == (True, 9, "ready\n")
    await eventually(lambda: _is_empty(sandbox))


async def _is_empty(sandbox: AsyncSandbox) -> bool:
    return not await processes(sandbox)


async def test_a_command_that_obeys_gets_its_grace(sandbox: AsyncSandbox) -> None:
    script = "trap 'echo bye; exit 4' TERM; echo ready; sleep 600 & wait"
    result = await with_a_limit(
        lambda limit_s: sandbox.exec(script, timeout_s=limit_s, grace_s=60), lambda result: result.stdout
    )

    assert (result.timed_out, result.stdout, result.exit_code) == (True, "ready\nbye\n", 4)


async def test_kill_ends_all_that_a_command_has_started(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start(["python3", "-c", _DAEMONS])
    await eventually(lambda: _says(process, 6))

    await process.kill()

    result = await process.wait(60)
    assert (result.signal, result.cause) == (9, "killed")
    await eventually(lambda: _is_empty(sandbox))


async def _says(process: object, count: int) -> bool:
    return (await process.info()).out_bytes >= count  # type: ignore[attr-defined]


async def test_an_exec_ends_with_its_leader_and_not_with_who_holds_the_pipe(sandbox: AsyncSandbox) -> None:
    async with asyncio.timeout(60):
        result = await sandbox.exec("sleep 600 & echo leader; exit 3")

    assert (result.exit_code, result.stdout) == (3, "leader\n")
    assert "sleep" in await processes(sandbox)  # it lives on until asked otherwise


async def test_what_is_written_just_before_the_end_is_not_lost(sandbox: AsyncSandbox) -> None:
    for _ in range(20):
        result = await sandbox.exec("head -c 300000 /dev/zero; echo end >&2; exit 1")
        assert (len(result.stdout_bytes), result.stderr, result.exit_code) == (300_000, "end\n", 1)


async def test_fifty_commands_at_once_keep_apart(sandbox: AsyncSandbox) -> None:
    async def one(number: int) -> None:
        result = await sandbox.exec(f"echo {number}; sleep 0.0{number % 10}; echo {number} >&2; exit {number}")
        assert (result.stdout, result.stderr, result.exit_code) == (f"{number}\n", f"{number}\n", number)

    await asyncio.gather(*(one(number) for number in range(50)))


# ---- who and how ---------------------------------------------------------------------------------


async def test_users_by_name_and_number_with_their_groups(sandbox: AsyncSandbox) -> None:
    for user, shown in (
        (None, "0:0:0:/root"),
        ("user", "1000:1000:1000 50:/home"),
        ("1000", "1000:1000:1000 50:/home"),
        ("user:staff", "1000:50:50:/home"),
        ("4242:4343", "4242:4343:4343:"),
    ):
        result = await sandbox.exec('echo "$(id -u):$(id -g):$(id -G):$HOME"', user=user)
        got = result.stdout.strip().split(":")
        assert got[:2] == shown.split(":")[:2], (user, result.stderr)
        assert sorted(got[2].split()) == sorted(shown.split(":")[2].split()), user
    with pytest.raises(DsecError, match="no user"):
        await sandbox.exec("true", user="nobody-here")


@pytest.mark.parametrize(("gain", "effective"), [(False, "65534"), (True, "0")], ids=["by default", "asked for"])
async def test_a_set_user_id_program_raises_only_where_that_was_asked_for(
    node: tuple[Place, AsyncClient], gain: bool, effective: str
) -> None:
    async with await node[1].create(ENVIRONMENT, memory="128MiB", privilege_gain=gain) as sandbox:
        await sandbox.exec("cp /bin/cat /tmp/status && chmod 4755 /tmp/status", check=True)
        shell = sandbox.session("user", user="65534")

        of_exec = (await sandbox.exec(["/tmp/status", "/proc/self/status"], user="65534", check=True)).stdout
        of_session = (await shell.exec("/tmp/status /proc/self/status", check=True)).stdout

    for status in (of_exec, of_session):
        facts = dict(line.split(":", 1) for line in status.splitlines())
        assert facts["Uid"].split()[:2] == ["65534", effective]
        assert facts["NoNewPrivs"].strip() == ("0" if gain else "1")
        # Neither the agent's own capabilities nor more system calls come with it.
        assert int(facts["CapEff"], 16) == (capabilities.EXEC if gain else 0)
        assert int(facts["CapBnd"], 16) == capabilities.EXEC
        assert facts["Seccomp_filters"].strip() == "2"


async def test_a_user_reads_and_kills_nothing_of_root(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("/root/secret", b"secret")
    await sandbox.files.chmod("/root/secret", 0o600)
    await sandbox.start("exec sleep 666")

    result = await sandbox.exec("cat /root/secret; kill -9 -1; kill -9 1; echo x > /etc/passwd", user="user")

    assert result.stdout == ""
    assert "sleep" in await processes(sandbox)
    assert (await sandbox.exec("head -1 /etc/passwd")).stdout.startswith("root:")


async def test_limits_of_a_command_hold_and_those_above_the_host_are_refused(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("ulimit -n; ulimit -t", rlimits={"nofile": 64, "cpu": 7})
    assert result.stdout.split() == ["64", "7"]

    burnt = await sandbox.exec("while :; do :; done", rlimits={"cpu": 1}, timeout_s=60)
    assert burnt.signal in (9, 24)
    with pytest.raises(DsecError):
        await sandbox.exec("true", rlimits={"nofile": 1 << 40})


async def test_a_session_keeps_directory_variables_and_functions(sandbox: AsyncSandbox) -> None:
    session = sandbox.session("work")

    await session.exec("cd /tmp; X=1; export Y=2; f() { echo f$X; }")
    result = await session.exec('pwd; f; echo "$X$Y"; sh -c \'echo "$X$Y"\'; exit_code() { return 7; }; exit_code')

    assert (result.stdout, result.exit_code) == ("/tmp\nf1\n12\n2\n", 7)
    other = await sandbox.session("other").exec('echo "$X"')
    assert other.stdout == "\n"
    last = await session.exec("exit 9")
    assert (last.exit_code, last.session_ended) == (9, True)


async def test_a_session_survives_a_command_that_is_killed_for_its_time(sandbox: AsyncSandbox) -> None:
    session = sandbox.session("timed")
    await session.exec("cd /tmp; KEPT=1")

    slow = await session.exec("sleep 600", timeout_s=0.5, grace_s=60)

    assert slow.timed_out
    result = await session.exec('echo "$KEPT"; pwd')
    assert result.stdout == "1\n/tmp\n"


async def test_a_terminal_is_one(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty("stty size; [ -t 0 ] && echo yes; read line; echo got $line", cols=91, rows=33) as pty:
        shown = b""
        await pty.write("hello\n")
        async with asyncio.timeout(60):
            while data := await pty.read():
                shown += data

        assert b"33 91\r\n" in shown
        assert b"yes\r\n" in shown
        assert b"got hello\r\n" in shown


async def test_a_terminal_that_is_resized_tells_its_program(sandbox: AsyncSandbox) -> None:
    script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"
    async with await sandbox.pty(script) as pty:
        shown = b""
        async with asyncio.timeout(60):
            while b"ready" not in shown:
                shown += await pty.read()
            await pty.resize(132, 50)
            while data := await pty.read():
                shown += data

        assert b"50 132" in shown


async def test_a_connection_reaches_a_port_inside_and_nothing_outside(sandbox: AsyncSandbox) -> None:
    server = """
import socket
listener = socket.create_server(("127.0.0.1", 8000))
print("up", flush=True)
link, _ = listener.accept()
link.sendall(link.recv(99)[::-1])
"""
    process = await sandbox.start(["python3", "-c", server])
    await eventually(lambda: _says(process, 3))

    connection = await sandbox.connect_port(8000)
    await connection.write(b"abc")
    assert await connection.read() == b"cba"
    await connection.close()

    with pytest.raises(DsecError):
        await sandbox.connect_port(8001)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
