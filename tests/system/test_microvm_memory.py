"""A balloon on a clone gives pages of its template back to the host, which all other clones share: a hazard of QEMU
before 8.2, shown here, and what keeps us from it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.reporting import FREED_MIB, weigh
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.microvm.instance import MicrovmInstance
from dsec.backends.vm import machine
from dsec.backends.vm.qemu import find_qemu
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.templates import RAM, Templates
from dsec.core.errors import LaunchError, UnsupportedError
from dsec.core.ids import new_node_id
from dsec.core.limits import MIB
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.microvms import microvms_in
from dsec.testing.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@dataclass
class Site:
    backend: MicrovmBackend
    config: MicrovmConfig

    async def create(self) -> MicrovmInstance:
        spec = instance_spec(Substrate.MICROVM, node=new_node_id())
        made = await self.backend.create(spec, intend=Intents(), deadline_s=240)
        assert isinstance(made, MicrovmInstance)
        return made

    @property
    def memory(self) -> Path:
        (template,) = self.config.templates_dir.iterdir()
        return template / RAM


@asynccontextmanager
async def site(directory: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        try:
            backend, config = await stack.enter_async_context(microvms_in(directory, MicrovmBackend))
        except UnsupportedError as error:
            pytest.skip(error.message)
        yield Site(backend, config)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def inflate(clone: MicrovmInstance) -> None:
    """As far as its guest gives."""
    monitor = await clone.control()
    await monitor.execute("balloon", {"value": 64 * MIB})


async def test_a_machine_of_ours_has_no_balloon(short_tmp: Path) -> None:
    async with site(short_tmp) as place:
        clone = await place.create()
        before = digest(place.memory)
        with pytest.raises(MonitorError, match="balloon"):
            await inflate(clone)
        # Nor can it be given one: what can be plugged in is no device of such a machine.
        monitor = await clone.control()
        for driver in ("virtio-balloon-device", "virtio-balloon-pci"):
            with pytest.raises(MonitorError):
                await monitor.execute("device_add", {"driver": driver, "id": "balloon"})
        assert digest(place.memory) == before
        await place.create()


async def test_a_balloon_on_a_clone_reaches_the_template_where_that_can_be_written(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As QEMU before 8.2 has it. Since then a clone opens it for reading only, and the host has nothing back."""
    plain = machine.machine_arguments

    def with_balloon(*arguments: Any, **named: Any) -> list[str]:
        return [
            *plain(*arguments, **named),
            "-device",
            "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on",
        ]

    monkeypatch.setattr(machine, "machine_arguments", with_balloon)
    async with site(short_tmp) as place:
        clone = await place.create()
        before, taken = digest(place.memory), place.memory.stat().st_blocks

        await inflate(clone)

        if find_qemu(place.config.qemu).keeps_templates:
            await eventually(lambda: inflated(clone, place.memory.stat().st_size // 2))
            assert digest(place.memory) == before
            return
        await eventually(lambda: place.memory.stat().st_blocks < taken)
        # And a node that starts notices it, and makes another.
        with pytest.raises(LaunchError, match="made anew"):
            await Templates(place.config.templates_dir, kept_max=4).get(place.memory.parent.name, {}, made_anew)


@pytest.mark.slow
async def test_what_a_guest_frees_is_the_host_s_again_where_free_pages_are_reported(short_tmp: Path) -> None:
    """Of a machine whose memory is its own; the same one without that keeps what it has had."""
    try:
        reported = await weigh(short_tmp / "with", reported=True)
        kept = await weigh(short_tmp / "without", reported=False)
    except UnsupportedError as error:
        pytest.skip(error.message)

    half_mib = FREED_MIB / 2
    assert reported["taken_mib"] - reported["freed_mib"] > half_mib, reported
    assert kept["taken_mib"] - kept["freed_mib"] < half_mib, kept


async def inflated(clone: MicrovmInstance, below: int) -> bool:
    monitor = await clone.control()
    answer = await monitor.execute("query-balloon")
    return bool(answer["actual"] < below)


async def made_anew(_: Path) -> None:
    raise LaunchError("made anew", step="template")
