"""Programs see the share of the machine that their sandbox has, whoever they ask; and who goes first for memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends.container.record import parse_record
from dsec.backends.container.view import LIVE, choose_view, find_lxcfs
from dsec.core.errors import GoneError
from dsec.core.spec import Environment, SandboxSpec
from dsec.density.cgroups import detect
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.processes import read_process
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

HOST = detect()
MEMORY = 128 << 20
CPUS = len(os.sched_getaffinity(0))
ASK = """
import json, os
print(json.dumps({
    "cpu_count": os.cpu_count(),
    "online": os.sysconf("SC_NPROCESSORS_ONLN"),
    "configured": os.sysconf("SC_NPROCESSORS_CONF"),
    "usable": len(os.sched_getaffinity(0)),
    "described": open("/proc/cpuinfo").read().count("processor\\t:"),
    "counted": open("/proc/stat").read().count("\\ncpu"),
    "memory": {line.split(":")[0]: int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if ":" in line},
    "load": open("/proc/loadavg").read().split(),
}))
"""
BUSY = """
import os, time
print(sorted(os.sched_getaffinity(0)))
end = time.time() + 0.2
while time.time() < end:
    pass
"""
COUNTS = ("cpu_count", "online", "configured", "usable", "described", "counted")

live_view = choose_view("auto", HOST, find_lxcfs())
needs_lxcfs = pytest.mark.skipif(live_view.kind != LIVE, reason=f"no live view here: {live_view.reason}")
needs_memory = pytest.mark.skipif(HOST.limits("memory") is None, reason="this host has no memory controller")
needs_two = pytest.mark.skipif(CPUS < 2, reason="this machine has one processor")

Service = tuple[Place, LocalService, AsyncClient]


def place_of(store: Path, view: str) -> contextlib.AbstractContextManager[Place]:
    return private_place(store, settings={"container": {"resource_view": view}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fixed(small_store: Path) -> AsyncIterator[Service]:
    with place_of(small_store, "static") as place:
        async with served(place) as (service, client):
            yield place, service, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(small_store: Path) -> AsyncIterator[Service]:
    with place_of(small_store, "live") as place:
        async with served(place) as (service, client):
            yield place, service, client


async def asked(sandbox: AsyncSandbox) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await sandbox.exec(["python3", "-c", ASK], check=True)).stdout)
    return answer


def view_of(service: LocalService, sandbox: AsyncSandbox) -> str:
    found = service.node.registry.find(sandbox.id)
    assert found is not None
    assert found.instance is not None
    return parse_record(found.instance.record).view


# ---- static --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [0.25, 1, 1.5, 64])
async def test_processors_are_those_of_the_limit_and_at_least_one(fixed: Service, cpu: float) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY, cpu=cpu) as sandbox:
        answer = await asked(sandbox)
        nproc = (await sandbox.exec("nproc", check=True)).stdout.strip()

    expected = min(max(1, math.ceil(cpu)), CPUS)
    assert {name: answer[name] for name in COUNTS} == dict.fromkeys(COUNTS, expected)
    assert nproc == str(expected)


async def test_memory_is_the_limit(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY) as sandbox:
        answer = await asked(sandbox)
        view = view_of(fixed[1], sandbox)

    memory = answer["memory"]
    assert (memory["MemTotal"], memory["MemFree"], memory["MemAvailable"]) == (MEMORY,) * 3
    assert (memory["SwapTotal"], answer["load"][:3]) == (0, ["0.00"] * 3)
    assert view == "static"


async def test_what_is_shown_follows_limits_that_change(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY, cpu=1) as sandbox:
        found = fixed[1].node.registry.find(sandbox.id)
        assert found is not None
        assert found.instance is not None
        record = parse_record(found.instance.record)
        backend: Any = next(iter(fixed[1].node.backends.values()))
        wider = SandboxSpec(environment=Environment(ENVIRONMENT), memory_bytes=2 * MEMORY, cpu=2)

        for _ in range(3):
            shown = await backend.show(record, wider)
        answer = await asked(sandbox)
        mounts = (await sandbox.exec("cat /proc/self/mountinfo", check=True)).stdout

    assert shown.view == "static"
    assert (answer["memory"]["MemTotal"], answer["cpu_count"]) == (2 * MEMORY, min(2, CPUS))
    assert answer["usable"] == answer["cpu_count"]
    assert mounts.count(" /proc/meminfo ") == 1  # nothing piles up


@needs_two
async def test_commands_spread_over_the_processors(fixed: Service) -> None:
    """Each is bound to one, but not all to the same: else the busy would share a processor while another idles."""
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY, cpu=1) as sandbox:
        used: set[str] = set()

        async def several_are_used() -> bool:
            busy = [sandbox.exec(["python3", "-c", BUSY], check=True) for _ in range(4)]
            results = await asyncio.gather(*busy)
            used.update(result.stdout for result in results)
            return len(used) > 1

        await eventually(several_are_used, deadline_s=60)


async def test_the_whole_machine_is_shown_where_the_operator_wants_that(small_store: Path) -> None:
    with place_of(small_store, "host") as place:
        async with (
            served(place) as (service, client),
            await client.create(ENVIRONMENT, cpu=1, memory=MEMORY) as sandbox,
        ):
            answer = await asked(sandbox)
            report = await client.doctor()
            assert view_of(service, sandbox) == "host"

    assert (answer["cpu_count"], answer["usable"]) == (os.cpu_count(), CPUS)
    assert answer["memory"]["MemTotal"] > MEMORY
    finding = next(finding for finding in report.findings if finding.what == "container: resource view")
    assert (finding.status, finding.detail.split(":")[0]) == ("degraded", "host")


# ---- live ----------------------------------------------------------------------------------------


def lxcfs_of(place: Place) -> int:
    return int((place.run / "lxcfs.own").read_text().split()[0])


@needs_lxcfs
async def test_a_live_view_tells_what_is_free(live: Service) -> None:
    async with await live[2].create(ENVIRONMENT, memory=MEMORY, cpu=1) as sandbox:
        before = (await asked(sandbox))["memory"]
        await sandbox.exec("head -c 40000000 /dev/zero > /dev/shm/fill", check=True)
        after = (await asked(sandbox))["memory"]
        view = view_of(live[1], sandbox)
        finding = next(f for f in (await live[2].doctor()).findings if f.what == "container: resource view")

    assert (before["MemTotal"], after["MemTotal"], before["SwapTotal"]) == (MEMORY, MEMORY, 0)
    assert before["MemFree"] - after["MemFree"] > 30_000_000
    assert view == "live"
    assert finding.detail.startswith("live")


@needs_lxcfs
async def test_readers_get_an_answer_when_lxcfs_is_killed_and_it_comes_back(live: Service) -> None:
    place, service, client = live
    async with await client.create(ENVIRONMENT, memory=MEMORY) as sandbox:
        assert view_of(service, sandbox) == "live"
        first = lxcfs_of(place)
        # One that has it open, and reads on and on.
        reader = await sandbox.start("exec 3</proc/meminfo; while :; do cat /proc/meminfo >/dev/null 2>&1; done")

        os.kill(first, signal.SIGKILL)

        async def answers() -> bool:
            return (await sandbox.exec("head -1 /proc/meminfo", timeout_s=60)).stdout.split()[1:2] == [
                str(MEMORY >> 10)
            ]

        await eventually(answers, deadline_s=60)
        async with await client.create(ENVIRONMENT, memory=MEMORY) as other:
            assert (await asked(other))["memory"]["MemTotal"] == MEMORY

        async def is_back() -> bool:
            with contextlib.suppress(OSError):
                if lxcfs_of(place) != first:
                    async with await client.create(ENVIRONMENT, memory=MEMORY) as fresh:
                        return view_of(service, fresh) == "live"
            return False

        await eventually(is_back, deadline_s=60)
        mounts = (await sandbox.exec("cat /proc/self/mountinfo", check=True)).stdout
        assert mounts.count(" /proc/meminfo ") == 1
        await reader.kill()
        await reader.wait(60)


@needs_lxcfs
async def test_lxcfs_outlives_the_launcher_and_goes_with_the_next_one(small_store: Path) -> None:
    with place_of(small_store, "live") as place:
        async with served(place) as (_, client), await client.create(ENVIRONMENT, memory=MEMORY) as sandbox:
            first = lxcfs_of(place)
            place.kill_launcher()
            assert (await asked(sandbox))["memory"]["MemTotal"] == MEMORY

            async with await client.create(ENVIRONMENT, memory=MEMORY) as other:
                assert (await asked(other))["memory"]["MemTotal"] == MEMORY
            assert lxcfs_of(place) == first
        launcher = place.launcher_pid()
        assert launcher is not None
        os.kill(launcher, signal.SIGTERM)

        await eventually(lambda: (info := read_process(first)) is None or info.state == "Z", deadline_s=60)
        await eventually(lambda: not (place.run / "lxcfs.own").exists(), deadline_s=60)


# ---- memory --------------------------------------------------------------------------------------


@needs_memory
async def test_commands_go_before_the_agent_and_cannot_change_that(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY) as sandbox:
        session = sandbox.session("s")
        scores = [
            (await run("cat /proc/self/oom_score_adj /proc/1/oom_score_adj")).stdout.split()
            for run in (sandbox.exec, session.exec)
        ]
        lowered = await sandbox.exec("echo 0 > /proc/self/oom_score_adj && cat /proc/self/oom_score_adj")
        below = await sandbox.exec("echo -1 > /proc/self/oom_score_adj")

    assert scores == [["900", "0"]] * 2
    assert lowered.stdout == "0\n"
    assert not below.ok


HOG = """
import os, time
while True:
    try:
        pid = os.fork()
    except OSError:
        time.sleep(.01)
        continue
    if pid == 0:
        held = bytearray(4 << 20)
        time.sleep(1000)
