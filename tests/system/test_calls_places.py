"""Places for calls: what an operator gives them, what they are when they break, and how they are kept well."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.backends.fncall import pool as pools
from dsec.core.errors import UnsupportedError
from dsec.density.cgroups import detect, read_number
from dsec.sdk.calls import CallResult
from dsec.sdk.client import AsyncClient
from dsec.serve.service import LocalService
from dsec.testing.processes import command_line
from dsec.testing.waiting import eventually
from dsec.wire.calls import CallPool, CallStatus
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio]

PATIENT: dict[str, Any] = {"environment": ENVIRONMENT, "run_timeout_s": 60.0, "queue_timeout_s": 120.0}
FULL = 7  # /dev/full: what is written there is an error that no other device gives


@asynccontextmanager
async def service(small_store: Path, **calls: Any) -> AsyncIterator[tuple[Place, AsyncClient]]:
    with private_place(small_store) as place:
        place.settings["calls"] = {"place_memory_bytes": "128MiB", **calls}
        async with served(place) as (_, client):
            yield place, client


async def python(client: AsyncClient, code: str, **options: Any) -> CallResult:
    return await client.call("python", code, **{**PATIENT, **options})


async def pool_of(client: AsyncClient, type: str = "python") -> CallPool:
    return next((pool for pool in await client.call_pools() if pool.type == type), CallPool(environment="", type=type))


async def pool_is(client: AsyncClient, right: Callable[[CallPool], bool], type: str = "python") -> None:
    async with asyncio.timeout(60):
        while not right(await pool_of(client, type)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def post(place: Place, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """One request for a call, never sent again: status, when to come back, and the answer."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(place.run / "api.sock"))) as session:
        async with session.post("http://dsec/v1/calls", json=body) as response:
            return response.status, response.headers.get("Retry-After", ""), await response.json()


def processes_of(place: Place, *words: bytes) -> list[int]:
    """Of all places, whose command line has all of these."""
    return [pid for pid in place.pids() if all(word in command_line(pid) for word in words)]


# ---- what an operator gives them -------------------------------------------------------------------------------------


async def test_a_pool_is_kept_to_its_processors_and_runs_behind_others(small_store: Path) -> None:
    host = detect()
    if host.cpuset is None:
        pytest.skip("this host has no cpuset cgroups")
    cpu = min(os.sched_getaffinity(0))
    code = """
import os, json
before = sorted(os.sched_getaffinity(0))
try: os.sched_setaffinity(0, range(os.cpu_count() + 8))
except OSError: pass
print(json.dumps([before, sorted(os.sched_getaffinity(0))]))
"""
    kept = {"type": "python", "cpus": str(cpu), "qos": "background"}
    async with service(small_store, pools={"kept": kept}) as (place, client):
        result = await python(client, code)
        free = await client.call("bash", "nproc", **PATIENT)
        idle = [read_number(file) for file in place.cgroup_files("sbx_*/cpu.idle")]

    assert json.loads(result.stdout) == [[cpu], [cpu]], result
    assert free.ok
    if host.cpu_idle:
        assert sorted(number for number in idle if number is not None) == [0, 1]
    assert not place.cgroup_files("sbx_*"), "cgroups of processors go with their place"


def describe(directory: Path, name: str, **edits: Any) -> None:
    description = {
        "cdiVersion": "0.6.0",
        "kind": "dsec.test/card",
        "devices": [
            {"name": "a", "containerEdits": {"deviceNodes": [{"path": "/dev/cards/a", "hostPath": "/dev/full"}]}},
            {"name": "b", "containerEdits": {"deviceNodes": [{"path": "/dev/cards/b", "hostPath": "/dev/full"}]}},
        ],
        "containerEdits": edits,
    }
    (directory / name).write_text(json.dumps(description))


USING = """
import errno, json, os, stat
found = {}
for name in sorted(os.listdir("/dev/cards")):
    try: open(f"/dev/cards/{name}", "wb", 0).write(b"x")
    except OSError as error: found[name] = errno.errorcode[error.errno]
devices = {os.stat(f"{d}/{n}").st_rdev for d, _, names in os.walk("/dev") for n in names
           if stat.S_ISCHR(os.lstat(f"{d}/{n}").st_mode)}
print(json.dumps([found, sorted((os.major(d), os.minor(d)) for d in devices), os.environ.get("CARDS")]))
"""
OWN = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}  # null, zero, full, random, urandom, tty, ptmx


