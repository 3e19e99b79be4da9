"""qemu-guest-agent at its port: half an answer of before, floods, silence."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fullvm.guestagent import guest_agent
from dsec.backends.vm.qmp import MonitorError

Behaviour = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def agent_at(path: Path, behaviour: Behaviour, *, first: bytes = b"") -> AsyncIterator[list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        try:
            while line := await reader.readline():
                command = json.loads(line.lstrip(b"\xff"))
                asked.append(command)
                await behaviour(command, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield asked
    finally:
        server.close()
        await server.wait_closed()


async def obey(command: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    given = command.get("arguments", {})
    writer.write(json.dumps({"return": given.get("id", {})}).encode() + b"\n")


async def test_the_time_is_set_to_what_it_is(short_tmp: Path) -> None:
    path = short_tmp / "qga"
    async with agent_at(path, obey) as asked, guest_agent(path, owner=os.getuid()) as guest:
        await guest.wait_until_up(timeout_s=30)
        await guest.set_time(1_700_000_000.5, timeout_s=30)

    assert asked[-1] == {"execute": "guest-set-time", "arguments": {"time": 1_700_000_000_500_000_000}}


async def test_half_an_answer_of_before_is_passed_over(short_tmp: Path) -> None:
    path = short_tmp / "qga"
    first = b'ents": [1, 2]}\n{"return": 7}\n\xff{"error": {}}\n'
    async with agent_at(path, obey, first=first), guest_agent(path, owner=os.getuid()) as guest:
        await guest.sync(timeout_s=30)


async def test_one_that_says_much_is_given_up(short_tmp: Path) -> None:
    async def chatter(command: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"return": -1}\n' * 10_000)

    path = short_tmp / "qga"
    async with agent_at(path, chatter), guest_agent(path, owner=os.getuid()) as guest:
        with pytest.raises(MonitorError, match="says much"):
            await guest.sync(timeout_s=30)


async def test_a_line_without_an_end_is_bounded(short_tmp: Path) -> None:
    async def flood(command: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 1_000_000)

    path = short_tmp / "qga"
    async with agent_at(path, flood), guest_agent(path, owner=os.getuid()) as guest:
        with pytest.raises(MonitorError):
            await guest.sync(timeout_s=30)


async def test_one_that_is_not_up_in_time_is_told(short_tmp: Path) -> None:
    async def silence(command: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Says nothing."""

    path = short_tmp / "qga"
    async with agent_at(path, silence), guest_agent(path, owner=os.getuid()) as guest:
        with pytest.raises(TimeoutError):
            await guest.wait_until_up(timeout_s=0.05)


async def test_a_machine_that_has_ended_is_told(short_tmp: Path) -> None:
    async def leave(command: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.close()

    path = short_tmp / "qga"
    async with agent_at(path, leave), guest_agent(path, owner=os.getuid()) as guest:
        with pytest.raises(MonitorError):
            await guest.wait_until_up(timeout_s=30)
    with pytest.raises(MonitorError):
        async with guest_agent(short_tmp / "none", owner=os.getuid()):
            pass
