"""Snapshots of real containers: what is in them, while everything goes on, and when something dies in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dsec.core import limits
from dsec.core.errors import ConflictError, DsecError, GoneError, SandboxStateError
from dsec.core.spec import Environment
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

Node = tuple[Place, AsyncClient]

# All that can be seen of a tree from inside.
_LOOK = r"""
import hashlib, json, os, stat, sys
found = {}
inodes = {}
for top in sys.argv[1:]:
    for here, directories, files in os.walk(top):
        for name in sorted(directories + files):
            path = os.path.join(here, name)
            info = os.lstat(path)
            entry = [stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid]
            if not stat.S_ISDIR(info.st_mode):
                entry += [info.st_size, info.st_nlink, inodes.setdefault(info.st_ino, path)]
            if not stat.S_ISLNK(info.st_mode):
                entry += [info.st_mtime_ns, {key: os.getxattr(path, key).hex() for key in sorted(os.listxattr(path))}]
            if stat.S_ISREG(info.st_mode):
                entry.append(hashlib.sha256(open(path, "rb").read()).hexdigest())
            if stat.S_ISLNK(info.st_mode):
                entry.append(os.readlink(path))
            found[path] = entry
print(json.dumps(found))
"""

_MAKE = r"""
import os, socket, stat, struct
os.makedirs("/work/a/b")
open("/work/a/file", "w").write("one")
os.link("/work/a/file", "/work/a/b/same")
os.symlink("../file", "/work/a/b/link")
os.mkfifo("/work/pipe", 0o620)
listener = socket.socket(socket.AF_UNIX); listener.bind("/work/socket")
sparse = open("/work/sparse", "wb"); sparse.seek(50 << 20); sparse.write(b"end"); sparse.close()
os.chown("/work/a/b", 1000, 50); os.chmod("/work/a/b", 0o2770)
open("/work/set", "w").write("#!/bin/sh"); os.chown("/work/set", 1000, 50); os.chmod("/work/set", 0o6755)
os.setxattr("/work/a", "user.note", bytes(range(256)))
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in (
    (1, 7, 0xFFFFFFFF), (2, 5, 1000), (4, 4, 0xFFFFFFFF), (16, 5, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)))
