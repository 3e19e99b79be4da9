"""A sandbox that began without what costs most while idle is, once used, as every other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from dsec.backends.base import InstanceSpec
from dsec.backends.container import backend as container_backend
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.plan import HostFacts, plan_launch
from dsec.core.errors import CapacityError
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.wire.launch import LaunchPlan
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# What a command can tell of its place. Names of namespaces are another's in each sandbox, and numbers of mounts.
_LOOK = r"""
import os, re, stat
for line in sorted(line.split(" ", 3)[3] for line in open("/proc/self/mountinfo")):
    print(re.sub(r"[ug]id=\d+|upperdir=[^,]*", "", line), end="")
print(*[line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs", "Seccomp"))])
for name in ("kernel/shmall", "kernel/shmmni", "kernel/sem", "kernel/msgmni", "fs/mqueue/queues_max"):
    print(name, open("/proc/sys/" + name).read())
print(*[line.split(":")[0] for line in open("/proc/net/dev")])
for name in ("/dev/pts", "/dev/pts/ptmx", "/dev/mqueue"):
    found = os.stat(name)
    print(name, stat.filemode(found.st_mode), found.st_uid, found.st_gid)
"""
_USE = 'import os; open("/dev/mqueue/one", "x"); print(os.ttyname(1), *os.listdir("/dev/mqueue"))'
_ADMIN = 1 << 12 | 1 << 21  # NET_ADMIN, SYS_ADMIN


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def light(small_store: Path) -> AsyncIterator[tuple[Place, LocalService, AsyncClient]]:
    """Every sandbox but the first of a place is light."""
    with private_place(small_store, settings={"container": {"light_from": 1}}) as place:
        async with served(place) as (service, client):
            await (await client.create(ENVIRONMENT)).destroy()  # what stays for all of them
            async with place.no_leaks():
                yield place, service, client


def _agent(service: LocalService, sandbox: AsyncSandbox) -> Path:
    row = service.node.registry.find(sandbox.id)
    return Path(f"/proc/{row.instance.facts.pid}")  # type: ignore[union-attr]


def _namespace(process: Path, kind: str) -> str:
    return str((process / "ns" / kind).readlink())


def _capabilities(agent: Path) -> dict[str, int]:
    lines = (line.partition(":") for line in (agent / "status").read_text().splitlines())
    return {name: int(value, 16) for name, _, value in lines if name.startswith("Cap")}


async def test_a_link_is_in_the_network_of_its_sandbox(light: tuple[Place, LocalService, AsyncClient]) -> None:
    _, _, client = light
    members = {"db": {"environment": ENVIRONMENT}, "web": {"environment": ENVIRONMENT, "after": ["db"]}}
    async with await client.groups.create(members, links=["db:5432"]) as group:
        web = await group.sandbox("web")
        taken = await web.exec(["python3", "-c", "import socket; socket.create_server(('127.77.0.1', 5432))"])

    assert "Address already in use" in taken.stderr


async def test_what_a_light_sandbox_begins_without_is_there_once_it_is_used(
    light: tuple[Place, LocalService, AsyncClient],
) -> None:
    _, service, client = light
    async with await client.create(ENVIRONMENT) as whole, await client.create(ENVIRONMENT) as first:
        async with await client.create(ENVIRONMENT) as second:
            agents = [_agent(service, sandbox) for sandbox in (first, second)]
            kinds = ("net", "ipc")
            before = [[_namespace(agent, kind) for kind in kinds] for agent in agents]
            host = [_namespace(Path("/proc/self"), kind) for kind in kinds]
            mounted = (agents[0] / "mountinfo").read_text()

            looks = [(await sandbox.exec(["python3", "-c", _LOOK])).stdout for sandbox in (whole, first, second)]

            after = [[_namespace(agent, kind) for kind in kinds] for agent in agents]
            held = [_capabilities(agent) for agent in (_agent(service, whole), *agents)]

    assert before[0] == before[1], "both begin in the same, which hold nothing"
    assert not set(before[0]) & set(host)
    assert "/dev/pts" not in mounted
    assert "/dev/mqueue" not in mounted
    assert len({*host, *before[0], *after[0], *after[1]}) == 8, "each has its own afterwards"
    assert "devpts" in looks[0]
    assert looks[1] == looks[0]
    assert looks[2] == looks[0]
    # The right to make them has gone for good. Of the ambient set, which nothing is started with, nothing is left.
    assert all(value & _ADMIN == 0 for capabilities in held for value in capabilities.values())
    assert {**held[1], "CapAmb": held[0]["CapAmb"]} == held[0]


async def test_what_asks_for_nothing_of_the_inside_leaves_a_sandbox_light(
    light: tuple[Place, LocalService, AsyncClient],
) -> None:
    _, service, client = light
    async with await client.create(ENVIRONMENT), await client.create(ENVIRONMENT) as sandbox:
        agent = _agent(service, sandbox)
        before = _namespace(agent, "net")

        await sandbox.metrics()
        await sandbox.pause()
        await sandbox.resume()

        assert _namespace(agent, "net") == before
        await sandbox.files.write("/tmp/file", b"x")
        assert _namespace(agent, "net") != before


async def test_a_terminal_and_a_queue_work_in_a_light_sandbox(light: tuple[Place, LocalService, AsyncClient]) -> None:
    client = light[2]
    async with await client.create(ENVIRONMENT), await client.create(ENVIRONMENT) as sandbox:
        result = await sandbox.exec(["python3", "-c", _USE], tty=True)

    assert result.exit_code == 0
    assert result.stdout.split() == ["/dev/pts/0", "one"]


async def test_a_light_sandbox_that_cannot_have_its_network_says_so_each_time(
    light: tuple[Place, LocalService, AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stingy(instance: InstanceSpec, config: ContainerConfig, facts: HostFacts, *, id_base: int) -> LaunchPlan:
        plan = plan_launch(instance, config, facts, id_base=id_base)
        return msgspec.structs.replace(plan, sysctls={**plan.sysctls, "user.max_net_namespaces": "0"})

    client = light[2]
    async with await client.create(ENVIRONMENT):
        monkeypatch.setattr(container_backend, "plan_launch", stingy)
        async with await client.create(ENVIRONMENT) as sandbox:
            for _ in range(2):
                with pytest.raises(CapacityError, match="namespaces") as caught:
                    await sandbox.exec(["true"])
                assert caught.value.detail["errno"] == "ENOSPC"
