"""Ports inside on which the real agent listens for its host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.agent.client import AgentClient
from dsec.agent.transfers import Duplex
from dsec.core.errors import CapacityError, FileError, InvalidArgumentError, UnavailableError
from dsec.core.limits import HOSTS_BYTES_MAX
from dsec.node.linkdoors import name_inside
from dsec.testing.ports import free_ports
from dsec.wire.agent import ListenArgs, ReadArgs, RemoveArgs, WriteArgs
from tests.contract.agents_under_test import AgentUnderTest, fake_agent, real_agent

HOST = "127.0.0.1"


@pytest.fixture
async def under_test(short_tmp: Path, native_binaries: dict[str, Path]) -> AsyncIterator[AgentUnderTest]:
    async with real_agent(short_tmp) as found:
        yield found


async def listening(client: AgentClient) -> ListenArgs:
    at = ListenArgs(host=HOST, port=free_ports(1)[0])
    await client.listen(at)
    return at


async def dialled(at: ListenArgs, client: AgentClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Duplex]:
    reader, writer = await asyncio.open_connection(at.host, at.port)
    async with asyncio.timeout(60):
        return reader, writer, await client.accept(at)


async def test_a_connection_that_comes_carries_bytes_both_ways_and_ends_by_halves(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    reader, writer, inside = await dialled(await listening(client), client)
    data = bytes(range(256)) * 8_000

    async def echo() -> None:
        while (piece := await inside.receive()) is not None:
            await inside.send(piece)
        inside.send_end()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(echo())
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data  # and it is an end, no cut
    writer.close()
    await client.usage()


async def test_connections_wait_until_they_are_taken_and_are_taken_in_order(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    at = await listening(client)
    await client.listen(at)  # the same again
    writers = []
    for number in range(3):
        _, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(str(number).encode())
        writers.append(writer)

    async with asyncio.timeout(60):
        for number in range(3):
            assert await (await client.accept(at)).receive() == str(number).encode()
        waits = [asyncio.create_task(client.accept(at)) for _ in range(2)]
        for number in range(2):
            _, writer = await asyncio.open_connection(at.host, at.port)
            writer.write(str(number).encode())
            writers.append(writer)
        assert sorted([await (await wait).receive() or b"" for wait in waits]) == [b"0", b"1"]
    for writer in writers:
        writer.close()


async def test_who_gives_up_takes_no_connection_from_the_next(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    at = await listening(client)
    for _ in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.accept(at)
    await client.usage()  # the agent has heard of the last one, too

    _, writer, inside = await dialled(at, client)
    writer.write(b"x")
    assert await inside.receive() == b"x"
    writer.close()


async def test_what_is_given_up_is_reset(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    reader, writer, inside = await dialled(await listening(client), client)

    inside.cancel()

    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(60):
            await reader.read()
    writer.close()


async def test_ports_close_with_the_hosts_connection(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    at = await listening(client)
    client.close()

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection(at.host, at.port)
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            return False  # it was being closed
        writer.close()
        return False

    async with asyncio.timeout(60):
        while not await refuses():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    again = await under_test.client()
    _, writer, _ = await dialled_again(again, at)
    writer.close()


async def dialled_again(
    client: AgentClient, at: ListenArgs
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Duplex]:
    await client.listen(at)
    return await dialled(at, client)


async def test_what_cannot_be_listened_on_is_refused(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    with socket.create_server((HOST, 0)) as taken, pytest.raises(FileError) as found:
        await client.listen(ListenArgs(host=HOST, port=taken.getsockname()[1]))
    assert found.value.detail["errno"] == "EADDRINUSE"
    for host, port in (("0.0.0.0", 5_000), ("192.0.2.1", 5_000), ("localhost", 5_000), ("", 5_000), (HOST, 0)):
        with pytest.raises(InvalidArgumentError):
            await client.listen(ListenArgs(host=host, port=port))
    with pytest.raises(InvalidArgumentError, match="nothing listens"):
        await client.accept(ListenArgs(host=HOST, port=1))


async def test_ports_are_bounded(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    listened = 0
    with contextlib.suppress(CapacityError):
        for port in free_ports(70):
            await client.listen(ListenArgs(host=HOST, port=port))
            listened += 1
    assert listened == 64


async def test_names_of_links_are_added_to_hosts_once_and_what_is_there_stays() -> None:
    async with fake_agent() as found:
        client = await found.client()
        names = {"db": "127.77.0.1", "web": "127.77.0.2"}

        async def hosts() -> bytes:
            async with await client.read(ReadArgs(path=b"/etc/hosts")) as download:
                return b"".join([piece async for piece in download])

        await client.write(WriteArgs(path=b"/etc/hosts"), b"127.0.0.1 localhost\n127.77.0.1\tdb")
        for _ in range(2):
            await name_inside(client, names)
            assert await hosts() == b"127.0.0.1 localhost\n127.77.0.1\tdb\n127.77.0.2\tweb\n"

        await client.remove(RemoveArgs(path=b"/etc/hosts"))
        await name_inside(client, names)
        assert await hosts() == b"127.77.0.1\tdb\n127.77.0.2\tweb\n"
        await client.write(WriteArgs(path=b"/etc/hosts"), bytes(HOSTS_BYTES_MAX))
        with pytest.raises(UnavailableError):
            await name_inside(client, names)
