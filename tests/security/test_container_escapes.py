"""Root inside a container, with a shell and Python, reaches nothing that is not its own."""

from __future__ import annotations

import ctypes
import json
import os
import socket
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
from dsec.wire.launch import LaunchPlan
from tests.security import container_probes
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

_PROGRAM = Path(container_probes.__file__).parent
_EVERY_CAPABILITY = (1 << 41) - 1

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

    async def attack(self, *names: str, privilege_gain: bool = False) -> dict[str, dict[str, str]]:
        sandbox = await self.client.create(ENVIRONMENT, memory="512MiB", pids=256, privilege_gain=privilege_gain)
        try:
            await sandbox.upload(_PROGRAM, "/probes/container_probes")
            command = ["python3", "-m", "container_probes", *names]
            result = await sandbox.exec(command, cwd="/probes", stdin=json.dumps(self.facts), timeout_s=100)
            assert result.exit_code == 0, result.stderr
            verdicts: dict[str, dict[str, str]] = json.loads(result.stdout)
            return verdicts
        finally:
            await sandbox.destroy()


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


@pytest.mark.parametrize("name", container_probes.PROBES)
async def test_an_attempt_from_inside_is_refused(attacked: Attacked, name: str) -> None:
    verdict = attacked.verdicts[name]

    assert verdict["verdict"] == "blocked", verdict["detail"]


async def test_where_privileges_may_be_gained_nothing_but_that_changes(attacked: Attacked) -> None:
    verdicts = await attacked.attack(privilege_gain=True)

    other = {name: found["detail"] for name, found in verdicts.items() if found["verdict"] != "blocked"}
    assert other.keys() == GAINED, other


# What a launch without filters, masks and bounds lets through, on any kernel. It shows that the attempts above would
# succeed if they could, so that "blocked" means something.
LET_THROUGH = [
    "capabilities_Bnd",
    "capabilities_Eff",
    "capabilities_Prm",
    "change_domain_name",
    "change_host_name",
    "chroot",
    "clone3_user_namespace",
    "clone_cgroup",
    "clone_ipc",
    "clone_mount",
    "clone_network",
    "clone_pid",
    "clone_user",
    "clone_uts",
    "contexts_of_asynchronous_io",
    "file_request_set_flags",
    "lease_on_a_program",
    "limits_of_agent_as_root",
    "mount_api_fsopen",
    "mount_api_fspick",
    "mount_bind",
    "mount_devpts",
    "mount_mqueue",
    "mount_proc",
    "mount_ramfs",
    "mount_sysfs",
    "mount_tmpfs",
    "no_new_privileges_is_off",
    "personality_without_randomisation",
    "prctl_bounding_set",
    "raise_capabilities",
    "read_proc_interrupts",
    "read_proc_iomem",
    "read_proc_swaps",
    "rise_by_a_set_user_id_program",
    "rise_by_file_capabilities",
    "scheduling_of_agent_as_root",
    "setns_mnt",
    "setns_net",
    "setns_uts",
    "socket_netlink_generic",
    "socket_netlink_uevent",
    "socket_packet",
    "socket_raw_icmp",
    "socket_raw_ipv6",
    "unshare_cgroup",
    "unshare_ipc",
    "unshare_mount",
    "unshare_network",
    "unshare_pid",
    "unshare_user",
    "unshare_uts",
    "write_proc_sys_net_ipv4_ip_forward",
]


async def test_the_same_attempts_succeed_where_the_launch_is_weakened(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weaker(instance: InstanceSpec, config: ContainerConfig, facts: HostFacts, *, id_base: int) -> LaunchPlan:
        plan = plan_launch(instance, config, facts, id_base=id_base)
        return msgspec.structs.replace(
            plan,
            filter_agent=None,
            filter_exec=None,
            masks=[],
            readonly_proc=[],
            sysctls={},
            caps_agent=_EVERY_CAPABILITY,
            caps_exec=_EVERY_CAPABILITY,
            no_new_privs=False,
        )

    monkeypatch.setattr(container_backend, "plan_launch", weaker)

    verdicts = await attacked.attack(*LET_THROUGH)

    assert {name: found for name, found in verdicts.items() if found["verdict"] != "allowed"} == {}
