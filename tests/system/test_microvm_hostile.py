"""Root of a guest writes to its host in the agent's place: whatever it says, the sandbox has failed, and nobody else
notices."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError
from dsec.core.limits import MIB
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1_200),
    pytest.mark.asyncio(loop_scope="module"),
]

# It has every right in its guest: the agent's own descriptor of the port, which nobody else can open, is one of them.
_BEGIN: Final = """
import ctypes, glob, os, struct, time
libc, agent = ctypes.CDLL(None), os.pidfd_open(1)
ports = [n for n in os.listdir("/proc/1/fd") if os.readlink(f"/proc/1/fd/{n}") == "/dev/vport0p1"]
port = libc.syscall(438, agent, int(ports[0]), 0)
assert port >= 0
def write(data):
    while data: data = data[os.write(port, data):]
def frame(kind, stream, body): return struct.pack(">IBI", 5 + len(body), kind, stream) + body
"""
WAYS: Final = {
    "noise": "while True: write(os.urandom(65_536))",
    "a huge length": 'write(struct.pack(">IBI", 0xFFFF_FFFF, 5, 1))\nwhile True: write(bytes(65_536))',
    "an answer to nothing": r"""write(frame(3, 4_000_001, b"\x80")); time.sleep(600)""",
    "answers that nest": r"""write(frame(3, 1, b"\x91" * 100_000 + b"\xc0")); time.sleep(600)""",
    "preambles without end": 'while True: write(b"DSEC" + bytes(16))',
}
_GROWTH_BYTES_MAX: Final = 64 * MIB


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(small_store: Path) -> AsyncIterator[tuple[Place, AsyncClient]]:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            yield place, client


async def create(client: AsyncClient) -> AsyncSandbox:
    return await client.create(ENVIRONMENT, backend="microvm", memory="192MiB", timeout_s=240)


def peak_bytes(*, reset: bool) -> int:
    """The most memory that this process, which is the node, has had since the last reset."""
    if reset:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.parametrize("way", WAYS)
async def test_what_root_of_a_guest_writes_to_its_host_fails_its_sandbox_alone(
    machines: tuple[Place, AsyncClient], way: str
) -> None:
    place, client = machines
    async with await create(client) as neighbour:
        async with place.no_leaks():
            sandbox = await create(client)
            before = peak_bytes(reset=True)
            try:
                async with asyncio.timeout(120):
                    hostile = await sandbox.start(["python3", "-c", _BEGIN + WAYS[way]])
                    await hostile.wait(100)
            except (DsecError, TimeoutError):
                pass

            async def has_failed() -> bool:
                return (await sandbox.refresh()).state == "failed"

            await eventually(has_failed, deadline_s=120)
            assert sandbox.info.cause == "sandbox_fault"
            assert (await neighbour.exec("echo untouched")).stdout == "untouched\n"
            await sandbox.destroy()
        assert peak_bytes(reset=False) - before < _GROWTH_BYTES_MAX