os.setxattr("/work/a/file", "system.posix_acl_access", acl)
os.setxattr("/work/set", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))
os.utime("/work/a/file", ns=(10**18 + 1, 10**18 + 2))
os.chmod("/bin/true", 0o700); os.rename("/etc/group", "/etc/other"); os.remove("/bin/yes")
import shutil
shutil.rmtree("/home"); os.mkdir("/home"); open("/home/new", "w").write("x")
shutil.rmtree("/var"); open("/var", "w").write("a file now")
open("/tmp/kept", "w").write("x"); open(b"/work/\xff\n\\name", "w").write("no text")
open("/dev/shm/not-kept", "w").write("x")
os.makedirs("/run/service", exist_ok=True); open("/run/service/pid", "w").write("1")
"""


async def run(sandbox: AsyncSandbox, script: str, *arguments: str) -> str:
    return (await sandbox.exec(["python3", "-c", script, *arguments], check=True)).stdout


async def look(sandbox: AsyncSandbox) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await run(sandbox, _LOOK, "/work", "/bin", "/home", "/tmp", "/etc", "/var"))
    for name in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):  # each sandbox has its own
        found.pop(name, None)
    return found


def staged(place: Place) -> list[Path]:
    return list((place.state / "staging").iterdir())


async def test_a_sandbox_made_from_a_snapshot_has_all_that_was_there(node: Node) -> None:
    place, client = node
    async with await client.create(ENVIRONMENT) as sandbox:
        await run(sandbox, _MAKE)
        before = await look(sandbox)
        snapshot = await sandbox.snapshot("all")
        await sandbox.exec("echo changed > /work/a/file; rm /work/set", check=True)

        async with await client.create(snapshot="all") as child:
            assert await look(child) == before
            assert (await child.exec("cat /var; test -e /dev/shm/not-kept")).stdout == "a file now"
            assert (await child.exec("test -e /dev/shm/not-kept || test -e /run/service")).exit_code == 1
            assert (await child.exec("test -d /run")).exit_code == 0
            assert (await child.exec("cat /etc/hostname")).stdout.strip() == child.id.replace("_", "-")
        assert snapshot.info.frozen_ms > 0
        await snapshot.remove()
    await eventually(lambda: staged(place) == [])


async def test_a_chain_of_snapshots_adds_up(node: Node) -> None:
    _, client = node
    sandbox, made = await client.create(ENVIRONMENT), []
    for i in range(3):
        await sandbox.exec(f"mkdir -p /work/{i}; echo {i} > /work/{i}/f; rm -rf /work/{i - 1}; echo {i} > /work/last")
        made.append(await sandbox.snapshot(f"chain-{i}"))
        await sandbox.destroy()
        sandbox = await client.create(snapshot=made[-1])

    assert (await sandbox.exec("ls /work; cat /work/2/f /work/last")).stdout == "2\nlast\n2\n2\n"
    assert [info.info.parent for info in made] == [None, made[0].id, made[1].id]
    with pytest.raises(ConflictError, match=sandbox.id):
        await made[2].remove()
    await sandbox.destroy()
    for snapshot in made:
        await snapshot.remove()


@pytest.mark.parametrize("count", [7, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_chain_of_any_length_adds_up(node: Node, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Each hides what the one before has made, in a directory of the environment and in one of its own."""
    if count < 20:
        monkeypatch.setattr(limits, "SNAPSHOT_CHAIN_MAX", 3)
    place, client = node
    before = set((place.state / "layers").iterdir())
    sandbox, made = await client.create(ENVIRONMENT), []
    most = len((await client.environments.get(ENVIRONMENT)).layers) + limits.SNAPSHOT_CHAIN_MAX
    for i in range(count):
        await sandbox.exec(
            f"mkdir -p /work/{i}; echo {i} > /work/{i}/f; rm -rf /work/{i - 1} /etc/mark-{i - 1}; touch /etc/mark-{i};"
            f"rm -rf /own; mkdir /own; echo {i} > /own/{i}; rm -f /etc/group; echo {i} >> /all; chmod 7{i % 8}1 /work",
            check=True,
        )
        made.append(await sandbox.snapshot())
        assert len(made[-1].info.layers) <= most
        await sandbox.destroy()
        sandbox = await client.create(snapshot=made[-1])

    last = count - 1
    found = await sandbox.exec("ls /work /own; ls -d /etc/mark-* /etc/group 2>&1; cat /work/*/f; wc -l < /all")
    assert found.stdout.split("\n")[:2] == ["/own:", str(last)]
    assert found.stdout.endswith(f"/etc/mark-{last}\n{last}\n{count}\n")
    assert (await sandbox.exec("stat -c %a /work")).stdout == f"7{last % 8}1\n"
    report = await made[-1].publish(f"chained-{count}", dry_run=True)
    assert report.environment is None
    await sandbox.destroy()
    for snapshot in made:
        await snapshot.remove()
    await eventually(lambda: set((place.state / "layers").iterdir()) == before)


async def test_layers_go_with_the_last_snapshot_that_has_them(node: Node) -> None:
    place, client = node
    layers = place.state / "layers"
    before = set(layers.iterdir())
    async with await client.create(ENVIRONMENT) as sandbox:
        await sandbox.exec("echo one > /work-1", check=True)
        first = await sandbox.snapshot()
        same = await sandbox.snapshot()  # of the same content
        assert first.info.layers == same.info.layers
        await first.remove()
        async with await same.create() as child:
            assert (await child.exec("cat /work-1")).stdout == "one\n"
    await same.remove()

    await eventually(lambda: set(layers.iterdir()) == before)


async def test_a_snapshot_while_all_goes_on_is_of_one_moment(node: Node) -> None:
    """Two files that are written in turn: no moment has more in the second than in the first."""
    _, client = node
    writer = """
import os
one, two = os.open("/work-one", os.O_CREAT | os.O_WRONLY), os.open("/work-two", os.O_CREAT | os.O_WRONLY)
while True:
    os.write(one, b"x"); os.write(two, b"x")
"""
    async with await client.create(ENVIRONMENT, cpu=0.5) as sandbox:
        await sandbox.start(["python3", "-c", writer])
        await asyncio.sleep(0.3)
        for _ in range(3):
            snapshot = await sandbox.snapshot()
            async with await snapshot.create() as child:
                sizes = (await child.exec("stat -c %s /work-one /work-two", check=True)).stdout.split()
            one, two = map(int, sizes)
            assert 0 <= one - two <= 1
            assert one > 0
            await snapshot.remove()


