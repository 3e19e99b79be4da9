"""Usage over HTTP, by command, and of several nodes together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dsec
from dsec.api.routes.usage import get_usage
from dsec.core.errors import UnavailableError
from dsec.core.ids import NodeId
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.wire.codec import from_json
from dsec.wire.node import Caller, Method
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef
from dsec.wire.usage import UsagePage
from tests.contract.sdk_service import RunningService

DEFAULTS = {"job": None, "project": None, "since": 0.0, "until": None, "by": "project", "limit": 100, "cursor": None}


class Nodes:
    """Several nodes as the routes see them."""

    def __init__(self, nodes: dict[NodeId, NodeClient]) -> None:
        self.nodes = nodes
        self.away: set[NodeId] = set()

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        if node in self.away:
            raise UnavailableError("it is away")
        return await self.nodes[node].service.call(method, body, caller=caller, key=key, timeout_s=timeout_s)

    async def ask(self, **query: Any) -> UsagePage:
        admission = SimpleNamespace(nodes=lambda: list(self.nodes))
        request: Any = SimpleNamespace(
            services=SimpleNamespace(rpc=self, admission=admission), caller=caller_of("/team"), query=DEFAULTS | query
        )
        return from_json((await get_usage(request)).body, UsagePage)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(fake_node(tmp_path / str(number))) for number in range(3)]
        yield Nodes({client.service._node.id: client.of(caller_of("/team")) for client in clients})


async def some(client: NodeClient, ended: int, alive: int) -> list[str]:
    made = [await client.call(Method.CREATE, CreateRequest(spec=FAKE_SPEC), Sandbox) for _ in range(ended + alive)]
    for sandbox in made[:ended]:
        await client.call(Method.DESTROY, SandboxRef(sandbox.id), Sandbox)
    return [sandbox.id for sandbox in made]


async def test_totals_of_nodes_are_added_and_one_that_is_away_is_named(cluster: Nodes) -> None:
    for number, client in enumerate(cluster.nodes.values()):
        await some(client, number, 1)
    first = min(cluster.nodes)

    whole = await cluster.ask()
    by_day = await cluster.ask(by="day")
    cluster.away.add(first)
    part = await cluster.ask()

    assert [(total.project, total.sandboxes) for total in whole.totals] == [("/team", 6)]
    assert sum(total.sandboxes for total in by_day.totals) == 6
    assert part.missing == [first]
    assert part.totals[0].sandboxes < 6


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
async def test_pages_go_over_all_nodes_and_name_each_sandbox_once(cluster: Nodes, limit: int) -> None:
    ids = []
    for ended, client in zip((0, 3, 2), cluster.nodes.values(), strict=True):
        ids += await some(client, ended, ended // 2)
    found: list[str] = []
    cursor: str | None = None
    for _ in range(50):
        page = await cluster.ask(by="sandbox", limit=limit, cursor=cursor)
        assert len(page.records) <= limit
        found += [record.sandbox for record in page.records]
        cursor = page.next
        if cursor is None:
            break

    assert sorted(found) == sorted(ids)


def test_a_team_sees_what_it_has_used(service: RunningService) -> None:
    with dsec.Client(service.url) as root:
        token = root.tokens.create("u", project="/used/a").token
    with dsec.Client(f"http://127.0.0.1:{service.tcp_port}", token) as client:
        with client.create("base", backend="fake") as sandbox:
            sandbox.exec("echo hello")
        page = client.usage()
        records = client.usage(by="sandbox").records

    def cli(*arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "dsec", "usage", *arguments]
        done = subprocess.run(command, capture_output=True, env=service.environment, timeout=100)
        assert done.returncode == status, done.stderr.decode()
        return done.stdout.decode()

    assert [(total.project, total.sandboxes, total.output_bytes) for total in page.totals] == [("/used/a", 1, 6)]
    assert [record.principal for record in records] == ["u"]
    assert "/used/a" in cli("/used", "--since", "1d", "--by", "day")
    assert records[0].sandbox in cli("--by", "sandbox", "--until", "2100-01-01")
    assert json.loads(cli("/used", "--json"))["totals"][0]["sandboxes"] == 1
    cli("--since", "yesterday", status=2)
    cli("/nowhere", status=125)
    with dsec.Client(service.url) as root, pytest.raises(dsec.errors.NotFoundError, match="no project '/nowhere'"):
        root.usage("/nowhere", by="sandbox")
