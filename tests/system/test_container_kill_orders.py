"""kill -9 of node, launcher, an agent and a client, one right after the other, in any order: while commands print and
files are sent and fetched. What was not killed itself goes on, whole; what was is said to have been."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, GoneError
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_container_kills import COUNT, lines_of

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

VICTIMS = ("node", "launcher", "agent", "client")
LINES = 200
FETCHED = os.urandom(2 << 20)
# Sends a file again and again; each is whole, or is not there.
_CLIENT = """
import sys, dsec
sandbox = dsec.Client(sys.argv[1]).connect(sys.argv[2])
sandbox.files.mkdir('/tmp/sent')
print('ready', flush=True)
while True:
    sandbox.files.write('/tmp/sent/file', bytes(8 << 20))
"""


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@dataclass
class World:
    """A node in a process of its own, sandboxes in which commands count, one that loses its agent, and one client."""

    place: Place
    client: AsyncClient
    counting: list[tuple[AsyncSandbox, AsyncProcess]]
    doomed: AsyncSandbox
    target: AsyncSandbox
    sender: subprocess.Popen[bytes]
    transfers: list[asyncio.Task[str]] = field(default_factory=list)
    fetches: list[asyncio.Task[int]] = field(default_factory=list)

    async def kill(self, victim: str) -> None:
        if victim == "node":
            self.place.kill_node()
            self.place.start_process()  # not waited for: what follows comes while it takes over
        elif victim == "launcher":
            await eventually(self._has_launcher)
            self.place.kill_launcher()
        elif victim == "agent":
            for procs in self.place.cgroup_files(f"{self.doomed.id}/agent/cgroup.procs"):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
        else:
            self.sender.kill()
            self.sender.wait(60)

    async def _has_launcher(self) -> bool:
        """One that was killed is followed by another when there is something for it to do."""
        if self.place.launcher_pid() is None:
            with contextlib.suppress(DsecError):
                await (await self.client.create(ENVIRONMENT)).destroy()
        return self.place.launcher_pid() is not None


async def begin(place: Place, client: AsyncClient, count: int) -> World:
    place.start_process()
    await place.ready(client)
    made = await client.create_many(count + 2, ENVIRONMENT, memory="64MiB")
    doomed, target, *rest = [box for box in made if not isinstance(box, DsecError)]
    assert len(rest) == count
    await doomed.start("echo begun; sleep 1000")
    sender = await asyncio.to_thread(start_sending, place, target.id)
    await asyncio.gather(*(box.files.write("/root/fetched", FETCHED) for box in rest))
    counting = [(box, await box.start(COUNT.format(lines=LINES, code=number % 7))) for number, box in enumerate(rest)]
    world = World(place, client, counting, doomed, target, sender)
    world.transfers = [asyncio.create_task(send(box)) for box in rest]
    world.fetches = [asyncio.create_task(fetch(box)) for box in rest]
    return world


def start_sending(place: Place, target: str) -> subprocess.Popen[bytes]:
    """A client in a process of its own, in the middle of it."""
    command = [sys.executable, "-c", _CLIENT, place.url, target]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert sender.stdout is not None
    assert sender.stdout.readline() == b"ready\n"
    return sender


async def send(sandbox: AsyncSandbox) -> str:
    """What came of it: it is whole, or an error of ours says that it is not."""
    try:
        await sandbox.files.mkdir("/tmp/sent")
        await sandbox.files.write("/tmp/sent/file", bytes(4 << 20))
    except DsecError as error:
        return error.code
    return "done"


async def fetch(sandbox: AsyncSandbox) -> int:
    """How often it came whole: it does, or an error of ours says that it did not."""
    came = 0
    for _ in range(8):
        with contextlib.suppress(DsecError):
            assert await sandbox.files.read_bytes("/root/fetched") == FETCHED
            came += 1
    return came


async def check(world: World) -> None:
    place, client = world.place, world.client
    await place.ready(client)
    told = await asyncio.gather(*world.transfers)
    came = await asyncio.gather(*world.fetches)
    assert sum(came) > 0
    for number, (box, process) in enumerate(world.counting):
        result = await (await box.attach(process.id)).wait(120)
        assert (result.status, result.exit_code, result.gaps) == ("exited", number % 7, []), result.summary()
        assert lines_of(result.stdout) == lines_of(result.stderr) == list(range(1, LINES + 1))
        sizes = (await box.exec("ls -A /tmp/sent 2>/dev/null; wc -c < /tmp/sent/file 2>/dev/null")).stdout.split()
        assert sizes in ([], ["file", str(4 << 20)]), sizes
        assert sizes or told[number] != "done"
    await world.kill("client")

    async def nothing_half_sent() -> bool:
        return set((await world.target.exec("ls -A /tmp/sent")).stdout.split()) <= {"file"}

    await eventually(nothing_half_sent)


async def check_the_doomed(world: World) -> None:
    async def failed() -> bool:
        return (await world.doomed.refresh()).state == "failed"

    await eventually(failed)
    assert world.doomed.info.cause == "sandbox_fault"
    with pytest.raises(GoneError):
        await world.doomed.exec("true")


async def end(world: World) -> None:
    """Nothing of any of them is left, and the place is as good as new."""
    for box in await world.client.list():
        await box.destroy()
    await eventually(lambda: not running(world.place))
    async with await world.client.create(ENVIRONMENT) as another:
        assert (await another.exec("echo works")).stdout == "works\n"
    sandboxes = world.place.state / "sandboxes"
    await eventually(lambda: not [path for path in sandboxes.iterdir() if path.name.startswith("sbx_")])


def running(place: Place) -> list[str]:
    found: list[str] = []
    for procs in place.cgroup_files("sbx_*/**/cgroup.procs"):
        with contextlib.suppress(OSError):
            found += procs.read_text().split()
    return found


async def live_through(place: Place, order: Sequence[str], count: int) -> None:
    async with AsyncClient(place.url) as client:
        world = await begin(place, client, count)
        try:
            for victim in order:
                await world.kill(victim)
            await check(world)
            if "agent" in order:
                await check_the_doomed(world)
            await end(world)
        finally:
            world.sender.kill()
            world.sender.wait(60)
            assert world.sender.stdout is not None
            world.sender.stdout.close()
            tasks = [*world.transfers, *world.fetches]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_are_killed_in_one_order_or_another(place: Place, rng: random.Random) -> None:
    await live_through(place, rng.sample(VICTIMS, len(VICTIMS)), 4)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("order", list(itertools.permutations(VICTIMS)), ids="-".join)
async def test_all_are_killed_in_every_order_with_fifty_sandboxes(place: Place, order: Sequence[str]) -> None:
    await live_through(place, order, 48)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "order",
    [
        ("node", "node"),
        ("node", "node", "agent", "node"),
        ("node", "launcher", "node", "launcher"),
        ("launcher", "launcher", "node"),
        ("launcher", "node", "launcher", "node", "agent", "client"),
    ],
    ids="-".join,
)
async def test_what_takes_over_is_killed_as_well(place: Place, order: Sequence[str]) -> None:
    await live_through(place, order, 16)
