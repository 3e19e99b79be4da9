"""Sandboxes that run their environment's program: started, waited for, taken over, and nothing left when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from dsec.agent.client import AgentClient
from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.transfers import ECHO_PORT
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError, LaunchError
from dsec.core.ids import main_exec_id
from dsec.core.spec import ReadyProbe
from dsec.node.startup import Readiness
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import FAKE_SPEC, FakeEnvironments, NodeClient, crash, fake_instance, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import Method
from tests.node_calls import create, destroy, host_of, start

SLOW = ReadyProbe(shell="false", interval_s=0.01, timeout_s=30.0)  # never ready
BUSY = "echo out; echo err >&2; sleep infinity"


def shell(text: str) -> FakeEnvironments:
    """ENTRYPOINT and CMD, which belong together only when both are run."""
    return FakeEnvironments(entrypoint=("sh", "-c"), command=(text,))


async def main_of(client: NodeClient, sandbox: records.Sandbox) -> records.ExecInfo:
    query = records.ExecQuery(sandbox=sandbox.id, exec=main_exec_id(sandbox.id))
    return await client.call(Method.EXEC_GET, query, records.ExecInfo)


async def assert_nothing_left(client: NodeClient) -> None:
    await eventually(lambda: len(client.node.registry) == 0)
    assert host_of(client).leftovers() == []
    assert list(client.node.config.records_dir.iterdir()) == []
    assert client.node.journal.sandboxes() == []


async def test_the_environments_program_runs_as_main_and_keeps_the_sandbox_busy(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True)
        main = await main_of(client, sandbox)
        other = await start(client, sandbox.id, "true")

        assert (main.name, main.state, main.command) == ("main", "running", f"sh -c {BUSY}")
        assert (other.exec.name, other.exec.exit_code) == (None, 0)
        assert (sandbox.state, sandbox.execs_live, sandbox.idle_since) == ("running", 1, None)
        await destroy(client, sandbox.id)
        await assert_nothing_left(client)


async def test_without_start_the_program_does_not_run(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client)

        assert (await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)).execs == []


async def test_a_sandbox_is_idle_from_the_end_of_main_on(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, environments=shell("exit 3"), clock=clock, sleep=clock.sleep) as client:
        sandbox = await create(client, start=True, ttl_idle_s=60.0)
        await eventually(lambda: client.node.find(sandbox.id, project=None).execs.live_count == 0)
        main = await main_of(client, sandbox)
        await clock.advance(61.0)

        assert (main.exit_code, main.name) == (3, "main")
        await assert_nothing_left(client)


async def test_an_environment_without_a_program_is_refused_and_nothing_is_created(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        with pytest.raises(InvalidArgumentError, match="names no program"):
            await create(client, start=True)

        await assert_nothing_left(client)


async def test_nobody_else_gets_the_id_of_main(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True)

        with pytest.raises(ConflictError):
            await start(client, sandbox.id, "true", id=main_exec_id(sandbox.id))


# ---- ready ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe",
    [
        ReadyProbe(shell="test -e /tmp/up", interval_s=0.01),
        ReadyProbe(argv=("test", "-e", "/tmp/up"), interval_s=0.01),
        ReadyProbe(shell="yes | head -c 3000000; test -e /tmp/up", interval_s=0.01),
    ],
    ids=["shell", "argv", "with much output"],
)
async def test_a_create_returns_once_the_probe_succeeds(tmp_path: Path, probe: ReadyProbe) -> None:
    async with fake_node(tmp_path, environments=shell("sleep 0.3; touch /tmp/up; sleep infinity")) as client:
        sandbox = await create(client, start=True, ready=probe)
        found = await start(client, sandbox.id, "test", "-e", "/tmp/up")
        execs = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)

        assert found.exec.exit_code == 0
        assert [e.name for e in execs.execs] == ["main", None], "tries of the probe are on no record"
        assert sandbox.create_ms is not None
        assert sandbox.create_ms >= 300


async def test_a_port_that_accepts_is_ready(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        sandbox = await create(client, start=True, ready=ReadyProbe(port=ECHO_PORT))

        assert sandbox.state == "running"


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (ReadyProbe(shell="exit 7", interval_s=0.01, timeout_s=1.5), r"its probe \(exit 7\) ended with exit code 7"),
        (ReadyProbe(shell="sleep 60", interval_s=0.01, timeout_s=1.5), r"no try of its probe \(sleep 60\) has ended"),
        (ReadyProbe(argv=("no-such-program",), interval_s=0.01, timeout_s=1.5), "no-such-program"),
        (ReadyProbe(port=ECHO_PORT + 1, interval_s=0.01, timeout_s=1.5), "ECONNREFUSED|refused"),
    ],
    ids=["exits", "hangs", "is not there", "refused"],
)
async def test_what_is_not_ready_in_time_fails_and_nothing_is_left(tmp_path: Path, probe: ReadyProbe, why: str) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        with pytest.raises(LaunchError, match=why) as failed:
            await create(client, start=True, ready=probe)

        assert failed.value.step == "ready"
        assert failed.value.detail == {"stdout": "out\n", "stderr": "err\n"}
        await assert_nothing_left(client)


async def test_a_main_that_ends_before_it_is_ready_says_how_and_nothing_is_left(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell("echo no config >&2; exit 4")) as client:
        with pytest.raises(LaunchError, match="exit code 4") as failed:
            await create(client, start=True, ready=SLOW)

        assert failed.value.step == "ready"
        assert failed.value.detail["stderr"] == "no config\n"
        await assert_nothing_left(client)


async def test_a_main_that_cannot_start_is_a_failed_launch_and_nothing_is_left(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=FakeEnvironments(command=("no-such-program",))) as client:
        with pytest.raises(LaunchError) as failed:
            await create(client, start=True)

        assert failed.value.step == "start"
        await assert_nothing_left(client)


async def test_the_creates_own_time_ends_the_wait_too(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(FAKE_SPEC, start=True, ready=SLOW)
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        with pytest.raises(LaunchError) as failed:
            await client.call(Method.CREATE, records.CreateRequest(spec=spec, timeout_s=2.0), records.Sandbox)

        assert failed.value.step == "ready"
        await assert_nothing_left(client)


async def test_a_wait_that_its_caller_ends_tells_what_was_tried_last() -> None:
    class Main:
        live, kept_bytes = True, 0

        async def ended(self) -> None:
            await asyncio.Event().wait()

        def __enter__(self) -> Main:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def read_all(self, channel: object) -> bytes:
            return b""

    class Client:
        async def open_connection(self, args: object) -> object:
            raise LaunchError("no route")

    async def client() -> AgentClient:
        return Client()  # type: ignore[return-value]

    waiting = Readiness(ReadyProbe(port=5432, timeout_s=100), Main(), client)  # type: ignore[arg-type]

    with pytest.raises(LaunchError, match=r"not ready within 0.19 s: its probe \(port 5432\): no route") as failed:
        await waiting.wait("sbx_a", 0.2)

    assert "longer timeout" in str(failed.value.hint)


async def test_a_sandbox_that_dies_while_it_is_waited_for_leaves_nothing(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        creating = asyncio.create_task(create(client, start=True, ready=SLOW))
        await eventually(lambda: any(s.execs.live_count for s in client.node.registry))
        id = next(iter(client.node.registry)).id
        await fake_instance(client.node, id).crash()

        with pytest.raises(LaunchError):
            await creating
        await assert_nothing_left(client)
        assert client.node.journal.tombstone(id) is None


async def test_who_wants_to_destroy_it_meanwhile_finds_nothing_left(tmp_path: Path) -> None:
    probe = ReadyProbe(shell="false", interval_s=0.01, timeout_s=2.0)
    async with fake_node(tmp_path, environments=shell(BUSY)) as client:
        creating = asyncio.create_task(create(client, start=True, ready=probe))
        await eventually(lambda: any(s.execs.live_count for s in client.node.registry))
        await destroy(client, next(iter(client.node.registry)).id)

        with pytest.raises(LaunchError):
            await creating
        await assert_nothing_left(client)


async def test_creates_that_wait_to_be_ready_hold_nobody_up(tmp_path: Path) -> None:
    async with fake_node(tmp_path, environments=shell(BUSY), creates_at_once_max=1) as client:
        waiting = asyncio.create_task(create(client, start=True, ready=SLOW))
        await eventually(lambda: any(s.execs.live_count for s in client.node.registry))
        sandbox = await create(client)

        assert (sandbox.state, waiting.done()) == ("running", False)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: len(client.node.registry) == 1)


# ---- after a restart ------------------------------------------------------------------------------


async def test_a_node_that_starts_again_takes_main_over(tmp_path: Path) -> None:
    host = FakeHost()
    before = make_fake_node(tmp_path, host=host, environments=shell("sleep 2.5; echo late; exit 5"))
    await before.start()
    sandbox = await create(NodeClient(before), start=True)
    await crash(before)

    async with fake_node(tmp_path, host=host) as client:
        taken = await main_of(client, sandbox)
        query = records.ExecQuery(sandbox=sandbox.id, exec=main_exec_id(sandbox.id), wait_s=20.0)
        ended = await client.call(Method.EXEC_GET, query, records.ExecInfo)

    assert (taken.name, taken.state) == ("main", "running")
    assert (ended.name, ended.exit_code, ended.out_bytes) == ("main", 5, 5)


async def test_a_node_killed_while_it_waited_leaves_nothing_half_made(tmp_path: Path) -> None:
    host = FakeHost()
    before = make_fake_node(tmp_path, host=host, environments=shell(BUSY))
    await before.start()
    creating = asyncio.create_task(create(NodeClient(before), start=True, ready=SLOW))
    await eventually(lambda: any(s.execs.live_count for s in before.registry))
    await crash(before)
    with pytest.raises((DsecError, asyncio.CancelledError)):
        await creating

    async with fake_node(tmp_path, host=host) as client:
        await assert_nothing_left(client)