async def test_what_is_written_through_a_mapping_is_in_it(node: Node) -> None:
    _, client = node
    writer = """
import mmap, os, sys
file = os.open("/work-mapped", os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 8192)
mapped = mmap.mmap(file, 8192)
for line in sys.stdin:
    mapped[4096:4096 + 10] = line.strip().encode().ljust(10)
    print("written", flush=True)
"""
    async with await client.create(ENVIRONMENT) as sandbox:
        process = await sandbox.start(["python3", "-c", writer], stdin=True)
        output = process.output()
        await process.write("one\n")
        await anext(output)
        await asyncio.sleep(0.3)  # a first look finds it old enough to be believed
        await process.write("two\n")
        await anext(output)
        snapshot = await sandbox.snapshot()
        async with await snapshot.create() as child:
            assert (await child.exec("tail -c +4097 /work-mapped | head -c 3")).stdout == "two"
        await output.aclose()
        await snapshot.remove()


async def test_commands_notice_nothing_of_a_snapshot(node: Node) -> None:
    _, client = node
    async with await client.create(ENVIRONMENT) as sandbox:
        process = await sandbox.start("for i in $(seq 200); do echo $i; sleep 0.01; done; exit 7", timeout_s=60)
        snapshot = await sandbox.snapshot()

        result = await process.wait()

        assert (result.exit_code, result.stdout.split()) == (7, [str(i) for i in range(1, 201)])
        assert (await sandbox.refresh()).state == "running"
        await snapshot.remove()


async def test_a_paused_sandbox_can_be_snapshotted_and_stays_paused(node: Node) -> None:
    _, client = node
    async with await client.create(ENVIRONMENT) as sandbox:
        await sandbox.exec("echo one > /work-1", check=True)
        await sandbox.pause()
        snapshot = await sandbox.snapshot()
        assert (await sandbox.refresh()).state == "paused"
        async with await snapshot.create() as child:
            assert (await child.exec("cat /work-1")).stdout == "one\n"
        await snapshot.remove()


async def test_snapshots_of_one_sandbox_come_one_after_the_other(node: Node) -> None:
    place, client = node
    async with await client.create(ENVIRONMENT) as sandbox:
        results = await asyncio.gather(*(sandbox.snapshot() for _ in range(4)), return_exceptions=True)
        made = [result for result in results if not isinstance(result, BaseException)]
        refused = [result for result in results if isinstance(result, BaseException)]

        assert made
        assert all(isinstance(error, SandboxStateError) for error in refused)
        assert len(await client.snapshots.list(sandbox=sandbox.id)) == len(made)
        for snapshot in made:
            await snapshot.remove()
    await eventually(lambda: staged(place) == [])


async def test_a_sandbox_that_ends_meanwhile_leaves_no_snapshot(node: Node) -> None:
    place, client = node
    sandbox = await client.create(ENVIRONMENT)
    await sandbox.exec("head -c 50000000 /dev/zero | tr '\\0' x > /work-big", check=True)
    taking = asyncio.create_task(sandbox.snapshot("lost"))
    await eventually(lambda: staged(place) != [])
    await sandbox.destroy()

    with suppress(DsecError):
        snapshot = await taking
        await snapshot.remove()  # it was quicker
    if not taking.cancelled() and (error := taking.exception()) is not None:
        assert isinstance(error, GoneError)
    assert not await client.snapshots.exists("lost")
    await eventually(lambda: staged(place) == [])


async def test_an_environment_that_snapshots_are_made_from_stays(node: Node) -> None:
    _, client = node
    async with await client.create(ENVIRONMENT) as sandbox:
        snapshot = await sandbox.snapshot()
    with pytest.raises(ConflictError):
        await client.environments.remove(ENVIRONMENT)
    async with await snapshot.create() as child:
        assert (await child.exec("true")).exit_code == 0
    await snapshot.remove()


async def test_volumes_are_in_no_snapshot_and_no_fork(node: Node) -> None:
    """Who makes a sandbox from another project's snapshot must not find its own volume of that name in it."""
    _, client = node
    await client.volumes.create("data")
    async with await client.create(ENVIRONMENT, volumes=["data:/data"]) as sandbox:
        await sandbox.exec("echo secret > /data/file; echo here > /kept", check=True)
        snapshot = await sandbox.snapshot()
        (fork,) = await sandbox.fork(1)
    looked = "cat /kept; ls -A /data; grep -c ' /data ' /proc/self/mounts"
    async with fork, await snapshot.create() as child:
        for made in (fork, child):
            assert (await made.exec(looked)).stdout == "here\n0\n"
    async with await snapshot.create(volumes=["data:/data:ro"]) as child:
        assert (await child.exec("cat /data/file")).stdout == "secret\n"
    await snapshot.remove()
    await client.volumes.remove("data")


