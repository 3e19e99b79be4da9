"""What a container does to itself stays with it: its agent, its neighbours and the host go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError, FileError, GoneError
from dsec.core.limits import MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.security.idranges import FIRST_ID, STRIDE
from dsec.testing.processes import all_processes
from dsec.testing.waiting import eventually
from tests.patience import with_a_limit
from tests.system.container_images import make_root, plant_environment
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

_IDS = range(0x7000_0000, 0x8000_0000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(small_store: Path) -> AsyncIterator[tuple[Place, AsyncClient]]:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            yield place, client


@pytest_asyncio.fixture(loop_scope="module")
async def client(node: tuple[Place, AsyncClient]) -> AsyncClient:
    return node[1]


async def python(sandbox: AsyncSandbox, code: str, **options: Any) -> str:
    """What the code prints. It must end well."""
    result = await sandbox.exec(["python3", "-c", code], timeout_s=60, **options)
    assert result.ok, (result.summary(), result.stderr)
    return result.stdout


async def works(sandbox: AsyncSandbox) -> bool:
    return (await sandbox.exec("echo works", timeout_s=60)).stdout == "works\n"


_SIGNALS = """
import os, signal, ctypes
uid = int({uid})
if uid: os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None)
pidfd = os.pidfd_open(1)
for number in range(1, 65):
    for send in (
        lambda: os.kill(1, number),
        lambda: libc.syscall(234, 1, 1, number),
        lambda: signal.pidfd_send_signal(pidfd, number),
        lambda: os.kill(-1, number) if number == signal.SIGCONT else None,
    ):
        try: send()
        except OSError: pass
print("sent")
"""


@pytest.mark.parametrize("uid", [0, 65_535, 1000])
async def test_no_signal_from_inside_ends_or_stops_the_agent(client: AsyncClient, uid: int) -> None:
    async with await client.create(ENVIRONMENT) as sandbox:
        assert await python(sandbox, _SIGNALS.format(uid=uid)) == "sent\n"

        assert await works(sandbox)
        assert (await sandbox.refresh()).state == "running"


async def test_killing_everything_inside_leaves_the_agent_alone(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT) as sandbox:
        victim = await sandbox.start("sleep 600")

        killer = await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"])
        assert killer.ok

        assert (await victim.wait(60)).signal == 9
        assert await works(sandbox)


async def test_a_fork_bomb_meets_the_limit_and_goes_with_its_timeout(client: AsyncClient) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except BlockingIOError: pass"
    async with await client.create(ENVIRONMENT, pids=64) as sandbox, await client.create(ENVIRONMENT) as neighbour:

        async def until_the_limit(limit_s: float) -> tuple[AsyncProcess, bool]:
            running = await sandbox.start(["python3", "-c", bomb], timeout_s=limit_s)
            while (await running.info()).state == "running":
                if ((await sandbox.metrics()).pids or 0) >= 64:
                    return running, True
            return running, False

        running, met = await with_a_limit(until_the_limit, lambda found: found[1])
        assert met
        assert await works(neighbour)
        assert ((await sandbox.metrics()).pids or 0) <= 64 + 8
        assert (await running.wait(60)).timed_out

        assert await works(sandbox)


async def test_a_memory_hog_is_killed_and_the_cause_is_said(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, memory="64MiB") as sandbox:
        result = await sandbox.exec(["python3", "-c", "bytearray(1 << 30)"], timeout_s=60)

        assert (result.status, result.signal, result.cause) == ("signaled", 9, "oom")
        assert await works(sandbox)
        assert ((await sandbox.metrics()).oom_kills or 0) >= 1


async def test_memory_that_no_process_holds_fails_commands_with_the_cause(client: AsyncClient) -> None:
    """A segment outlives who made it; the kernel may choose the agent then, for it is all that there is to kill."""
    hold = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(15):
    ctypes.memset(libc.shmat(libc.shmget(0, 4 << 20, 0o600), None, 0), 1, 4 << 20)
open("/dev/shm/fill", "wb").write(bytes(30 << 20))
"""
    async with await client.create(ENVIRONMENT, memory="64MiB") as sandbox:
        assert not (await sandbox.exec(["python3", "-c", hold], timeout_s=60)).ok

        with contextlib.suppress(GoneError):
            result = await sandbox.exec(["python3", "-c", "bytearray(1 << 24)"], timeout_s=60)
            assert result.cause in ("oom", "agent_lost")
        info = await sandbox.refresh()
        assert (info.state, info.cause) in (("running", None), ("failed", "oom"))


async def test_a_full_shared_memory_is_no_end(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, memory="64MiB") as sandbox:
        result = await sandbox.exec("cat /dev/zero > /dev/shm/fill", timeout_s=60)

        assert "No space left" in result.stderr
        assert await works(sandbox)
        assert ((await sandbox.metrics()).memory_bytes or 0) <= 64 * MIB


async def test_shared_memory_is_bounded(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, memory="512MiB") as sandbox:
        result = await sandbox.exec("cat /dev/zero > /dev/shm/fill; stat -c %s /dev/shm/fill; rm /dev/shm/fill")

        assert "No space left" in result.stderr
        assert 0 < int(result.stdout) <= 64 * MIB
        assert await works(sandbox)


async def test_system_v_objects_are_bounded(client: AsyncClient) -> None:
    count = """
import ctypes
libc = ctypes.CDLL(None)
def most(make):
    made = 0
    while made < 100_000 and make() >= 0: made += 1
    return made
print(most(lambda: libc.shmget(0, 4096, 0o600)), most(lambda: libc.semget(0, 1, 0o600)))
print(most(lambda: libc.msgget(0, 0o600)), libc.shmget(0, ctypes.c_size_t(4 << 30), 0o600))
"""
    async with await client.create(ENVIRONMENT, memory="256MiB") as sandbox:
        segments, semaphores, queues, huge = map(int, (await python(sandbox, count)).split())

        assert 1 <= segments <= 256
        assert 1 <= semaphores <= 128
        assert 1 <= queues <= 256
        assert huge == -1


