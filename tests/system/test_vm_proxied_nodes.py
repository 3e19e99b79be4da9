"""What becomes of machines with network `proxied` when their node is killed, and its forwarder with it. For a soak."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.networks import able
from dsec.testing.outside import ALLOWED, OTHER, outside
from dsec.testing.processes import all_processes, command_line
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_vm_proxied import BOOT_S, fetch, hardware_address, reached

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not able(), reason="needs root, ip, nsenter and iptables"),
]


async def test_killed_nodes_attach_what_runs_again_and_what_sleeps_when_it_wakes(
    small_store: Path, tmp_path: Path
) -> None:
    with outside(tmp_path) as found:
        settings = {"node": {"egress": {"resolvers": [found.resolver]}}}
        with private_place(small_store, settings=settings, wrap=found.wrap) as place:
            place.start_process()
            async with AsyncClient(place.url) as client:
                await place.ready(client)
                awake, asleep = await create(client), await create(client)
                addresses = [await hardware_address(sandbox) for sandbox in (awake, asleep)]
                await asleep.pause(deep=True)
                await asleep.set_egress([f"{OTHER}:80"])

                place.kill_node()
                for pid in forwarder_of(place):
                    os.kill(pid, signal.SIGKILL)
                place.start_process()
                await place.ready(client)

                async def again() -> bool:
                    return await fetch(awake, ALLOWED, OTHER) == {ALLOWED: reached(ALLOWED), OTHER: "refused"}

                await eventually(again, deadline_s=300)
                assert await fetch(asleep, ALLOWED, OTHER) == {ALLOWED: "refused", OTHER: reached(OTHER)}
                assert [await hardware_address(sandbox) for sandbox in (awake, asleep)] == addresses
                for sandbox in (awake, asleep):
                    await sandbox.destroy()


async def create(client: AsyncClient) -> AsyncSandbox:
    return await client.create(
        ENVIRONMENT,
        backend="microvm",
        memory="192MiB",
        network="proxied",
        egress=[f"{ALLOWED}:80"],
        timeout_s=BOOT_S,
    )


def forwarder_of(place: Place) -> list[int]:
    """Both of its processes."""
    mark = b"dsec-egress\0--run\0" + os.fsencode(place.run) + b"\0"
    found = [pid for pid in all_processes() if mark in command_line(pid)]
    assert found
    return found
