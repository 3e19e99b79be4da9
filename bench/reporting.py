"""What a guest frees is the host's again: a machine whose memory is its own, with a device that reports free pages and
without. Emulated where the processor runs no guests.

No machine of a user is such a one under QEMU: all are clones, which map a template's memory (docs/internals/vm.md).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from bench.memory import least, pss_bytes
from dsec.agent.client import AgentClient
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.vm.driver import Driver
from dsec.core.limits import MIB
from dsec.core.spec import Substrate
from dsec.testing.hosts import instance_spec
from dsec.testing.microvms import microvms_in
from dsec.wire.agent import ClaimArgs, RemoveArgs, WriteArgs

FREED_MIB: Final = 64
_FILE: Final = b"/dev/shm/large"
_PIECE: Final = bytes(range(1, 256)) * (MIB // 255)


@dataclass(frozen=True, slots=True)
class Reporting(Driver):
    """The same machine, and one device more."""

    def _argv(self, *arguments: Any, **named: Any) -> list[str]:
        argv = super(Reporting, self)._argv(*arguments, **named)
        return [*argv, "-device", "virtio-balloon-device,free-page-reporting=on"]


class Booted(MicrovmBackend):
    """Its machines are booted, and never cloned."""

    async def weigh(self, *, reported: bool) -> Mapping[str, float]:
        """MiB of the monitor: before, with what the guest has taken, and after it has freed that."""
        spec = instance_spec(Substrate.MICROVM)
        wanted = await self._wanted(spec)
        driver: Driver = wanted.facts.driver
        if reported:
            driver = Reporting(**{field.name: getattr(driver, field.name) for field in fields(Driver)})
        self._facts = replace(wanted.facts, driver=driver)
        work = Path(tempfile.mkdtemp(prefix="booted-", dir=self._config.state_dir))
        async with (
            self._nobodys(wanted) as record,
            driver.booting(work, wanted.shape, self._confines(record, driver), []) as found,
        ):
            client = await AgentClient.connect(
                lambda factory: found.connect(factory, timeout_s=self._config.boot_s),
                sandbox=record.sandbox,
                open_timeout_s=self._config.boot_s,
            )
            await client.claim(ClaimArgs(sandbox=record.sandbox))
            pids = [int(pid) for group in record.cgroups for pid in Path(group, "cgroup.procs").read_text().split()]

            async def weight() -> float:
                found = await asyncio.to_thread(least, lambda: sum(map(pss_bytes, set(pids))))
                return round(found / MIB, 1)

            before = await weight()
            for number in range(FREED_MIB):
                args = WriteArgs(path=_FILE, offset=number * len(_PIECE))
                await client.write(args, _PIECE)
            taken = await weight()
            await client.remove(RemoveArgs(path=_FILE))
            freed = await weight()
            client.close()
        return {"before_mib": before, "taken_mib": taken, "freed_mib": freed}


async def weigh(directory: Path, *, reported: bool) -> Mapping[str, float]:
    """In a directory with a short name. Raises UnsupportedError where QEMU runs no guests."""
    async with microvms_in(directory, Booted) as (backend, _):
        return await backend.weigh(reported=reported)


def weigh_both() -> dict[str, Mapping[str, float]]:
    found = {}
    for name, reported in (("not reported", False), ("reported", True)):
        with tempfile.TemporaryDirectory(prefix="dsec-") as directory:
            found[name] = asyncio.run(weigh(Path(directory), reported=reported))
    return found


def show(freed: Mapping[str, Mapping[str, float]]) -> None:
    for name, row in freed.items():
        print(
            f"{name:<16} {row['before_mib']:>7.1f} MiB, {row['taken_mib']:>7.1f} with {FREED_MIB} MiB in the guest, "
            f"{row['freed_mib']:>7.1f} after it has freed them"
        )