async def test_a_pool_has_the_devices_of_its_description_and_no_others(small_store: Path, tmp_path: Path) -> None:
    """Described is a harmless device, under other names: there is no card in this machine."""
    library = tmp_path / "library.so"
    library.write_text("of the host")
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    mounts = [
        {"hostPath": str(library), "containerPath": "/usr/lib/cards/library.so", "options": ["rw"]},
        {"hostPath": str(tree), "containerPath": "/opt/cards"},
    ]
    describe(tmp_path, "cards.json", env=["CARDS=yes"], mounts=mounts)
    pool = {"type": "python", "devices": ["dsec.test/card=a", "dsec.test/card=b"]}
    reading = """
print(open("/usr/lib/cards/library.so").read(), __import__("os").listdir("/opt/cards"))
for path in ("/usr/lib/cards/library.so", "/opt/cards/new"):
    try: open(path, "a"); print("written")
    except OSError: pass
"""
    making = """
import os, stat
for number in (os.makedev(1, 1), os.makedev(1, 7), os.makedev(8, 0)):
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        try: os.mknod("/tmp/made", kind | 0o666, number); print("made", number)
        except OSError: pass
"""
    async with service(small_store, cdi_dirs=[str(tmp_path)], pools={"cards": pool}) as (_, client):
        used = await python(client, USING)
        again = await python(client, USING)
        read = await python(client, reading)
        made = await python(client, making)
        others = await client.call("bash", "ls /dev; test -e /dev/cards && echo there", **PATIENT)

    devices, numbers, env = json.loads(used.stdout)
    assert (devices, env) == ({"a": "ENOSPC", "b": "ENOSPC"}, "yes")
    assert {tuple(number) for number in numbers} <= OWN, "nothing beside what everybody has, and what was described"
    assert again.stdout == used.stdout
    assert again.worker == used.worker, "using it dirties no place"
    assert read.stdout == "of the host ['below']\n"
    assert made.stdout == ""
    assert "there" not in others.stdout.split()


async def test_an_exclusive_device_is_nobody_elses(small_store: Path, tmp_path: Path) -> None:
    describe(tmp_path, "cards.json")
    names = ["dsec.test/card=a", "dsec.test/card=b"]
    settings: dict[str, Any] = {
        "cdi_dirs": [str(tmp_path)],
        "places_max": 8,
        "pools": {
            "own": {"type": "python", "devices": names, "device_mode": "exclusive"},
            "other": {"type": "bash", "devices": names[:1], "device_mode": "exclusive"},
        },
    }
    slow = USING + "\nimport time; time.sleep(0.3)"
    results: list[CallResult] = []
    async with service(small_store, **settings) as (place, client):
        async with asyncio.timeout(120):
            while len({result.worker for result in results}) < 2:  # one may have done all before the other was there
                results += await asyncio.gather(*(python(client, slow) for _ in range(6)))
        status, wait_s, said = await post(place, {"type": "bash", "code": "true", "environment": {"base": ENVIRONMENT}})

    by_place = {(result.worker, tuple(json.loads(result.stdout)[0])) for result in results}
    assert sorted(devices for _, devices in by_place) == [("a",), ("b",)], "each place has one, and keeps it"
    assert (status, said["code"]) == (429, "no_capacity"), said
    assert int(wait_s) >= 1


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"path": "/dev/x", "hostPath": "/dev/none-such"}, "none-such"),
        ({"path": "/dev/x", "hostPath": "/etc/passwd"}, "no character device"),
        ({"path": "/dev/x", "hostPath": "/dev/null", "major": 1, "minor": 7}, "says otherwise"),
        ({"path": "/dev/kmsg", "hostPath": "/dev/kmsg"}, "1:11"),
        ({"path": "/dev/null", "hostPath": "/dev/full"}, "/dev/null"),
        ({"path": "/etc/x", "hostPath": "/dev/full"}, "/etc/x"),
    ],
)
async def test_what_cannot_be_given_is_refused(
    small_store: Path, tmp_path: Path, node: dict[str, Any], why: str
) -> None:
    describe(tmp_path, "cards.json", deviceNodes=[node])
    pool = {"type": "bash", "devices": ["dsec.test/card=a"]}
    async with service(small_store, cdi_dirs=[str(tmp_path)], pools={"cards": pool}) as (place, client):
        with pytest.raises(Exception, match=why):
            await client.call("bash", "true", **PATIENT)
        await eventually(lambda: not place.cgroup_files("sbx_*"))


# ---- how many there are ----------------------------------------------------------------------------------------------


