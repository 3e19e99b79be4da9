"""Agents that are greeted before their backend has told of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dsec.backends.base import Entrance
from dsec.core.errors import SandboxFaultError
from dsec.node.approach import Approach
from dsec.node.tasks import Tasks
from tests.security.scripted_agent import ScriptedAgent


class Door:
    """Nobody listens behind it until it is opened."""

    def __init__(self, **agent: Any) -> None:
        self.agent = ScriptedAgent(**agent)
        self.knocked, self.open, self.entered = asyncio.Event(), False, asyncio.Event()
        self.there, self.looked_for = True, asyncio.Event()
        self.entrance = Entrance(self.connect, self.exists)

    def exists(self) -> bool:
        self.looked_for.set()
        return self.there

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        self.knocked.set()
        if not self.open:
            raise SandboxFaultError("nobody listens")
        self.entered.set()
        return await self.agent.connect(factory)


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks("the test")
    yield tasks
    await tasks.close()


async def test_an_agent_that_comes_to_be_later_has_answered_when_it_is_asked_for(tasks: Tasks) -> None:
    door = Door()
    approach = Approach(door.entrance, sandbox="sbx", tasks=tasks)
    await door.knocked.wait()
    door.open = True
    await door.entered.wait()

    client = await approach.client()

    assert client is not None
    assert client.hello.boot_id == "boot"
    client.close()


async def test_nobody_knocks_where_there_is_no_door_yet(tasks: Tasks) -> None:
    door = Door()
    door.there, door.open = False, True
    approach = Approach(door.entrance, sandbox="sbx", tasks=tasks)
    await door.looked_for.wait()
    knocked, door.there = door.knocked.is_set(), True
    await door.entered.wait()

    client = await approach.client()

    assert not knocked
    assert client is not None
    client.close()


async def test_an_agent_that_nobody_has_reached_is_not_waited_for(tasks: Tasks) -> None:
    door = Door()
    approach = Approach(door.entrance, sandbox="sbx", tasks=tasks)

    assert await approach.client() is None

    await tasks.settle()
    assert not door.entered.is_set()


async def test_an_agent_that_says_what_is_wrong_is_to_be_asked_anew(tasks: Tasks) -> None:
    door = Door(hello=b"\xff" * 64)
    door.open = True
    approach = Approach(door.entrance, sandbox="sbx", tasks=tasks)
    await door.entered.wait()

    assert await approach.client() is None
    await door.agent.lost.wait()


@pytest.mark.parametrize("taken", [False, True])
async def test_a_launch_that_fails_leaves_no_channel(tasks: Tasks, taken: bool) -> None:
    door = Door()
    door.open = True
    approach = Approach(door.entrance, sandbox="sbx", tasks=tasks)
    await door.entered.wait()
    if taken:
        assert await approach.client() is not None

    approach.close()
    approach.close()

    await door.agent.lost.wait()
    await tasks.settle()
    assert len(tasks) == 0
