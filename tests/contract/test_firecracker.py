"""The driver against the real Firecracker. Its guest is no Linux, so that it runs wherever a monitor does."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsec.backends.microvm import monitors
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.vm import accelerator, firecracker_driver, network
from dsec.backends.vm.accelerator import why_no_firecracker
from dsec.backends.vm.firecracker import Firecracker, find_firecracker
from dsec.backends.vm.firecracker_api import FaultError
from dsec.backends.vm.firecracker_driver import FirecrackerDriver, drives_of, watch_memory
from dsec.backends.vm.kernel import GuestKernel
from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import MonitorProcess
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.templates import DISK, RAM, STATE
from dsec.core.errors import DeadlineError, HostError, LaunchError, UnsupportedError
from dsec.core.ids import new_node_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.leaks import Watched, take_snapshot, wait_for_no_leaks
from dsec.testing.waiting import eventually
from dsec.wire.jail import JailBind
from tests.contract.firecracker_site import (
    SHAPE,
    UID,
    Site,
    backend_in,
    driver_in,
    monitor_of,
    pids_of,
    programs_of,
    readable,
    served_as,
)
from tests.firecracker import GuestMemory, Programs, tiny_kernel

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


@pytest.fixture
def driver(firecracker: Programs, tmp_path: Path) -> FirecrackerDriver:
    return driver_in(tmp_path, firecracker)


@pytest.fixture
def site(short_tmp: Path) -> Site:
    return Site(short_tmp)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the API -------------------------------------------------------------------------------------


async def test_a_monitor_tells_its_version_and_its_state(driver: FirecrackerDriver, site: Site) -> None:
    async with site.booting(driver) as (machine, _):
        version = await machine.api.get("/version")
        facts = await machine.api.get("/")

    assert driver.firecracker.version >= (1, 12)
    assert driver.firecracker.text == f"Firecracker v{version['firecracker_version']}"
    assert (facts["state"], facts["id"]) == ("Running", "microvm")


async def test_what_a_version_lacks_or_refuses_is_told_in_its_own_words(driver: FirecrackerDriver, site: Site) -> None:
    async with site.booting(driver) as (machine, _):
        with pytest.raises(FaultError) as unknown:
            await machine.api.put("/nothing/of/it", {"a": 1})
        with pytest.raises(FaultError) as wrong:
            await machine.api.put("/machine-config", {"vcpu_count": "many", "mem_size_mib": 1})
        with pytest.raises(FaultError) as late:
            await machine.api.put("/actions", {"action_type": "InstanceStart"})
        still = await machine.api.get("/")

    assert "Invalid request method and/or path" in unknown.value.fault_message
    assert "invalid type" in wrong.value.fault_message
    assert late.value.status == unknown.value.status == wrong.value.status == 400
    assert still["state"] == "Running"


async def test_the_machine_is_what_was_asked_for(driver: FirecrackerDriver, site: Site) -> None:
    async with site.booting(driver) as (machine, _):
        config = await machine.api.get("/vm/config")

    assert (config["machine-config"]["vcpu_count"], config["machine-config"]["mem_size_mib"]) == (1, 64)
    assert [drive["drive_id"] for drive in config["drives"]] == ["disk"]
    assert config["vsock"]["uds_path"] == "/vm/vsock"
    assert config["balloon"]["amount_mib"] == 0
    assert "rdinit=/init" in config["boot-source"]["boot_args"]


async def test_layers_as_memory_are_refused_by_a_version_that_has_none(
    driver: FirecrackerDriver, site: Site, tmp_path: Path
) -> None:
    assert not driver.firecracker.has_pmem
    layer = tmp_path / "layer"
    layer.write_bytes(bytes(2 << 20))
    confines = site.confines("pmem")
    shape = with_layers(SHAPE, (("a" * 64, False),))

    with pytest.raises(LaunchError, match="refused PUT /pmem/l0"):
        async with replace(driver, persistent=True).booting(
            site.template.directory, shape, confines, [JailBind(str(layer), "/layers/0.meta")]
        ):
            pass

    await eventually(lambda: programs_of(UID) == [])


def test_a_machine_has_no_more_drives_than_interrupts() -> None:
    layers = tuple((f"{n}", True) for n in range(8))
    fits, too_many = (with_layers(SHAPE, layers[:count]) for count in (7, 8))

    assert len(drives_of(fits)) == 15
    with pytest.raises(UnsupportedError, match="collapse"):
        drives_of(too_many)


def with_layers(shape: Shape, layers: tuple[tuple[str, bool], ...]) -> Shape:
    return Shape(shape.processors, shape.memory_bytes, shape.disk_bytes, shape.pids, layers)


# ---- templates and clones ------------------------------------------------------------------------


@pytest.mark.parametrize("served", [False, True], ids=["mapped", "served"])
async def test_clones_go_on_where_the_template_stopped(driver: FirecrackerDriver, site: Site, served: bool) -> None:
    """Each at the same paths, from the same memory, which none of them can change."""
    await site.make_template(driver)
    before = {name: digest(site.template.directory / name) for name in (RAM, STATE, DISK)}
    driver = served_as(driver, served)

    async with site.clone(driver) as (first, _, _), site.clone(driver) as (second, _, _):
        memories = [GuestMemory(process.pid, SHAPE.memory_bytes) for process in (first, second)]
        for memory in memories:
            start = await readable(memory)
            await eventually(lambda memory=memory, start=start: memory.rounds > start + 3)
            assert memory.wrong == 0
        assert [process.ended.done() for process in (first, second)] == [False, False]

    assert {name: digest(site.template.directory / name) for name in before} == before


async def test_a_template_s_memory_takes_room_for_what_was_written_only(driver: FirecrackerDriver, site: Site) -> None:
    await site.make_template(driver)

    found = (site.template.directory / RAM).stat()
    assert found.st_size == SHAPE.memory_bytes
    assert found.st_blocks * 512 < SHAPE.memory_bytes // 4


async def test_a_paused_machine_stands_still(driver: FirecrackerDriver, site: Site) -> None:
    await site.make_template(driver)

    async with site.clone(driver) as (process, machine, _):
        memory = GuestMemory(process.pid, SHAPE.memory_bytes)
        await machine.pause(timeout_s=30)
        state, stopped = await machine.api.get("/"), memory.rounds
        with pytest.raises(FaultError):
            await machine.api.put("/actions", {"action_type": "InstanceStart"})
        assert (state["state"], memory.rounds) == ("Paused", stopped)
        await machine.resume(timeout_s=30)
        await eventually(lambda: memory.rounds > stopped)


@pytest.mark.parametrize("served", [False, True], ids=["mapped", "served"])
async def test_a_clone_of_damaged_state_ends_with_the_monitor_s_words(
    driver: FirecrackerDriver, site: Site, served: bool
) -> None:
    await site.make_template(driver)
    state = site.template.directory / STATE
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0xFF
    state.write_bytes(content)

    with pytest.raises(LaunchError, match=r"refused PUT /snapshot/load: Load snapshot error") as error:
        async with site.clone(served_as(driver, served)):
            pass

    assert error.value.step == "clone"
    assert programs_of(UID) == []


async def test_what_serves_memory_ends_with_its_monitor(driver: FirecrackerDriver, site: Site) -> None:
    await site.make_template(driver)

    async with site.clone(served_as(driver, True)):
        assert sorted(programs_of(UID)) == ["dsec-pages\n", "firecracker\n"]

    await eventually(lambda: programs_of(UID) == [])


async def test_a_guest_whose_memory_nobody_serves_any_more_is_ended(driver: FirecrackerDriver, site: Site) -> None:
    await site.make_template(driver)

    async with site.clone(served_as(driver, True)) as (process, _, _):
        (pages,) = [pid for pid in pids_of(UID) if pid != process.pid]
        os.kill(pages, signal.SIGKILL)
        await asyncio.wait_for(process.ended, 60)


@pytest.mark.parametrize("when", ["later", "before"])
async def test_the_next_process_of_a_node_ends_such_a_guest_too(
    driver: FirecrackerDriver, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    await site.make_template(driver)
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    # The first process of the node has gone: nobody watches what serves the memory.
    monkeypatch.setattr(firecracker_driver, "_end_together", lambda *_: None)

    async with site.clone(served_as(driver, True)) as (process, _, confines):
        monkeypatch.undo()
        (pages,) = [pid for pid in pids_of(UID) if pid != process.pid]
        left = [pid for pid in (process.pid, pages) if when == "later" or pid != pages]
        (cgroup / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in left))
        adopted = MonitorProcess.adopt(process.pid, process.start_ticks)
        assert adopted is not None

        watch_memory(adopted, confines.sockets, [str(cgroup)])

        if when == "later":
            assert not adopted.ended.done()
            os.kill(pages, signal.SIGKILL)
        await asyncio.wait_for(adopted.ended, 60)


async def test_an_agent_that_does_not_answer_is_told_in_time(driver: FirecrackerDriver, site: Site) -> None:
    """The monitor says Running of a guest that has none: only the agent tells whether a machine lives."""
    async with site.booting(driver) as (machine, _):
        with pytest.raises(MonitorError, match="the agent did not answer within"):
            await machine.connect(asyncio.Protocol, timeout_s=0.5)
        assert (await machine.api.get("/"))["state"] == "Running"


async def test_a_template_that_does_not_come_up_leaves_nothing(driver: FirecrackerDriver, site: Site) -> None:
    driver.vmlinux.write_bytes(b"no kernel at all")

    with pytest.raises(LaunchError, match="refused PUT") as error:
        async with site.booting(driver):
            pass

    assert error.value.step == "template"
    assert programs_of(UID) == []


def test_a_program_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="there is no"):
        find_firecracker(str(tmp_path / "firecracker"))
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho Firecracker v1.3.0\n")
    other.chmod(0o755)
    with pytest.raises(HostError, match=r"1\.12 is the oldest"):
        find_firecracker(str(other))


# ---- the jail ------------------------------------------------------------------------------------


async def test_our_jail_is_at_least_as_strict_as_firecracker_s_own(
    driver: FirecrackerDriver, firecracker: Programs, site: Site, short_tmp: Path
) -> None:
    theirs = await asyncio.to_thread(jailed, firecracker, short_tmp)
    await site.make_template(driver)

    async with site.clone(driver) as (process, _, _):
        ours = facts_of(process.pid)

    assert ours.namespaces >= theirs.namespaces | {"mnt", "net", "ipc", "uts"}
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd"):
        assert int(ours.status[name], 16) == 0
    assert ours.status["NoNewPrivs"] == "1"
    assert ours.status["Seccomp"] == "2"
    assert set(ours.status["Uid"].split()) == {str(UID)}
    assert set(ours.status["Gid"].split()) == {str(UID)}
    assert ours.status["Groups"] == ""
    # A program, a template to read, a disk and sockets of its own, and devices: nothing else of the host.
    assert ours.root == ["dev", "disk", "firecracker", "template", "vm"]


@dataclass(frozen=True)
class Jail:
    """Of one process, as the kernel tells it."""

    status: dict[str, str]
    namespaces: set[str]  # of its own
    root: list[str]


def jailed(found: Programs, directory: Path) -> Jail:
    """What Firecracker's own program makes of it."""
    (directory / "jails").mkdir()
    copy = directory / "firecracker"
    shutil.copy(found.firecracker, copy)
    command = [str(found.jailer), "--id", "theirs", "--exec-file", str(copy), "--uid", str(UID + 1), "--gid"]
    command += [str(UID + 1), "--chroot-base-dir", str(directory / "jails"), "--", "--api-sock", "/api"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)
    try:
        socket = directory / "jails" / "firecracker" / "theirs" / "root" / "api"
        until = time.monotonic() + 60
        while not socket.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert socket.exists()
        return facts_of(process.pid)
    finally:
        process.kill()
        process.wait()