async def test_places_are_kept_ready_and_others_go_when_nobody_calls(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.backends.fncall.calls._LOOK_S", 0.05)
    kept = {"environment": ENVIRONMENT, "type": "python", "places_min": 1, "places_max": 3}
    async with service(small_store, idle_s=0.2, places_max=4, pools={"kept": kept}) as (_, client):
        await pool_is(client, lambda pool: pool.idle == 1)
        long = [
            asyncio.create_task(python(client, "import time; time.sleep(600)", run_timeout_s=600)) for _ in range(4)
        ]
        await pool_is(client, lambda pool: (pool.busy, pool.queued, pool.starting) == (3, 1, 0))
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await pool_is(client, lambda pool: (pool.busy, pool.queued, pool.starting) == (0, 0, 0) and pool.idle == 1)
        results = [await python(client, "print(1)") for _ in range(3)]

    assert len({result.worker for result in results if result.ok}) == 1


async def test_a_place_is_replaced_after_so_many_calls_and_when_it_is_old(small_store: Path) -> None:
    pool = {"places_max": 1}
    async with service(
        small_store, pools={"few": {**pool, "type": "bash", "calls_max": 2}, "old": {**pool, "age_s_max": 0.001}}
    ) as (_, client):
        few = [(await client.call("bash", "true", **PATIENT)).worker for _ in range(4)]
        old = [(await client.call("sh", "true", **PATIENT)).worker for _ in range(2)]

    assert few[0] == few[1]
    assert few[2] == few[3]
    assert few[1] != few[2]
    assert old[0] != old[1]


# ---- when they break -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["the interpreter", "the fork that waits", "what runs calls"])
async def test_a_place_that_broke_before_the_code_was_begun_costs_no_call(small_store: Path, part: str) -> None:
    with private_place(small_store) as place:
        place.settings["calls"] = {"places_max": 2}
        async with served(place) as (node, client):
            await check(node, place, client, part)


async def check(service: LocalService, place: Place, client: AsyncClient, part: str) -> None:
    first = await python(client, "print(1)")
    zygotes = lambda: processes_of(place, b"/.dsec/zygote.py")  # noqa: E731
    await pool_is(client, lambda pool: (pool.idle, pool.busy) == (1, 0))  # an answer does not wait for the clean-up
    await eventually(lambda: len(zygotes()) == 2)
    pid = {
        "the interpreter": zygotes()[0],
        "the fork that waits": zygotes()[1],
        "what runs calls": processes_of(place, b"/.dsec/dsec-call")[0],
    }[part]
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: pid not in processes_of(place, b"/.dsec/"))
    if part == "what runs calls":  # until the node knows, nobody can say what became of an order
        (idle,) = [list(pool.idle) for pool in service.node.calls._pools.values()]
        await eventually(lambda: not any(worker.alive for worker in idle))
    second = await python(client, "print(open('/proc/self/stat').read().split()[0])", files={"once": "x"})

    assert first.ok
    assert second.ok, second
    assert second.worker != first.worker


async def test_a_place_that_does_not_do_well_is_given_up_before_a_call_comes(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.backends.fncall.calls._LOOK_S", 0.02)
    monkeypatch.setattr(pools, "_CHECK_S", 0.0)
    async with service(small_store, places_max=1) as (place, client):
        first = await python(client, "")
        for _ in range(20):
            await asyncio.sleep(0.01)
        second = await python(client, "")
        await eventually(lambda: len(processes_of(place, b"/.dsec/zygote.py")) == 2)
        os.kill(processes_of(place, b"/.dsec/zygote.py")[0], signal.SIGKILL)
        await pool_is(client, lambda pool: pool.retired > 0)
        third = await python(client, "")

    assert first.worker == second.worker, "being asked spoils none"
    assert third.ok
    assert third.worker != first.worker


async def test_what_an_environment_lacks_is_found_out_once(small_store: Path) -> None:
    async with service(small_store, places_max=1) as (_, client):
        assert (await python(client, "")).ok
        for _ in range(5):
            with pytest.raises(UnsupportedError, match="rustc"):
                await client.call("rust", "fn main() {}", **PATIENT)
        await pool_is(client, lambda pool: pool.idle == 1, "rust")
        rust = await pool_of(client, "rust")
        assert (await python(client, "")).ok
        with pytest.raises(UnsupportedError):
            await client.call("bash", "", **PATIENT, env={"PATH": "/nowhere"})
        assert (await client.call("bash", "true", **PATIENT)).ok, (
            "what one call asks for is no fault of the environment"
        )

    assert (rust.calls, rust.retired) == (1, 0), "one call was in a place, and it is as good as before"


async def test_the_next_call_waits_for_clean_up(small_store: Path) -> None:
    """Thousands of files are left: who called has their answer, and the next one finds none of them."""
    leaving = "\nfor n in range(20_000): open(f'/tmp/{n}', 'w').close()"
    async with service(small_store, places_max=1, place_memory_bytes="256MiB") as (_, client):
        first = await python(client, leaving, pids=4)
        second = await python(client, "import os; print(os.listdir('/tmp'))")

    assert first.status is CallStatus.FINISHED, first
    assert second.stdout == "[]\n"
    assert second.worker == first.worker
