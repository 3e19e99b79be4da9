"""Microvms through the whole of it: SDK, API, node, QEMU, a guest with its own kernel; emulated where KVM is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import dsec
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.instance import MicrovmInstance
from dsec.core import errors
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.waiting import eventually
from tests.system.container_images import make_root
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(1_200)]
in_module = pytest.mark.asyncio(loop_scope="module")

MEMORY = "192MiB"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(small_store: Path) -> AsyncIterator[tuple[Place, LocalService, AsyncClient]]:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            yield place, service, client


@pytest_asyncio.fixture(loop_scope="module")
async def sb(machines: tuple[Place, LocalService, AsyncClient]) -> AsyncIterator[AsyncSandbox]:
    async with await create(machines[2]) as found:
        yield found


async def create(client: AsyncClient, **more: Any) -> AsyncSandbox:
    return await client.create(ENVIRONMENT, backend="microvm", memory=MEMORY, timeout_s=240, **more)


def instance_of(service: LocalService, sandbox: AsyncSandbox) -> MicrovmInstance:
    backend = service.node.backends[Substrate.MICROVM]
    assert isinstance(backend, MicrovmBackend)
    return backend.instances[sandbox.id]


@in_module
async def test_commands_run_on_a_kernel_of_their_own(sb: AsyncSandbox) -> None:
    result = await sb.exec("cat /proc/sys/kernel/osrelease; id -u; nproc; echo oops >&2; exit 3")

    release, uid, processors = result.stdout.split()
    assert release != os.uname().release
    assert (uid, processors, result.stderr, result.exit_code) == ("0", "1", "oops\n", 3)


@in_module
async def test_its_root_may_do_what_a_container_s_may_not(sb: AsyncSandbox) -> None:
    result = await sb.exec("mkdir /mnt && mount -t tmpfs none /mnt && touch /mnt/x && unshare -m true && umount /mnt")

    assert result.exit_code == 0, result.stderr


@in_module
async def test_files_sessions_and_streams_are_those_of_every_sandbox(sb: AsyncSandbox, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "up").write_bytes(content)
    await sb.upload(tmp_path / "up", "/data/file")
    await sb.download("/data/file", tmp_path / "down")
    shell = sb.session("main")
    await shell.exec("cd /data && export X=7")
    said = (await shell.exec("echo $X $PWD; stat -c %s file")).stdout

    assert (tmp_path / "down").read_bytes() == content
    assert said == f"7 /data\n{len(content)}\n"


@in_module
async def test_what_it_is_told_is_what_it_sees(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    async with await create(machines[2], name="named", env={"A": "b c"}, user="user", workdir="/tmp", cpu=2.0) as sb:
        result = await sb.exec("echo $A; id -un; pwd; cat /etc/hostname /proc/sys/kernel/hostname; nproc")

    assert result.stdout.splitlines() == ["b c", "user", "/tmp", "named", "named", "2"]


@in_module
async def test_clones_share_neither_randomness_nor_identity_and_know_the_time(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    look = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | { read -r -d '' -N 16 x; }; "
    look += "python3 -c 'import os, random, time; print(os.urandom(16).hex(), random.random(), time.time())'"
    sandboxes = await asyncio.gather(*(create(machines[2]) for _ in range(3)))
    try:
        seen = []
        # What they are clones of stands still since it was made, and a busy machine hands them the time late.
        made_at = max(path.stat().st_mtime for path in (machines[0].state / "vm" / "templates").glob("*/*"))
        for sandbox in sandboxes:
            before = time.time()
            machine, _, last = (await sandbox.exec(look)).stdout.splitlines()
            random, number, clock = last.split()
            assert before - max(0.5, (before - made_at) / 2) <= float(clock) <= time.time() + 0.5
            seen.append((machine, random, number))
        assert all(len(set(column)) == len(sandboxes) for column in zip(*seen, strict=True))
    finally:
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))


@in_module
async def test_memory_that_is_not_there_is_told_as_what_it_was(sb: AsyncSandbox) -> None:
    # All at once: who takes the last pages one by one has the kernel read its programs again and again before.
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE"
    taking = f"import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 64 << 20, flags={flags}))"
    result = await sb.exec(["python3", "-c", taking])

    assert result.cause == "oom"
    assert (await sb.exec("echo still there")).stdout == "still there\n"


@in_module
async def test_a_disk_has_the_size_asked_for_and_what_is_full_says_so(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    async with await create(machines[2], disk="64MiB") as sb:
        result = await sb.exec("dd if=/dev/zero of=/big bs=1M count=200")

        assert result.exit_code != 0
        assert "No space left" in result.stderr
        assert (await sb.exec("rm /big && echo more > /small && cat /small")).stdout == "more\n"


@in_module
async def test_a_timeout_ends_all_and_a_pause_is_none_of_it(sb: AsyncSandbox) -> None:
    late = await sb.start("sleep 3; echo done", timeout_s=60)
    await sb.pause()
    await asyncio.sleep(0.2)
    await sb.resume()

    assert (await sb.exec("sleep 60 & sleep 60", timeout_s=0.5)).timed_out
    assert (await late.wait(60)).stdout == "done\n"


@in_module
async def test_the_clock_is_right_after_a_pause(sb: AsyncSandbox) -> None:
    await sb.pause()
    await asyncio.sleep(2.5)
    await sb.resume()

    before = time.time()
    told = float((await sb.exec(["bash", "-c", "echo $EPOCHREALTIME"])).stdout)

    assert before - 1.5 < told < time.time() + 0.5


@in_module
async def test_a_guest_that_ends_itself_is_a_failed_sandbox(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    sandbox = await create(machines[2])
    last = await sandbox.exec("echo b > /proc/sysrq-trigger; sleep 60")

    async def has_failed() -> bool:
        with pytest.raises(errors.DsecError) as caught:
            await sandbox.exec("true")
        return isinstance(caught.value, errors.GoneError | errors.SandboxFaultError)

    assert (last.status, last.cause) == ("unknown", "agent_lost")
    await eventually(has_failed)
    await sandbox.destroy()


@in_module
async def test_a_monitor_that_is_killed_is_a_failed_sandbox_and_leaves_nothing(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    place, service, client = machines
    async with place.no_leaks():
        sandbox = await create(client)
        os.kill(instance_of(service, sandbox).pid, signal.SIGKILL)

        async def has_failed() -> bool:
            try:
                await sandbox.exec("true")
            except errors.DsecError:
                return True
            return False

        await eventually(has_failed)
        await sandbox.destroy()


@in_module
async def test_a_console_that_is_flooded_harms_nobody(
    machines: tuple[Place, LocalService, AsyncClient], sb: AsyncSandbox
) -> None:
    """Four times what is kept of it, after as much as is kept: neither its monitor nor a file of the host grows."""
    place, service, _ = machines
    monitor = instance_of(service, sb).pid
    flood = "head -c {size} /dev/zero | tr '\\0' f > /dev/console; echo $?"
    assert (await sb.exec(flood.format(size=65_536), timeout_s=300)).stdout == "0\n"
    before = resident_bytes(monitor)

    assert (await sb.exec(flood.format(size=262_144), timeout_s=300)).stdout == "0\n"

    assert resident_bytes(monitor) - before < 32 << 20
    for directory in (place.run, place.state / "vm" / "sandboxes"):
        assert not [path for path in directory.rglob("*") if path.is_file() and b"f" * 4_096 in path.read_bytes()]
    assert (await sb.exec("echo here")).stdout == "here\n"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@in_module
async def test_a_template_that_was_written_to_is_made_anew(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    place, _, client = machines
    await (await create(client)).destroy()
    templates = place.state / "vm" / "templates"
    damaged = {path.name for path in templates.iterdir()}
    for key in damaged:
        with (templates / key / "state.mig").open("r+b") as state:
            state.truncate(100)

    with pytest.raises(errors.LaunchError):
        await create(client)
    async with await create(client) as sb:
        assert (await sb.exec("echo anew")).stdout == "anew\n"


@in_module
async def test_creates_that_are_given_up_leave_nothing(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    place, _, client = machines
    await (await create(client)).destroy()

    async with place.no_leaks():
        for wait_s in (0.0, 0.02, 0.05, 0.1, 0.2):
            task = asyncio.create_task(create(client))
            await asyncio.sleep(wait_s)
            task.cancel()
            (made,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(made, AsyncSandbox):  # it was faster
                await made.destroy()
            else:
                assert isinstance(made, asyncio.CancelledError)


@in_module
async def test_what_a_microvm_cannot_give_is_refused_by_name(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    _, _, client = machines
    with pytest.raises(errors.InvalidArgumentError, match="at least 96 MiB"):
        await client.create(ENVIRONMENT, backend="microvm", memory="32MiB")
    with pytest.raises(errors.UnsupportedError, match="network mode"):
        await client.create(ENVIRONMENT, backend="microvm", network="routed")


async def test_kill_9_of_the_node_loses_no_machine_no_byte_and_no_exit(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            try:
                sandbox = await create(client)
            except errors.UnsupportedError as error:
                pytest.skip(f"microvm: {error.message}")
            running = await sandbox.start("for i in $(seq 60); do echo out $i; sleep .02; done; exit 7")
            await asyncio.sleep(0.5)
            place.kill_node()
            place.start_process()
            await place.ready(client)

            again = await client.connect(sandbox.id)
            result = await (await again.attach(running.id)).wait(120)

            assert result.exit_code == 7
            assert [line.split()[1] for line in result.stdout.splitlines()] == [str(n) for n in range(1, 61)]
            await again.destroy()


@pytest.mark.slow
async def test_kill_9_of_the_node_while_a_template_is_made_leaves_nothing_of_it(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            making = asyncio.create_task(create(client))
            await eventually(lambda: making.done() or any(place.cgroup_files("tpl_*/cgroup.procs")))
            if making.done() and isinstance(making.exception(), errors.UnsupportedError):
                pytest.skip(f"microvm: {making.exception()}")
            place.kill_node()
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            assert any(place.cgroup_files("tpl_*/cgroup.procs"))

            place.start_process()
            await place.ready(client)

            await eventually(lambda: not any(place.cgroup_files("tpl_*")))
            sockets = place.run / "vm"
            await eventually(lambda: not [path for path in sockets.iterdir() if path.name != "root"])
            async with await create(client) as sb:
                assert (await sb.exec("echo up")).stdout == "up\n"


@in_module
async def test_the_blocking_client_offers_them_too(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    def use() -> str:
        with dsec.Client(machines[0].url) as client:
            with client.create(ENVIRONMENT, backend="microvm", memory=MEMORY, timeout_s=240) as sb:
                return str(sb.exec("echo hello").stdout)

    assert await asyncio.to_thread(use) == "hello\n"


@in_module
async def test_an_environment_that_lives_in_a_store_makes_microvms_too(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    place, _, client = machines
    store = f"file://{place.directory}/far-store"
    try:
        pushed = await client.environments.push(ENVIRONMENT, store)
    except errors.UnsupportedError as error:
        pytest.skip(error.message)
    await client.environments.build("far", dsec.StoreSource(store, ENVIRONMENT, digest=pushed.digest))

    async with await client.create("far", backend="microvm", memory=MEMORY, timeout_s=240) as sb:
        assert (await sb.exec(["python3", "-c", "print(6 * 7)"])).stdout == "42\n"

    stats = await client.environments.stats("far")
    assert all(layer.store is not None and layer.present_bytes > 0 for layer in stats.layers)


_PRELOAD = """\
#!/bin/bash
python3 -c 'import json' > /dev/null 2>&1
(exec -a warm-server sleep 1000000) &
echo "$HOME $0" > /run/warmed
"""
_FIND = """\
for p in /proc/[0-9]*; do IFS= read -r -d "" name < $p/cmdline; [ "$name" = warm-server ] && cat $p/cgroup; done
"""


@in_module
async def test_what_an_environment_preloads_all_its_machines_begin_with(
    machines: tuple[Place, LocalService, AsyncClient], tmp_path: Path
) -> None:
    _, _, client = machines
    root = make_root(tmp_path / "root", python=False)
    (root / "etc/dsec").mkdir()
    (root / "etc/dsec/preload").write_text(_PRELOAD)
    (root / "etc/dsec/preload").chmod(0o755)
    await client.environments.build("warm", dsec.DirectorySource(str(root)))

    for _ in range(2):
        async with await client.create("warm", backend="microvm", memory=MEMORY, timeout_s=240) as sb:
            assert (await sb.exec("cat /run/warmed")).stdout == "/root /etc/dsec/preload\n"
            assert "preload" in (await sb.exec(_FIND)).stdout


@pytest.mark.slow
@in_module
async def test_a_preload_that_fails_is_told_with_its_last_words(
    machines: tuple[Place, LocalService, AsyncClient], tmp_path: Path
) -> None:
    place, _, client = machines
    root = make_root(tmp_path / "root", python=False)
    (root / "etc/dsec").mkdir()
    (root / "etc/dsec/preload").write_text("#!/bin/bash\necho no such module\nexit 3\n")
    (root / "etc/dsec/preload").chmod(0o755)
    await client.environments.build("broken", dsec.DirectorySource(str(root)))

    async with place.no_leaks():
        with pytest.raises(errors.LaunchError, match=r"no such module[\s\S]*preload failed: exit status: 3"):
            await client.create("broken", backend="microvm", memory=MEMORY, timeout_s=240)


@pytest.mark.slow
@in_module
async def test_a_preload_that_talks_without_end_fills_nothing(
    machines: tuple[Place, LocalService, AsyncClient], tmp_path: Path
) -> None:
    """The console of a template that boots is read, and what is read is bounded."""
    place, _, client = machines
    root = make_root(tmp_path / "root", python=False)
    (root / "etc/dsec").mkdir()
    talk = "head -c 1000000 /dev/zero | tr '\\0' t; echo; echo the end"
    (root / "etc/dsec/preload").write_text(f"#!/bin/bash\n{talk}\nexit 3\n")
    (root / "etc/dsec/preload").chmod(0o755)
    await client.environments.build("talks", dsec.DirectorySource(str(root)))
    largest = 0

    async def look() -> None:
        nonlocal largest
        while True:
            for path in (place.state / "vm" / "templates").rglob("console*"):
                with contextlib.suppress(OSError):
                    largest = max(largest, path.stat().st_blocks * 512)
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    async with place.no_leaks():
        with pytest.raises(errors.LaunchError, match=r"the end[\s\S]*preload failed: exit status: 3") as refused:
            await client.create("talks", backend="microvm", memory=MEMORY, timeout_s=240)
    looking.cancel()

    assert largest == 0
    assert len(refused.value.message) < 4_000


# ---- snapshots, forks, rollbacks -----------------------------------------------------------------------

# Writes what time it is, again and again, to where only memory is.
# Without a process for each sleep, which an emulated machine takes long for.
_NAP = "mkfifo /tmp/nap$$; exec 3<>/tmp/nap$$; nap() { read -t $1 -u 3; }; "
TICKS = _NAP + "while :; do echo $EPOCHREALTIME >> /dev/shm/ticks; nap .05; done"
WHO = "cat /etc/machine-id /etc/hostname; head -c 16 /dev/urandom | od -An -tx1"


async def ticks(sandbox: AsyncSandbox) -> list[float]:
    lines = (await sandbox.exec("cat /dev/shm/ticks")).stdout.splitlines(keepends=True)
    return [float(line) for line in lines if line.endswith("\n")]


@in_module
async def test_what_runs_goes_on_in_a_sandbox_from_a_snapshot_which_knows_who_and_when_it_is(
    machines: tuple[Place, LocalService, AsyncClient], sb: AsyncSandbox
) -> None:
    _, _, client = machines
    running = await sb.start(TICKS)
    await sb.exec("until [ -s /dev/shm/ticks ]; do sleep .05; done; echo of the disk > /kept")
    shell = sb.session("main")
    await shell.exec("X=of-the-shell")

    snapshot = await sb.snapshot("with-memory")
    taken_at = time.time()
    await asyncio.sleep(2.0)
    made_at = time.time()
    async with await client.create(snapshot=snapshot, timeout_s=240) as other:
        seen = await ticks(other)
        kept, said = await other.exec("cat /kept"), await other.session("main").exec("echo $X")
        with pytest.raises(errors.ExecNotFoundError):
            await other.attach(running.id)
        ours, theirs = (await sb.exec(WHO)).stdout.splitlines(), (await other.exec(WHO)).stdout.splitlines()

        # Nothing of a user has run there with the time of the snapshot, before it was told what time it is.
        assert not [tick for tick in seen if taken_at < tick < made_at - 1.0]
        assert seen[-1] > made_at - 1.0
        assert (snapshot.info.keeps, kept.stdout, said.stdout) == ("disk+memory", "of the disk\n", "of-the-shell\n")
        assert not set(ours) & set(theirs)
        with pytest.raises(errors.InvalidArgumentError, match="that it had"):
            await client.create(snapshot=snapshot, memory="300MiB")
        with pytest.raises(errors.ConflictError, match="sandboxes are on snapshot"):
            await snapshot.remove()
    assert (await running.info()).status is None or (await ticks(sb))[-1] > made_at
    await snapshot.remove()


@in_module
async def test_forks_of_a_running_machine_are_machines_of_their_own_and_leave_nothing(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    place, _, client = machines
    saved = place.state / "vm" / "saved"
    async with place.no_leaks():
        sandbox = await create(client)
        await sandbox.start(TICKS)
        await sandbox.exec("until [ -s /dev/shm/ticks ]; do sleep .05; done")

        forks = await sandbox.fork(2)
        who = [(await one.exec(WHO)).stdout.splitlines() for one in (sandbox, *forks)]
        (again,) = await forks[0].fork(1)  # on the disk of a fork
        assert (await again.exec("test -s /dev/shm/ticks")).exit_code == 0

        assert all(len(set(column)) == 3 for column in zip(*who, strict=True))
        await asyncio.gather(*(one.destroy() for one in (sandbox, *forks, again)))
        await eventually(lambda: not list(saved.iterdir()))


@in_module
async def test_a_rollback_brings_back_what_ran(machines: tuple[Place, LocalService, AsyncClient]) -> None:
    async with await create(machines[2]) as sb:
        await sb.start(TICKS)
        await sb.exec("until [ -s /dev/shm/ticks ]; do sleep .05; done; echo one > /state")
        first = await sb.snapshot()
        await sb.exec("echo two > /state; rm /dev/shm/ticks")

        await sb.rollback(first)
        second = await sb.snapshot()

        assert (await sb.exec("cat /state; test -s /dev/shm/ticks")).stdout == "one\n"
        before = time.time()
        assert (await ticks(sb))[-1] > before - 5
        assert (sb.info.incarnation, second.info.parent) == (2, first.id)
    await first.remove()  # the second does not need it
    async with await machines[2].create(snapshot=second, timeout_s=240) as sb:
        assert (await sb.exec("cat /state")).stdout == "one\n"
    await second.remove()


@in_module
async def test_a_snapshot_that_was_damaged_is_told_as_such_and_harms_nobody(
    machines: tuple[Place, LocalService, AsyncClient], sb: AsyncSandbox
) -> None:
    place, _, client = machines
    snapshot = await sb.snapshot()
    (memory,) = (place.state / "vm" / "saved").glob("*/ram.img")
    with memory.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"something else")

    async with place.no_leaks():
        with pytest.raises(errors.LaunchError, match=r"damaged: ram\.img is not what was written"):
            await client.create(snapshot=snapshot, timeout_s=240)
    assert (await sb.exec("echo unharmed")).stdout == "unharmed\n"
    await snapshot.remove()


# ---- deep pauses ---------------------------------------------------------------------------------------

COUNT = _NAP + "for i in $(seq 60); do echo $i $EPOCHREALTIME; nap .05; done; exit 7"


@in_module
async def test_a_deep_pause_leaves_nothing_to_run_and_loses_nothing(
    machines: tuple[Place, LocalService, AsyncClient],
) -> None:
    place, service, client = machines
    saved = place.state / "vm" / "saved"
    async with place.no_leaks():
        sandbox = await create(client)
        running = await sandbox.start(COUNT)
        monitor = instance_of(service, sandbox).pid

        info = await sandbox.pause(deep=True)
        paused_at = time.time()
        assert (info.state, info.asleep, Path(f"/proc/{monitor}").exists()) == ("paused", True, False)
        await asyncio.sleep(2.0)
        resumed_at = time.time()
        await sandbox.exec("echo in memory > /dev/shm/kept")  # the next use resumes it
        result = await running.wait(60)

        numbers, times = zip(*(line.split() for line in result.stdout.splitlines()), strict=True)
        assert (result.exit_code, list(map(int, numbers))) == (7, list(range(1, 61)))
        assert not [when for when in map(float, times) if paused_at < when < resumed_at - 1.0]
        assert max(map(float, times)) > resumed_at
        assert not (await sandbox.refresh()).asleep
        await eventually(lambda: not list(saved.iterdir()))

        await sandbox.pause(deep=True)
        snapshot = await sandbox.snapshot()  # of one that sleeps
        await sandbox.destroy()
        async with await client.create(snapshot=snapshot, timeout_s=240) as other:
            assert (await other.exec("cat /dev/shm/kept")).stdout == "in memory\n"
        await snapshot.remove()
        await eventually(lambda: not list(saved.iterdir()))
