"""Lists of what lies on single nodes, of a whole cluster; and what is asked of one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec.core.errors import InvalidArgumentError, NodeRetiredError, UnavailableError
from dsec.core.ids import NodeId
from dsec.node.service import Service
from dsec.testing.nodes import FakeEnvironments, make_fake_node
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import NodeLoad
from tests.contract.served import Served, serve


class Several:
    """Routes by node (`cluster.rpc.Rpc`)."""

    def __init__(self, services: dict[NodeId, Service]) -> None:
        self.services = services
        self.away: set[NodeId] = set()

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        if node in self.away:
            raise UnavailableError(f"node {node} is away")
        if node not in self.services:
            raise NodeRetiredError(f"no node {node}")
        return await self.services[node].call(method, body, caller=caller, key=key, timeout_s=timeout_s)

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        raise NotImplementedError

    def load(self, node: NodeId) -> NodeLoad | None:
        return None

    async def close(self) -> None:
        pass


@pytest.fixture
async def cluster(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Served, Several]]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number, names in enumerate((("base", "one"), ("base", "two"))):
            node = make_fake_node(short_tmp / str(number), environments=FakeEnvironments(names))
            await node.start()
            stack.push_async_callback(node.close)
            nodes.append(node)
        rpc = Several({node.id: Service(node) for node in nodes})
        served = await stack.enter_async_context(serve(Service(nodes[0]), nodes[0].id, short_tmp))
        object.__setattr__(served.server._config.app.services, "rpc", rpc)  # type: ignore[union-attr]

        def all_nodes() -> Sequence[NodeId]:
            return sorted(rpc.services)

        monkeypatch.setattr(served.fleet, "nodes", all_nodes)
        yield served, rpc


async def get(served: Served, path: str, **headers: str) -> Any:
    async with served.local.get(path, headers=headers) as answer:
        return await answer.json()


async def test_environments_are_told_once_with_the_nodes_that_have_them(cluster: tuple[Served, Several]) -> None:
    served, rpc = cluster
    one, two = sorted(rpc.services)
    first = next(iter(rpc.services))

    page = await get(served, "/v1/environments")
    where = {info["name"]: info["nodes"] for info in page["environments"]}
    assert where["base"] == [one, two]
    assert (where["one"], where["two"]) == ([first], [two if first == one else one])

    named = await get(served, "/v1/environments", **{"Dsec-Node": first})
    assert [info["name"] for info in named["environments"]] == ["base", "one"]
    rpc.away.add(first)
    page = await get(served, "/v1/environments")
    assert page["missing"] == [first]
    assert "one" not in {info["name"] for info in page["environments"]}
    assert (await get(served, "/v1/environments", **{"Dsec-Node": first}))["code"] == "unavailable"


async def test_snapshots_of_all_nodes_come_in_pages(cluster: tuple[Served, Several]) -> None:
    served, rpc = cluster
    made: list[tuple[str, str]] = []
    for node, service in rpc.services.items():
        for _ in range(3):
            caller = Caller(principal="p", project="/", rights=frozenset({"use", "read"}))
            made.append((node, await _snapshot(service, caller)))

    seen: list[tuple[str, str]] = []
    cursor = ""
    while True:
        page = await get(served, f"/v1/snapshots?limit=2{cursor}")
        seen += [(snapshot["node"], snapshot["id"]) for snapshot in page["snapshots"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(seen) == sorted(made)

    for _, id in made:  # found without its node being named
        assert (await get(served, f"/v1/snapshots/{id}"))["id"] == id
    assert (await get(served, "/v1/snapshots/nothing"))["code"] == "not_found"
    away, other = rpc.services
    rpc.away.add(away)
    assert (await get(served, "/v1/snapshots/nothing"))["code"] == "unavailable"
    for node, id in made:
        if node == other:
            assert (await get(served, f"/v1/snapshots/{id}"))["id"] == id
    rpc.away.clear()
    assert (await get(served, "/v1/volumes"))["volumes"] == []


async def _snapshot(service: Service, caller: Caller) -> str:
    from dsec.testing.nodes import FAKE_SPEC
    from dsec.wire.codec import pack, unpack
    from dsec.wire.records import CreateRequest, Sandbox
    from dsec.wire.snapshots import SnapshotInfo, SnapshotRequest, SnapshotTake

    body = await service.call(Method.CREATE, pack(CreateRequest(spec=FAKE_SPEC)), caller=caller, key=None, timeout_s=30)
    take = SnapshotTake(unpack(body, Sandbox).id, SnapshotRequest())
    answer = await service.call(Method.SNAPSHOT_TAKE, pack(take), caller=caller, key=None, timeout_s=30)
    return unpack(answer, SnapshotInfo).id


async def test_a_client_of_one_node_says_so_of_all_it_asks(cluster: tuple[Served, Several]) -> None:
    served, rpc = cluster
    first, second = rpc.services
    async with dsec.AsyncClient(f"unix://{served.socket}", node=first) as client:
        assert [info.name for info in await client.environments.list()] == ["base", "one"]
        sandbox = await client.create("base", backend="fake")
        assert sandbox.info.node == first
        await sandbox.destroy()
    async with dsec.AsyncClient(f"unix://{served.socket}", node=second) as client:
        with pytest.raises(dsec.errors.UnsupportedError, match="to be on node"):  # served.fleet has the first alone
            await client.create("base", backend="fake")
    with pytest.raises(InvalidArgumentError):
        dsec.AsyncClient(f"unix://{served.socket}", node="no node")


async def test_lists_name_the_nodes_that_are_not_even_asked(
    cluster: tuple[Served, Several], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, rpc = cluster
    first = next(iter(rpc.services))
    monkeypatch.setattr(served.fleet, "silent", lambda: [NodeId("zzzzzzzz")])

    for path in ("environments", "volumes", "snapshots"):
        assert (await get(served, f"/v1/{path}"))["missing"] == ["zzzzzzzz"]
        assert (await get(served, f"/v1/{path}", **{"Dsec-Node": first}))["missing"] == []
    async with dsec.AsyncClient(f"unix://{served.socket}") as client:
        for part in (client.environments, client.volumes, client.snapshots):
            missing: set[str] = set()
            await part.list(missing=missing)  # type: ignore[attr-defined]
            assert missing == {"zzzzzzzz"}