# ---- what dies in between ------------------------------------------------------------------------


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.mark.parametrize(
    "when", [pytest.param("copying", marks=pytest.mark.slow), "frozen", pytest.param("making", marks=pytest.mark.slow)]
)
async def test_a_node_killed_in_the_middle_leaves_no_snapshot_and_no_frozen_sandbox(place: Place, when: str) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT)
        await sandbox.exec("head -c 30000000 /dev/urandom > /work-big; echo one > /work-1", check=True)
        if when == "frozen":  # goes on being written to, so that there is something to copy at the end
            await sandbox.start("while :; do head -c 20000000 /dev/urandom > /work-hot; done")
        taking = asyncio.create_task(sandbox.snapshot("lost"))

        def reached() -> bool:
            frozen = [path.read_text() for path in place.cgroup_files(f"{sandbox.id}/agent/cgroup.freeze")]
            making = list((place.state / "staging").glob("*/layer-*"))
            return {"copying": staged(place) != [], "frozen": "1\n" in frozen, "making": making != []}[when]

        with suppress(AssertionError):  # it may be over before it is seen: then it is a whole one
            await eventually(lambda: reached() or taking.done(), deadline_s=60)
        place.kill_node()
        taking.cancel()  # else it would ask the next one for the same
        await asyncio.gather(taking, return_exceptions=True)
        place.start_process()
        await place.ready(client)

        assert (await sandbox.exec("cat /work-1")).stdout == "one\n"
        for snapshot in await client.snapshots.list():
            async with await snapshot.create() as child:
                assert (await child.exec("cat /work-1")).stdout == "one\n"
            await snapshot.remove()
        await eventually(lambda: staged(place) == [])
        again = await sandbox.snapshot("again")
        async with await again.create() as child:
            assert (await child.exec("cat /work-1")).stdout == "one\n"
        await sandbox.destroy()
        await again.remove()
        await eventually(lambda: len(list((place.state / "layers").iterdir())) == 1)


async def test_files_in_memory_are_snapshotted_as_well(small_store: Path) -> None:
    with private_place(small_store, settings={"container": {"disk": "tmpfs"}}) as place:
        async with served(place) as (_, client), await client.create(ENVIRONMENT, disk="64MiB") as sandbox:
            await run(sandbox, _MAKE)
            before = await look(sandbox)
            snapshot = await sandbox.snapshot()
            async with await snapshot.create() as child:
                assert await look(child) == before


# ---- forks and rollbacks -------------------------------------------------------------------------


async def test_forks_have_what_was_there_and_leave_nothing(node: Node) -> None:
    place, client = node
    await (await client.create(ENVIRONMENT)).destroy()  # with all that a first one leaves for the next
    layers = set((place.state / "layers").iterdir())
    async with place.no_leaks(), await client.create(ENVIRONMENT, memory="64MiB", labels={"run": "7"}) as sandbox:
        await run(sandbox, _MAKE)
        before = await look(sandbox)
        forks = await sandbox.fork(8)
        assert {fork.info.labels["run"] for fork in forks} == {"7"}
        assert all([await look(fork) == before for fork in forks[:3]])
        await forks[0].exec("echo mine > /work/a/file", check=True)
        assert (await forks[1].exec("cat /work/a/file")).stdout == "one"
        assert await client.snapshots.list() == []
        await asyncio.gather(*(fork.destroy() for fork in forks))
        await eventually(lambda: set((place.state / "layers").iterdir()) == layers)


