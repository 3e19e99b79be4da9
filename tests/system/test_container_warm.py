"""A claimed spare is as a sandbox that was made for its caller, and spares outlive nobody."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

WARM = {"node": {"warm": {"spares_max": 3, "low": 2, "high": 2}}}
# What root of a sandbox can see of itself, its limits and what is around it.
LOOK = r"""
grep -vE '^(Pid|PPid|Tgid|NS|Vm|Rss|.*ctxt_switches|Cpus_allowed|Mems_allowed|SigQ)' /proc/self/status
grep -E '^(Uid|Gid|Cap|Seccomp|NoNew)' /proc/1/status
sort -s -k 5,5 /proc/self/mountinfo
cat /proc/self/cgroup /proc/self/limits
nproc; grep MemTotal /proc/meminfo; grep -c processor /proc/cpuinfo
cat /proc/sys/kernel/hostname /etc/hostname /etc/hosts /etc/resolv.conf
cat /proc/sys/kernel/shmall /proc/sys/user/max_user_namespaces
ls -la /dev /etc /tmp / | tr -s ' ' | sed 's/ [A-Z][a-z][a-z] .*:.. / /; s/^total.*//'
env | sort; pwd; id -u; ls /proc/self/fd | wc -l; ps -e | wc -l
"""
ASKED = {"env": {"ASKED": "for"}, "cpu": 0.5, "memory": "256MiB", "pids": 77, "workdir": "/tmp", "name": "same"}


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store, settings=WARM) as place:
        yield place


@pytest.fixture
async def both(place: Place) -> AsyncIterator[tuple[LocalService, AsyncClient]]:
    async with served(place) as (service, client):
        yield service, client


async def fill(service: LocalService, client: AsyncClient, **asked: object) -> None:
    for _ in range(2):
        await (await client.create(ENVIRONMENT, **asked)).destroy()  # type: ignore[arg-type]
    await eventually(lambda: len(service.node.warm) == 2)


async def looked(sandbox: AsyncSandbox) -> str:
    """What it sees, without what is drawn anew for each sandbox: names of directories, device numbers, mount ids."""
    seen = (await sandbox.exec(LOOK, check=True)).stdout
    seen = re.sub(r"^\d+ \d+ \d+:\d+", "mount", seen, flags=re.M)
    seen = re.sub(r"^(dr.xr.xr.x) +\d+ ", r"\1 ", seen, flags=re.M)  # links of /proc: the host's processes
    return re.sub(r"sbx_\w+|sbx-[\w-]+|exe_\w+|[ug]id=\d{9,}", "ID", seen)


def limits_of(place: Place, cgroup: str) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.max", "cpu.cfs_quota_us", "cpu.max", "pids.max", "memory.swap.max",
             "memory.kmem.tcp.limit_in_bytes")  # fmt: skip
    found = {}
    for name in names:
        for above in ("", "*/"):
            for file in Path("/sys/fs/cgroup").glob(f"{above}{place.name}/*/{cgroup}/{name}"):
                found[name] = file.read_text().strip()
    return found


def cgroups(place: Place) -> set[str]:
    return {
        path.name for pattern in (f"{place.name}/*/sbx_*", f"*/{place.name}/*/sbx_*")
        for path in Path("/sys/fs/cgroup").glob(pattern)
    }  # fmt: skip


async def test_a_claimed_sandbox_cannot_be_told_from_one_that_was_made(
    place: Place, both: tuple[LocalService, AsyncClient]
) -> None:
    service, client = both
    cold = await client.create(ENVIRONMENT, **ASKED)
    plain = _plain(cold)
    cold_seen, cold_limits = await looked(cold), limits_of(place, cold.id)
    await cold.destroy()
    # Spares are as they were last asked for, and that was otherwise in all that a claim can change.
    await fill(service, client, memory="256MiB", cpu=2, pids=500, env={"OTHER": "one"}, name="other")
    spares = cgroups(place)

    warm = await client.create(ENVIRONMENT, **ASKED)
    (cgroup,) = {row.instance.facts.launched_as for row in service.node.registry if row.id == warm.id}  # type: ignore[union-attr]
    warm_seen, warm_limits = await looked(warm), limits_of(place, cgroup)

    assert cgroup in spares
    assert cgroup != warm.id
    differ = "\n".join(unified_diff(cold_seen.splitlines(), warm_seen.splitlines(), lineterm="", n=0))
    assert not differ, differ
    assert warm_limits == cold_limits
    assert cold_limits
    assert "OTHER" not in warm_seen
    assert _plain(warm) == plain
    await warm.destroy()


def _plain(sandbox: AsyncSandbox) -> dict[str, object]:
    info = sandbox.info
    differing = {"id", "created_at", "create_ms", "idle_since", "usage", "node"}
    return {name: getattr(info, name) for name in info.__struct_fields__ if name not in differing}


async def test_the_name_in_a_claimed_sandbox_is_its_own_id_when_it_has_no_other(
    both: tuple[LocalService, AsyncClient],
) -> None:
    service, client = both
    await fill(service, client)

    sandbox = await client.create(ENVIRONMENT)
    said = (await sandbox.exec("cat /proc/sys/kernel/hostname")).stdout.strip()

    assert said == sandbox.id.replace("_", "-")


async def test_a_claimed_sandbox_leaves_nothing(place: Place, both: tuple[LocalService, AsyncClient]) -> None:
    service, client = both
    await fill(service, client)

    sandbox = await client.create(ENVIRONMENT)
    await sandbox.exec("sleep 600 & echo x > /file")
    (found,) = [one for one in service.node.registry if one.id == sandbox.id]
    cgroup = found.instance.facts.launched_as  # type: ignore[union-attr]
    await sandbox.destroy()

    await eventually(lambda: cgroup not in cgroups(place))
    await eventually(lambda: not (place.state / "sandboxes" / cgroup).exists())
    await eventually(lambda: not (place.run / "sb" / f"{cgroup}.sock").exists())


async def test_a_spare_has_tried_itself_out_and_nothing_is_left_of_that(
    place: Place, both: tuple[LocalService, AsyncClient]
) -> None:
    service, client = both
    async with await client.create(ENVIRONMENT) as made:
        first = int((await made.exec("echo $$")).stdout)
    await fill(service, client)
    (shelf,) = service.node.warm._shelves.values()
    spares = list(shelf.spares)
    for spare in spares:
        pid = spare.instance.pid  # type: ignore[attr-defined]
        await eventually(lambda pid=pid: not Path(f"/proc/{pid}/task/{pid}/children").read_text())
        assert list((place.state / "sandboxes" / spare.id / "upper").iterdir()) == []
        below = f"{place.name}/*/{spare.id}/work"
        (work,) = [path for pattern in (below, f"*/{below}") for path in Path("/sys/fs/cgroup").glob(pattern)]
        await eventually(lambda work=work: not [path for path in work.iterdir() if path.is_dir()])

    claimed = await client.create(ENVIRONMENT)

    assert await claimed.execs() == []
    assert int((await claimed.exec("echo $$")).stdout) == first + 1  # one had the number before


async def test_a_service_that_stops_takes_its_spares_along(place: Place) -> None:
    async with served(place) as (service, client):
        await fill(service, client)

    await eventually(lambda: cgroups(place) == set())
    await eventually(lambda: list((place.run / "sb").iterdir()) == [])


async def test_an_agent_that_is_killed_in_a_spare_is_nobodys_loss(
    place: Place, both: tuple[LocalService, AsyncClient]
) -> None:
    service, client = both
    await fill(service, client)
    (shelf,) = service.node.warm._shelves.values()
    killed = {spare.instance.pid for spare in shelf.spares}  # type: ignore[attr-defined]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    sandbox = await client.create(ENVIRONMENT)

    assert (await sandbox.exec("echo works")).stdout == "works\n"

    def replaced() -> bool:
        now = {spare.instance.pid for spare in shelf.spares}  # type: ignore[attr-defined]
        return len(now) == 2 and not now & killed

    await eventually(replaced)


async def test_spares_can_be_claimed_after_kill_9_of_the_launcher(
    place: Place, both: tuple[LocalService, AsyncClient]
) -> None:
    service, client = both
    await fill(service, client)
    spares = cgroups(place)

    place.kill_launcher()
    sandbox = await client.create(ENVIRONMENT, name="claimed")

    (found,) = [one for one in service.node.registry if one.id == sandbox.id]
    assert found.instance.facts.launched_as in spares  # type: ignore[union-attr]
    assert (await sandbox.exec("cat /etc/hostname")).stdout == "claimed\n"
    await sandbox.destroy()


async def test_spares_of_a_node_that_was_killed_are_removed_and_claimed_sandboxes_run_on(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        for _ in range(2):
            await (await client.create(ENVIRONMENT)).destroy()

        async def spares_and_nothing_else() -> set[str]:
            found = cgroups(place)
            await asyncio.sleep(0.3)  # what was destroyed is gone by then, or soon
            return found if len(found) == 2 and cgroups(place) == found else set()

        spares = await eventually(spares_and_nothing_else)
        sandbox = await client.create(ENVIRONMENT, name="mine")
        process = await sandbox.start("sleep 1; echo done")
        place.kill_node()
        before = cgroups(place)
        place.settings = {}
        place.start_process()
        await place.ready(client)

        await eventually(lambda: len(cgroups(place)) == 1)
        (cgroup,) = cgroups(place)
        assert cgroup in before & spares
        assert (await (await sandbox.attach(process.id)).wait(60)).stdout == "done\n"
        await sandbox.destroy()
        await eventually(lambda: cgroups(place) == set())
