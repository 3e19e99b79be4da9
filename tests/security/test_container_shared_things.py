"""What all sandboxes of a host share cannot be taken by one of them, and nobody inside holds up the agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import SandboxError
from dsec.core.limits import MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.results import ExecResult
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

_MEMORY = 64 * MIB


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(small_store: Path) -> AsyncIterator[AsyncClient]:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            yield client


# Whatever gets one of the next pids is stopped at once, children of the agent that are not programs yet among them.
_STOPPER = """
import os, signal, time
print("begins", flush=True)
last, end = os.getpid(), time.monotonic() + 20
while time.monotonic() < end:
    for pid in range(last + 1, last + 40):
        try: os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError: pass
"""


async def test_stopping_what_is_being_started_does_not_stop_the_agent(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, cpu=2) as sandbox:
        stopper = await sandbox.start(["python3", "-c", _STOPPER])
        async for _ in stopper:
            break

        results = await asyncio.gather(*[_short(sandbox) for _ in range(3)])

        assert all(result is None or result.timed_out or result.ok for result in results), results
        await stopper.kill()
        assert (await sandbox.exec("echo works", timeout_s=60)).stdout == "works\n"


async def _short(sandbox: AsyncSandbox) -> ExecResult | None:
    """None: it was given up, and the agent said so. An agent that says nothing is a DeadlineError."""
    try:
        return await sandbox.exec(["/bin/sleep", "0"], timeout_s=1)
    except SandboxError:
        return None


_TERMINALS = """
import os
count = 0
try:
    while count < 4096:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        count += 1
except OSError: pass
print(count, flush=True)
"""


async def test_terminals_of_one_sandbox_leave_others_theirs(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT) as greedy, await client.create(ENVIRONMENT) as other:
        result = await greedy.exec(["python3", "-c", _TERMINALS], timeout_s=60, rlimits={"nofile": 8192})

        assert int(result.stdout) <= 256
        command = ["python3", "-c", "import os; print(os.ttyname(0))"]
        assert "/dev/pts/" in (await other.exec(command, tty=True, timeout_s=60)).stdout


_SOCKETS = """
import socket
server = socket.create_server(("127.0.0.1", 0))
kept, data = [], bytes(1 << 20)
for _ in range(300):
    client = socket.create_connection(server.getsockname(), timeout=60)
    kept += [client, server.accept()[0]]
    client.setblocking(False)
    try:
        while client.send(data): pass
    except BlockingIOError: pass
print("full", flush=True)
input()
"""


async def test_buffers_of_sockets_count_as_memory(client: AsyncClient) -> None:
    async with await client.create(ENVIRONMENT, memory=_MEMORY) as sandbox:
        before = _tcp_bytes()
        command = await sandbox.start(["python3", "-c", _SOCKETS], stdin=True)
        # Where they are counted with the rest, the kernel ends the command instead.
        async for _ in command:
            break

        await eventually(lambda: _tcp_bytes() - before < _MEMORY)  # others on this machine have some, too


def _tcp_bytes() -> int:
    """Of the whole machine: the kernel counts it in one sum for all network namespaces."""
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        words = line.split()
        if words[0] == "TCP:":
            return int(words[words.index("mem") + 1]) * os.sysconf("SC_PAGE_SIZE")
    raise AssertionError("no TCP in /proc/net/sockstat")