def facts_of(pid: int) -> Jail:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    own = {
        name
        for name in ("mnt", "net", "ipc", "uts", "pid", "user", "cgroup")
        if Path(f"/proc/{pid}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()
    }
    return Jail(status, own, sorted(path.name for path in Path(f"/proc/{pid}/root").iterdir()))


async def test_a_network_card_is_one_device_in_a_namespace_of_its_own(driver: FirecrackerDriver, site: Site) -> None:
    """And the same one for each clone, which is what the state of the template says."""
    shape = replace(SHAPE, network=True)
    async with site.booting(driver, shape) as (machine, sockets):
        (card,) = (await machine.api.get("/vm/config"))["network-interfaces"]
        memory = GuestMemory(monitor_of(sockets), SHAPE.memory_bytes)
        await eventually(lambda: memory.rounds > 0)
        await driver.save(machine, site.template.directory)
    async with (
        site.clone(driver, shape=shape) as (first, _, _),
        site.clone(driver, shape=shape) as (second, _, _),
        site.clone(driver, shape=shape) as (third, _, _),
    ):
        devices = [devices_of(process.pid) for process in (first, second, third)]
        places = {Path(f"/proc/{process.pid}/ns/net").readlink() for process in (first, second, third)}
        ours = facts_of(first.pid)

    assert (card["host_dev_name"], card["guest_mac"]) == (network.TAP, network.CARD)
    assert devices == [["lo", network.TAP]] * 3
    assert len(places) == 3
    assert int(ours.status["CapBnd"], 16) == 0
    assert ours.root == ["dev", "disk", "firecracker", "template", "vm"]


async def test_a_machine_that_was_made_without_a_card_has_none(driver: FirecrackerDriver, site: Site) -> None:
    await site.make_template(driver)

    async with site.clone(driver) as (process, machine, _):
        assert (await machine.api.get("/vm/config"))["network-interfaces"] == []
        assert devices_of(process.pid) == ["lo"]
        assert not Path(f"/proc/{process.pid}/root/dev/net").exists()


def devices_of(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return sorted(line.partition(":")[0].strip() for line in lines)


# ---- the backend ---------------------------------------------------------------------------------


@pytest.fixture
async def backend(
    firecracker: Programs, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[MicrovmBackend, Watched]]:
    """On a host that claims to run guests, with one that never answers."""

    async def claims(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(monitors, "why_no_firecracker", claims)
    async with backend_in(short_tmp, firecracker, boot_s=1.0) as made:
        yield made


async def test_a_guest_that_does_not_answer_is_no_sandbox_and_leaves_nothing(
    backend: tuple[MicrovmBackend, Watched],
) -> None:
    made, watched = backend
    probe = await made.probe()
    before = await asyncio.to_thread(take_snapshot, watched)
    spec = instance_spec(Substrate.MICROVM, node=new_node_id())

    with pytest.raises(LaunchError, match=r"the agent of tpl_.* did not") as error:
        await made.create(spec, intend=Intents(), deadline_s=60)

    assert probe.facts["monitor"].startswith("Firecracker v")
    assert error.value.step == "template"
    assert await asyncio.to_thread(wait_for_no_leaks, watched, before) == []


async def test_a_create_that_is_cut_off_leaves_nothing(backend: tuple[MicrovmBackend, Watched]) -> None:
    made, watched = backend
    await made.probe()
    before = await asyncio.to_thread(take_snapshot, watched)

    with pytest.raises(DeadlineError):
        await made.create(instance_spec(Substrate.MICROVM, node=new_node_id()), intend=Intents(), deadline_s=0.4)

    assert await asyncio.to_thread(wait_for_no_leaks, watched, before) == []


async def test_a_processor_that_runs_no_guests_is_told_and_not_tried_again(
    firecracker: Programs, short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until this machine is booted anew."""
    monkeypatch.setattr(accelerator, "_BOOT_S", 0.5)
    (tmp_path / "kernel").write_bytes(tiny_kernel())
    kernel = GuestKernel("tiny", tmp_path / "kernel", ())
    program = find_firecracker(str(firecracker.firecracker))

    reason = await why_no_firecracker(program, kernel, cache=short_tmp)
    again = await why_no_firecracker(Firecracker(Path("/none"), (1, 12), program.text), kernel, cache=short_tmp)

    assert reason is not None
    assert "a guest does not run" in reason
    assert again == reason
