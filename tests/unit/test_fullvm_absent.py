"""A machine without an agent answers what every sandbox is asked, and refuses the rest in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec.agent.client import AgentClient
from dsec.backends.fullvm.absent import connect_absent
from dsec.core.errors import UnsupportedError
from dsec.core.ids import new_exec_id
from dsec.testing.waiting import eventually
from dsec.wire import agent


class Machine:
    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
async def client(machine: Machine) -> AsyncIterator[AgentClient]:
    found = await AgentClient.connect(
        lambda factory: connect_absent(factory, boot_id="sbx_n_1", on_shutdown=machine.end), sandbox="sbx_n_1"
    )
    yield found
    found.close()


async def test_what_a_node_asks_of_every_agent_is_answered(client: AgentClient) -> None:
    await client.clock(paused_s=1.0, wall_s=5.0)
    await client.reseed(bytes(64))
    await client.claim(agent.ClaimArgs(sandbox="sbx_n_1"))
    await client.freeze_prepare()

    assert client.hello.boot_id == "sbx_n_1"
    assert (await client.usage()).execs == 0
    assert (await client.execs(), await client.sessions()) == ([], [])


async def test_commands_files_and_ports_are_refused_in_words(client: AgentClient) -> None:
    for ask in (
        lambda: client.exec(agent.Exec(id=new_exec_id(), shell=b"true")),
        lambda: client.stat(agent.PathArgs(path=b"/")),
        lambda: client.session_open(agent.SessionOpen(name="s")),
        lambda: client.open_write(agent.WriteArgs(path=b"/x")),
        lambda: client.open_connection(agent.ConnectArgs(port=80)),
    ):
        with pytest.raises(UnsupportedError, match="no agent"):
            await ask()

    assert (await client.usage()).execs == 0


async def test_it_ends_its_machine_when_it_is_told_to(client: AgentClient, machine: Machine) -> None:
    await client.shutdown()

    await eventually(lambda: machine.ended)


async def test_a_host_that_breaks_the_protocol_is_hung_up_on(machine: Machine) -> None:
    lost = asyncio.Event()

    class Rude(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(b"\x00" * 100 + b"DSECAGT1" + bytes(12) + b"\xff" * 64)  # type: ignore[attr-defined]

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    transport = await connect_absent(Rude, boot_id="x", on_shutdown=machine.end)

    async with asyncio.timeout(30):
        await lost.wait()
    transport.abort()
