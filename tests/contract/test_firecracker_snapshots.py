"""Machines that are written down in the middle of their lives under the real Firecracker, and gone on with. Their guest
is no Linux; what an agent would see of it is tried where Linux runs (test_backends.py)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.backends.base import Keeps
from dsec.backends.microvm import backend as microvm
from dsec.backends.microvm import monitors
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.vm.capture import Source
from dsec.backends.vm.firecracker_api import FirecrackerApi
from dsec.backends.vm.firecracker_capture import FirecrackerCapture
from dsec.backends.vm.firecracker_driver import FirecrackerDriver
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.saved import SavedMachines, SavedManifest
from dsec.backends.vm.templates import DISK, RAM, STATE
from dsec.core.errors import DeadlineError, SandboxFaultError, UnsupportedError
from dsec.core.ids import new_node_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.leaks import Watched, take_snapshot, wait_for_no_leaks
from dsec.testing.waiting import eventually
from tests.contract.firecracker_site import SHAPE, UID, Site, backend_in, driver_in, programs_of, readable, served_as
from tests.firecracker import GuestMemory, Programs

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

STAND_S = 60.0


@pytest.fixture
def driver(firecracker: Programs, tmp_path: Path) -> FirecrackerDriver:
    return driver_in(tmp_path, firecracker)


@pytest.fixture
def site(short_tmp: Path) -> Site:
    return Site(short_tmp)


@pytest.fixture
def saved(short_tmp: Path) -> SavedMachines:
    return SavedMachines(short_tmp / "saved")


def capture_of(
    saved: SavedMachines, site: Site, driver: FirecrackerDriver, machine: FirecrackerMachine, pid: int, *, whole: bool
) -> FirecrackerCapture:
    source = Source(
        sandbox="sbx",
        pid=pid,
        uid=UID,
        directory=site.own(1),
        disk=DISK,
        memory_bytes=SHAPE.memory_bytes,
        disk_bytes=SHAPE.disk_bytes,
        below=(),
        overlays=0,
        flat=True,
    )
    manifest = SavedManifest(sandbox="sbx", needs=driver.identity, shape=msgspec.to_builtins(SHAPE))
    return FirecrackerCapture(saved, source, manifest, machine, whole=whole)


async def written(capture: FirecrackerCapture, saved: SavedMachines) -> str:
    try:
        await capture.look()
        await capture.take(within_s=STAND_S)
        return (await capture.keep()).machine
    finally:
        await capture.close()


# ---- the driver ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(False, False, id="mapped-mapped"),
        pytest.param(True, False, id="served-mapped", marks=pytest.mark.slow),
        pytest.param(False, True, id="mapped-served", marks=pytest.mark.slow),
        pytest.param(True, True, id="served-served", marks=pytest.mark.slow),
    ],
)
async def test_a_machine_goes_on_from_where_it_was_written_down(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines, before: bool, after: bool
) -> None:
    await site.make_template(driver)

    async with site.clone(served_as(driver, before)) as (process, machine, _):
        memory = GuestMemory(process.pid, SHAPE.memory_bytes)
        start = await readable(memory)
        await eventually(lambda: memory.rounds > start)
        await machine.pause(timeout_s=STAND_S)
        with (site.own(1) / DISK).open("r+b") as disk:
            disk.write(b"written by the machine")
        stopped = memory.rounds
        id = await written(capture_of(saved, site, driver, machine, process.pid, whole=True), saved)
        await machine.resume(timeout_s=STAND_S)
        await eventually(lambda: memory.rounds > stopped)

        kept = saved.get(id, driver.identity)
        assert sorted(kept.manifest.files) == sorted([DISK, RAM, STATE])
        assert kept.manifest.overlays == 0
        assert sorted(path.name for path in site.own(1).iterdir()) == [DISK]
        async with site.clone(served_as(driver, after), kept.template) as (other, _, _):
            again = GuestMemory(other.pid, SHAPE.memory_bytes)
            assert await readable(again) >= stopped
            more = again.rounds
            await eventually(lambda: again.rounds > more)
            assert again.wrong == memory.wrong == 0
            assert (site.own(2) / DISK).read_bytes().startswith(b"written by the machine")

    await eventually(lambda: programs_of(UID) == [])
    saved.get(id, driver.identity)  # none of them has changed it


async def test_where_writes_are_noted_only_they_are_written_and_each_snapshot_is_whole(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    put = FirecrackerApi.put

    async def told(api: FirecrackerApi, path: str, body: dict[str, Any], *, timeout_s: float = STAND_S) -> None:
        kinds.extend([body["snapshot_type"]] if path == "/snapshot/create" else [])
        await put(api, path, body, timeout_s=timeout_s)

    def too_late(*_: object) -> int:
        raise DeadlineError("what was written could not be copied in time")

    await site.make_template(driver)
    monkeypatch.setattr(FirecrackerApi, "put", told)
    noting = replace(driver, differences=True)
    made: list[tuple[str, int]] = []
    async with site.clone(noting) as (process, machine, _):
        memory = GuestMemory(process.pid, SHAPE.memory_bytes)

        async def snapshot() -> None:
            start = memory.rounds
            await eventually(lambda: memory.rounds > start)
            await machine.pause(timeout_s=STAND_S)
            stopped = memory.rounds
            id = await written(capture_of(saved, site, noting, machine, process.pid, whole=True), saved)
            made.append((id, stopped))
            await machine.resume(timeout_s=STAND_S)

        await snapshot()
        await snapshot()
        await machine.pause(timeout_s=STAND_S)
        cut = capture_of(saved, site, noting, machine, process.pid, whole=True)
        await cut.look()
        monkeypatch.setattr(cut, "_take", too_late)
        with pytest.raises(DeadlineError):
            await cut.take(within_s=STAND_S)
        await cut.close()
        await machine.resume(timeout_s=STAND_S)
        await snapshot()
        await snapshot()
        saved.remove(made.pop()[0])
        await snapshot()

    # What differs is not known after one that was cut off, and there is nothing to differ from after the last was lost.
    assert kinds == ["Diff", "Diff", "Diff", "Full", "Diff", "Full"]
    for id, stopped in made:
        kept = saved.get(id, driver.identity)
        async with site.clone(driver, kept.template) as (other, _, _):
            again = GuestMemory(other.pid, SHAPE.memory_bytes)
            assert await readable(again) >= stopped
            more = again.rounds
            await eventually(lambda memory=again, more=more: memory.rounds > more)
            assert again.wrong == 0
    await eventually(lambda: programs_of(UID) == [])


@pytest.mark.slow
async def test_what_is_empty_in_its_memory_takes_no_room(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    """Firecracker writes all of it."""
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        await machine.pause(timeout_s=STAND_S)
        id = await written(capture_of(saved, site, driver, machine, process.pid, whole=True), saved)

    memory = (saved.directory / id / RAM).stat()
    assert memory.st_size == SHAPE.memory_bytes
    assert memory.st_blocks * 512 < SHAPE.memory_bytes // 2


async def test_a_machine_that_is_only_stopped_for_good_stands_there_until_it_is_let_go(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        await machine.pause(timeout_s=STAND_S)
        stopped = GuestMemory(process.pid, SHAPE.memory_bytes).rounds
        id = await written(capture_of(saved, site, driver, machine, process.pid, whole=False), saved)

    kept = saved.get(id, driver.identity)
    assert sorted(kept.manifest.files) == sorted([RAM, STATE])
    async with site.clone(driver, kept.template, stand=True, directory=site.own(1)) as (process, machine, _):
        assert (await machine.api.get("/"))["state"] == "Paused"
        saved.remove(id)  # it has what it needs
        memory = GuestMemory(process.pid, SHAPE.memory_bytes)
        assert memory.rounds == stopped
        await machine.resume(timeout_s=STAND_S)
        await eventually(lambda: memory.rounds > stopped)
        assert memory.wrong == 0


async def test_a_machine_that_runs_is_not_written_down(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        capture = capture_of(saved, site, driver, machine, process.pid, whole=True)
        with pytest.raises(SandboxFaultError, match="does not stand still"):
            await capture.take(within_s=STAND_S)
        await capture.close()
        assert (await machine.api.get("/"))["state"] == "Running"

    assert list(saved.directory.iterdir()) == []


@pytest.mark.slow
async def test_a_write_that_takes_too_long_leaves_nothing_and_a_machine_that_goes_on(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        memory = GuestMemory(process.pid, SHAPE.memory_bytes)
        await machine.pause(timeout_s=STAND_S)
        stopped = memory.rounds
        capture = capture_of(saved, site, driver, machine, process.pid, whole=True)
        with pytest.raises(DeadlineError):
            await capture.take(within_s=0.005)
        await capture.close()
        await machine.resume(timeout_s=STAND_S)
        await eventually(lambda: memory.rounds > stopped)

    assert list(saved.directory.iterdir()) == []


@pytest.mark.slow
async def test_a_monitor_that_dies_over_it_leaves_nothing(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        await machine.pause(timeout_s=STAND_S)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.ended, STAND_S)
        capture = capture_of(saved, site, driver, machine, process.pid, whole=True)
        with pytest.raises(MonitorError):
            await capture.take(within_s=STAND_S)
        await capture.close()

    assert list(saved.directory.iterdir()) == []
    await eventually(lambda: programs_of(UID) == [])


@pytest.mark.slow
async def test_what_another_version_has_written_is_refused(
    driver: FirecrackerDriver, site: Site, saved: SavedMachines
) -> None:
    await site.make_template(driver)
    async with site.clone(driver) as (process, machine, _):
        await machine.pause(timeout_s=STAND_S)
        id = await written(capture_of(saved, site, driver, machine, process.pid, whole=True), saved)

    with pytest.raises(UnsupportedError, match="goes on only with monitor"):
        saved.get(id, {**driver.identity, "monitor": "Firecracker v1.16.0"})


# ---- the backend ---------------------------------------------------------------------------------


class Agentless:
    """In the place of an agent, which this guest has not."""

    async def usage(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        pass


@pytest.fixture
async def backend(
    firecracker: Programs, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[MicrovmBackend, Watched]]:
    """On a host that claims to run guests; nobody talks to them."""

    async def claims(*_: object, **__: object) -> None:
        return None

    async def agent(*_: object, **__: object) -> Any:
        return Agentless()

    monkeypatch.setattr(monitors, "why_no_firecracker", claims)
    monkeypatch.setattr(microvm, "awaken", claims)
    monkeypatch.setattr(microvm.AgentClient, "connect", agent)
    async with backend_in(short_tmp, firecracker) as made:
        yield made


@pytest.mark.slow
async def test_snapshots_forks_and_deep_pauses_of_a_sandbox_under_firecracker(
    backend: tuple[MicrovmBackend, Watched],
) -> None:
    made, watched = backend
    await made.probe()
    node = new_node_id()
    spec = instance_spec(Substrate.MICROVM, node=node)
    await (await made.create(spec, intend=Intents(), deadline_s=120)).destroy()  # there is a template from here on
    made.saved.directory.mkdir(exist_ok=True)
    before = await asyncio.to_thread(take_snapshot, watched)
    first = await made.create(spec, intend=Intents(), deadline_s=120)
    assert (made.capabilities.snapshot, made.capabilities.fork) == (Keeps.DISK_MEMORY, Keeps.DISK_MEMORY)

    # A snapshot of one that is paused, and another machine that goes on from it.
    memory = memory_of(first.facts.pid, spec)
    await first.pause(deadline_s=STAND_S)
    capture = await first.snapshot()
    await capture.look()
    await capture.take(within_s=STAND_S)
    kept = await capture.keep()
    await first.resume()
    another = replace(instance_spec(Substrate.MICROVM, node=node), machine=kept.machine)
    second = await made.create(another, intend=Intents(), deadline_s=120)
    again = memory_of(second.facts.pid, spec)
    more = again.rounds
    await eventually(lambda: again.rounds > more)
    assert (again.wrong, memory.wrong) == (0, 0)
    await capture.close()
    await second.destroy()
    await made.keep_machines((), [first.record])
    assert list(made.saved.directory.iterdir()) == []

    # A deep pause: nothing of it runs, and it may be written down while it sleeps.
    assert first.can_sleep
    await first.pause(deadline_s=STAND_S)
    stopped = memory.rounds
    await first.save()
    await first.sleep()
    assert (first.pid, first.asleep) == (0, True)
    asleep = await first.snapshot()
    await asleep.take(within_s=STAND_S)
    third = replace(instance_spec(Substrate.MICROVM, node=node), machine=(await asleep.keep()).machine)
    from_sleep = await made.create(third, intend=Intents(), deadline_s=120)
    assert memory_of(from_sleep.facts.pid, spec).rounds >= stopped
    await from_sleep.destroy()
    await asleep.close()
    await first.wake(())
    woken = memory_of(first.pid, spec)
    assert woken.rounds == stopped
    await first.resume()
    await eventually(lambda: woken.rounds > stopped)
    await first.destroy()
    await made.keep_machines((), [])
    assert await asyncio.to_thread(wait_for_no_leaks, watched, before) == []


def memory_of(pid: int, spec: Any) -> GuestMemory:
    return GuestMemory(pid, microvm.memory_of(spec.spec))