"""


@needs_memory
async def test_a_fork_bomb_that_eats_memory_kills_commands_and_not_the_agent(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY, pids=200) as sandbox:
        bomb = await sandbox.start(["python3", "-c", HOG], timeout_s=200)

        async def has_been_killed_for() -> bool:
            return ((await sandbox.metrics()).oom_kills or 0) >= 3

        await eventually(has_been_killed_for, deadline_s=60)
        await bomb.kill()
        await bomb.wait(60)

        assert (await sandbox.exec("echo on", check=True)).stdout == "on\n"
        assert (await sandbox.refresh()).state == "running"


@needs_memory
async def test_who_was_killed_for_memory_is_said(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY) as sandbox:
        leader = await sandbox.exec("exec tail /dev/zero", timeout_s=120)
        child = await sandbox.exec("tail /dev/zero; exit 3", timeout_s=120)
        bystander = await sandbox.exec("exit 3")

    assert (leader.signal, leader.cause) == (9, "oom")
    assert (child.exit_code, child.cause) == (3, "oom")
    assert (bystander.exit_code, bystander.cause) == (3, None)


@needs_memory
async def test_an_agent_that_was_killed_for_memory_is_said_to_have_been(fixed: Service) -> None:
    async with await fixed[2].create(ENVIRONMENT, memory=MEMORY) as sandbox:
        found = fixed[1].node.registry.find(sandbox.id)
        assert found is not None
        assert found.instance is not None
        agent = parse_record(found.instance.record).pid

        with contextlib.suppress(GoneError):
            # Some of the memory is nobody's: the kernel counts a score of 1000 as a little less than all of it.
            text = "echo 0 > /proc/self/oom_score_adj; head -c 16M /dev/zero > /dev/shm/x; read go; exec tail /dev/zero"
            hog = await sandbox.start(text, stdin=True)
            Path(f"/proc/{agent}/oom_score_adj").write_text("1000")  # the host may
            await hog.write("go\n")
            await hog.wait(60)

        async def has_failed() -> bool:
            return (await sandbox.refresh()).state == "failed"

        await eventually(has_failed, deadline_s=60)
        assert (await sandbox.refresh()).cause == "oom"


@needs_lxcfs
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_readers_get_an_answer_when_lxcfs_stands_still(live: Service) -> None:
    place, service, client = live
    async with await client.create(ENVIRONMENT, memory=MEMORY) as sandbox:
        await eventually(lambda: view_of(service, sandbox) == "live")
        stopped = lxcfs_of(place)
        os.kill(stopped, signal.SIGSTOP)

        # It is found out at the next look, every quarter of a minute, and given some time to answer.
        waited = await sandbox.exec("cat /proc/meminfo > /dev/null 2>&1; head -1 /proc/meminfo", timeout_s=300)

        assert not waited.timed_out

        async def answers() -> bool:
            answer = await sandbox.exec("head -1 /proc/meminfo", timeout_s=100)
            return answer.stdout.split()[1:2] == [str(MEMORY >> 10)]

        await eventually(answers, deadline_s=200)
        assert (info := read_process(stopped)) is None or info.state == "Z"