async def test_a_rolled_back_sandbox_has_the_files_of_before_and_runs_nothing(node: Node) -> None:
    place, client = node
    await (await client.create(ENVIRONMENT)).destroy()
    async with place.no_leaks():
        async with await client.create(ENVIRONMENT, name="rolled", env={"X": "1"}) as sandbox:
            await run(sandbox, _MAKE)
            before = await look(sandbox)
            snapshot = await sandbox.snapshot()
            await sandbox.exec("rm -rf /work /var; echo x > /bin/new; echo y > /tmp/other", check=True)
            process = await sandbox.start("sleep 600")
            await sandbox.session("s").exec("cd /tmp")
            for _ in range(2):
                info = await sandbox.rollback(snapshot)
                assert await look(sandbox) == before
            assert (info.id, info.name, info.incarnation) == (sandbox.id, "rolled", 3)
            assert (await process.info()).cause == "rolled_back"
            told = await sandbox.exec("echo $X; cat /etc/hostname; ls /proc | grep -c '^[0-9]'")
            assert told.stdout.split()[:2] == ["1", "rolled"]
            assert int(told.stdout.split()[2]) <= 5
            with pytest.raises(ConflictError):
                await snapshot.remove()
            await sandbox.pause()
            await sandbox.rollback(snapshot)
            assert (await sandbox.refresh()).state == "running"
        await snapshot.remove()


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "after_s", [pytest.param(0.0, marks=_SLOW), pytest.param(0.03, marks=_SLOW), 0.06, pytest.param(0.12, marks=_SLOW)]
)
async def test_a_node_killed_during_a_rollback_leaves_the_old_or_the_new(place: Place, after_s: float) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT)
        await sandbox.exec("echo old > /work-1", check=True)
        snapshot = await sandbox.snapshot()
        await sandbox.exec("echo new > /work-1; echo more > /work-2", check=True)
        rolling = asyncio.create_task(sandbox.rollback(snapshot))
        await asyncio.sleep(after_s)
        place.kill_node()
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)
        place.start_process()
        await place.ready(client)

        info = await sandbox.refresh()
        found = (await sandbox.exec("cat /work-1; ls -d /work-2")).stdout
        assert found == {1: "new\n/work-2\n", 2: "old\n"}[info.incarnation]
        await eventually(lambda: len([p for p in (place.state / "sandboxes").iterdir() if p.name != ".trash"]) == 1)
        await sandbox.destroy()
        await snapshot.remove()
        await eventually(lambda: not [p for p in (place.state / "sandboxes").iterdir() if p.name != ".trash"])
        await eventually(lambda: place.cgroup_files("sbx_*") == [])


@pytest.mark.parametrize("after_s", [pytest.param(0.1, marks=_SLOW), 0.4, pytest.param(0.8, marks=_SLOW)])
async def test_a_node_killed_during_a_fork_leaves_all_or_nothing(place: Place, after_s: float) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT, memory="64MiB")
        await sandbox.exec("echo old > /work-1", check=True)
        forking = asyncio.create_task(sandbox.fork(6))
        await asyncio.sleep(after_s)
        place.kill_node()
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        place.start_process()
        await place.ready(client)
        await sandbox.exec("true", check=True)

        async def forks() -> list[AsyncSandbox]:
            return [found for found in await client.list() if found.id != sandbox.id]

        async def all_or_none() -> bool:
            return len(await forks()) in (0, 6)

        await eventually(all_or_none)
        for fork in await forks():
            assert (await fork.exec("cat /work-1")).stdout == "old\n"
            await fork.destroy()
        await sandbox.destroy()
        await eventually(lambda: place.cgroup_files("sbx_*") == [])


# ---- publishing ----------------------------------------------------------------------------------


async def test_a_published_snapshot_is_a_workspace_without_residue_and_without_what_was_removed(node: Node) -> None:
    _, client = node
    async with await client.create(ENVIRONMENT) as first:
        await first.exec("mkdir /work; echo secret > /work/removed; echo one > /work/kept; rm /etc/group", check=True)
        below = await first.snapshot()
    async with await below.create() as second:
        await second.exec(
            "rm /work/removed; echo two > /work/new; mkdir /tmp/t; echo x > /tmp/t/x;"
            " cd /root; echo x > .bash_history; mkdir .ssh; echo key > .ssh/id",
            check=True,
        )
        snapshot = await second.snapshot()

    asked = await snapshot.publish("project:1", dry_run=True)
    published = await snapshot.publish("project:1", keep=["ssh"])

    assert {removed.rule for removed in asked.removed} == {"temporary", "histories", "ssh"}
    assert asked.environment is None
    assert {removed.rule for removed in published.removed} == {"temporary", "histories"}
    assert published.environment is not None
    assert len(published.environment.layers) == 1
    with pytest.raises(ConflictError):
        await snapshot.publish("project:1")
    assert (await snapshot.publish("project:1", kind="toolkit", replace=True)).environment is not None
    for made in (snapshot, below):
        await made.remove()
    parts = Environment(base=ENVIRONMENT, workspace="project:1")
    async with await client.create(parts) as sandbox:
        told = await sandbox.exec(
            "cat /work/*; ls -A /root | grep -c -e ssh -e hist; ls -A /tmp; test -e /etc/group || echo hidden"
        )
        assert told.stdout.split() == ["one", "two", "0", "hidden"]
    await client.environments.remove("project:1")