async def test_descriptors_are_bounded_and_others_have_theirs(client: AsyncClient) -> None:
    take = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
taken = 0
try:
    while True: os.dup(1); taken += 1
except OSError as error: pass
os.write(1, f"{taken}\\n".encode()); time.sleep(600)
"""
    async with await client.create(ENVIRONMENT) as sandbox, await client.create(ENVIRONMENT) as neighbour:
        hogs = [await sandbox.start(["python3", "-c", take]) for _ in range(4)]
        for hog in hogs:
            async for chunk in hog:
                assert 100 < int(chunk.text) < 1_100_000
                break

        assert await works(neighbour)
        assert await works(sandbox)


async def test_inotify_of_one_sandbox_is_not_that_of_others_or_the_host(client: AsyncClient) -> None:
    """Per-user limits are shared by all whose user namespace has the same owner."""
    take = """
import ctypes, time
libc = ctypes.CDLL(None)
taken = 0
while taken < 10_000 and libc.inotify_init1(0) >= 0: taken += 1
print(taken, flush=True); time.sleep(600)
"""
    one = "import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)"
    async with await client.create(ENVIRONMENT) as sandbox, await client.create(ENVIRONMENT) as neighbour:
        hog = await sandbox.start(["python3", "-c", take])
        async for chunk in hog:
            assert 1 <= int(chunk.text) < 10_000, "the limit was never met"
            break
        assert await python(sandbox, one) == "False\n"

        with pytest.raises(FileError) as refused:
            await sandbox.files.watch("/tmp")
        assert refused.value.detail["errno"] == "EMFILE"
        assert "inotify instances" in str(refused.value.hint)
        assert await works(sandbox)
        assert await python(neighbour, one) == "True\n"
        async with await neighbour.files.watch("/tmp"):
            pass
        descriptor = _host_inotify()
        assert descriptor >= 0
        os.close(descriptor)


def _host_inotify() -> int:
    import ctypes

    return int(ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC))


async def test_zombies_are_bounded_and_reaped(client: AsyncClient) -> None:
    orphans = """
import os
for _ in range(300):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
"""
    async with await client.create(ENVIRONMENT, pids=64) as sandbox:
        await python(sandbox, orphans)

        assert await works(sandbox)
        assert ((await sandbox.metrics()).pids or 0) < 20


async def test_a_processor_hog_leaves_time_for_others(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, cpu=0.2) as sandbox, await client.create(ENVIRONMENT) as neighbour:
        for _ in range(4):
            await sandbox.start("while :; do :; done")
        before = (await sandbox.metrics()).cpu_s or 0.0
        started = asyncio.get_running_loop().time()

        for _ in range(10):
            assert await works(neighbour)
            assert await works(sandbox)

        spent = ((await sandbox.metrics()).cpu_s or 0.0) - before
        assert spent <= 0.2 * (asyncio.get_running_loop().time() - started) + 0.5


async def test_the_host_sees_ids_of_the_range_only(node: tuple[Place, AsyncClient]) -> None:
    place, client = node
    async with await client.create(ENVIRONMENT) as one, await client.create(ENVIRONMENT) as other:
        bases = set()
        for sandbox in (one, other):
            await sandbox.start("exec sleep 77777")
            await sandbox.start("exec sleep 77777", user="1000:1000")
            await sandbox.exec("touch /root/mine; chown 1000:1000 /root/mine")

        def sleepers() -> list[int]:
            return [p for p, info in all_processes().items() if b"sleep\x0077777" in _line(p) and info.state != "Z"]

        await eventually(lambda: len(sleepers()) == 4)
        for pid in sleepers():
            status = Path(f"/proc/{pid}/status").read_text()
            ids = [int(word) for key in ("Uid:", "Gid:") for word in status.partition(key)[2].split()[:4]]
            assert all(id in _IDS for id in ids)
            ranges, inner = zip(*(divmod(id - FIRST_ID, STRIDE) for id in ids), strict=True)
            assert len(set(ranges)) == 1
            bases.add(ranges[0])
            assert set(inner) in ({0}, {1000})
        assert len(bases) == 2
        # On disk they are unshifted, in directories that nobody else may enter.
        found = next(iter((place.state / "sandboxes" / one.id).rglob("mine")))
        assert (found.stat().st_uid, found.stat().st_gid) == (1000, 1000)
        assert (place.state / "sandboxes").stat().st_mode & 0o077 == 0


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_devices_of_an_image_are_dead(node: tuple[Place, AsyncClient], tmp_path: Path) -> None:
    place, client = node
    root = make_root(tmp_path / "root", python=False)
    for name, kind, numbers in (("zero", 0o20666, (1, 5)), ("mem", 0o20666, (1, 1)), ("disk", 0o60666, (8, 0))):
        os.mknod(root / name, kind, os.makedev(*numbers))
        (root / name).chmod(kind)
    plant_environment(place.state, "devices", root)

    async with await client.create("devices") as sandbox:
        for name in ("zero", "mem", "disk"):
            result = await sandbox.exec(f"head -c 1 /{name}")
            assert (result.exit_code, result.stdout) == (1, ""), name
            assert "ermi" in result.stderr, result.stderr  # "Permission denied", "not permitted"
            with pytest.raises(DsecError):
                await sandbox.files.read_bytes(f"/{name}")
        assert (await sandbox.exec("stat -c %F /zero")).stdout == "character special file\n"
