"""Root inside a container, with a shell and Python, reaches nothing that is not its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.backends.base import InstanceSpec
from dsec.backends.container import backend as container_backend
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.plan import HostFacts, plan_launch
from dsec.sdk.client import AsyncClient
from dsec.serve.service import LocalService
from dsec.testing.processes import all_processes
from dsec.testing.waiting import eventually
from dsec.wire.launch import LaunchPlan
from tests.security import container_probes
from tests.security.weakenings import WEAKENINGS
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

_PROGRAM = Path(container_probes.__file__).parent
_MEMORY = 512 << 20
_NAMESPACES = {"mount": "-m", "uts": "-u", "ipc": "-i", "net": "-n", "pid": "-p", "cgroup": "-C", "user": "-U"}

# What `privilege_gain=True` asks for, and all that it gives: the bit itself, and programs that raise their own user.
GAINED = {"no_new_privileges_is_off", "rise_by_a_set_user_id_program", "rise_by_file_capabilities"}


@dataclass
class Attacked:
    """A service with one sandbox, and what of the host the attempts are told to look for."""

    place: Place
    service: LocalService
    client: AsyncClient
    facts: dict[str, Any]
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    # Of the last attack: another name when it was a spare before.
    sandbox: str = ""
    launched_as: str = ""

    async def attack(self, *names: str, privilege_gain: bool = False) -> dict[str, dict[str, str]]:
        sandbox = await self.client.create(ENVIRONMENT, memory=_MEMORY, cpu=1, pids=256, privilege_gain=privilege_gain)
        try:
            row = self.service.node.registry.find(sandbox.id)
            self.sandbox, self.launched_as = sandbox.id, row.instance.facts.launched_as  # type: ignore[union-attr]
            await sandbox.upload(_PROGRAM, "/probes/container_probes")
            command = ["python3", "-m", "container_probes", *names]
            result = await sandbox.exec(command, cwd="/probes", stdin=json.dumps(self.facts), timeout_s=100)
            assert result.exit_code == 0, result.stderr
            verdicts: dict[str, dict[str, str]] = json.loads(result.stdout)
            return verdicts
        finally:
            await sandbox.destroy()

    async def attack_outside(self, namespaces: str, *names: str) -> dict[str, dict[str, str]]:
        """Made as root, in the other namespaces of a sandbox: only such attempts as do the host no harm."""
        async with await self.client.create(ENVIRONMENT, memory="512MiB", pids=256) as sandbox:
            await sandbox.upload(_PROGRAM, "/probes/container_probes")
            entered = [flag for kind, flag in _NAMESPACES.items() if kind not in namespaces.split()]
            if "-m" in entered:
                entered.append("-r")  # below it there is nothing
            directory, python = ("/probes", "python3") if "-m" in entered else (str(_PROGRAM.parent), sys.executable)
            process = await asyncio.create_subprocess_exec(
                *("nsenter", "-t", str(_agent_pid(sandbox.id)), *entered),
                *("sh", "-c", _RUN, directory, python, "-m", "container_probes", *names),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            )
            said, _ = await asyncio.wait_for(process.communicate(json.dumps(self.facts).encode()), 100)
            assert process.returncode == 0
            verdicts: dict[str, dict[str, str]] = json.loads(said)
            return verdicts


_RUN = 'cd "$0" && exec "$@"'


def _agent_pid(sandbox: str) -> int:
    """As the host sees it."""
    for pid in all_processes():
        with contextlib.suppress(OSError):
            if sandbox in Path(f"/proc/{pid}/cgroup").read_text():
                ids = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
                if len(ids) > 1 and ids[-1] == "1":
                    return pid
    raise AssertionError(f"no agent of {sandbox}")


@pytest.fixture(scope="module")
def host_facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Things of the host that exist while the attempts are made, each of which would answer if it were reached."""
    secret = tmp_path_factory.mktemp("host") / "secret"
    secret.write_text("of the host")
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "big") + 1
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as abstract:
        port.bind(("127.0.0.1", 0))
        port.listen()
        name = f"dsec-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield {
            "host_pid": os.getpid(),
            "port": port.getsockname()[1],
            "abstract": name,
            "shm_key": key,
            "file": str(secret),
            "id_base": 0x7000_0000,
            "memory_bytes": _MEMORY,
            "cpus": 1,
        }
    libc.shmctl(segment, 0, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(host_facts: dict[str, Any], small_store: Path) -> AsyncIterator[Attacked]:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            facts = {**host_facts, "cgroup_parent": place.name, "directory": str(place.directory)}
            found = Attacked(place, service, client, facts)
            found.verdicts = await found.attack()
            yield found


async def test_an_attempt_from_inside_a_claimed_spare_is_refused(host_facts: dict[str, Any], small_store: Path) -> None:
    """All of them at once: a spare is confined before anybody knows whose it will be."""
    with private_place(small_store, settings={"node": {"warm": {"spares_max": 2, "low": 1, "high": 1}}}) as place:
        async with served(place) as (service, client):
            facts = {**host_facts, "cgroup_parent": place.name, "directory": str(place.directory)}
            found = Attacked(place, service, client, facts)
            for _ in range(2):
                await (await client.create(ENVIRONMENT, memory=_MEMORY, cpu=1, pids=256)).destroy()
            await eventually(lambda: len(service.node.warm) > 0)
            verdicts = await found.attack()
            claimed = found.launched_as != found.sandbox

    assert claimed
    assert verdicts.keys() == set(container_probes.PROBES)
    assert {name: one for name, one in verdicts.items() if one["verdict"] != "blocked"} == {}


async def test_an_attempt_from_inside_a_sandbox_that_began_light_is_refused(
    host_facts: dict[str, Any], small_store: Path
) -> None:
    """All of them at once: its agent had rights over the sandbox's namespaces until the first command."""
    with private_place(small_store, settings={"container": {"light_from": 0}}) as place:
        async with served(place) as (service, client):
            facts = {**host_facts, "cgroup_parent": place.name, "directory": str(place.directory)}
            verdicts = await Attacked(place, service, client, facts).attack()

    assert verdicts.keys() == set(container_probes.PROBES)
    assert {name: one for name, one in verdicts.items() if one["verdict"] != "blocked"} == {}


@pytest.mark.parametrize("name", container_probes.PROBES)
async def test_an_attempt_from_inside_is_refused(attacked: Attacked, name: str) -> None:
    verdict = attacked.verdicts[name]

    assert verdict["verdict"] == "blocked", verdict["detail"]


async def test_where_privileges_may_be_gained_nothing_but_that_changes(attacked: Attacked) -> None:
    verdicts = await attacked.attack(privilege_gain=True)

    other = {name: found["detail"] for name, found in verdicts.items() if found["verdict"] != "blocked"}
    assert other.keys() == GAINED, other


@pytest.mark.parametrize("name", WEAKENINGS)
async def test_attempts_get_further_where_a_line_of_defence_is_missing(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weak = WEAKENINGS[name]

    def weaker(instance: InstanceSpec, config: ContainerConfig, facts: HostFacts, *, id_base: int) -> LaunchPlan:
        return msgspec.structs.replace(plan_launch(instance, config, facts, id_base=id_base), **weak.changes)

    monkeypatch.setattr(container_backend, "plan_launch", weaker)
    if weak.outside:
        verdicts = await attacked.attack_outside(weak.outside, *weak.attempts())
    else:
        verdicts = await attacked.attack(*weak.attempts())

    # One that fails by now has come to what lies behind: the kernel does not know it, or finds its arguments wrong.
    assert {name: found for name, found in verdicts.items() if found["verdict"] == "blocked"} == {}
    assert "allowed" in {found["verdict"] for found in verdicts.values()}
