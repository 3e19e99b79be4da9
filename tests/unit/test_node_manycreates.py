"""Creates that a node is asked for at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import LimitError
from dsec.core.limits import CREATES_TOGETHER_MAX
from dsec.testing.nodes import FAKE_SPEC, NodeClient, fake_node
from dsec.testing.waiting import eventually
from dsec.wire.many import CreatedMany, CreateMany
from dsec.wire.node import Method
from dsec.wire.records import CreateRequest, Sandbox

REQUEST = CreateRequest(spec=FAKE_SPEC)


async def ask(client: NodeClient, *keys: str) -> CreatedMany:
    return await client.call(Method.CREATE_MANY, CreateMany(REQUEST, keys), CreatedMany)


async def test_each_has_its_own_and_is_found_by_its_key(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        before = await client.call(Method.CREATE, REQUEST, Sandbox, key="b")

        made = [item.sandbox for item in (await ask(client, "a", "b", "c")).items]

        assert [one and one.id for one in made][1] == before.id
        assert len({one.id for one in made if one}) == len(client.node.registry) == 3
        again = await client.call(Method.CREATE, REQUEST, Sandbox, key="c")
        assert made[2] is not None
        assert again.id == made[2].id


async def test_what_is_refused_is_told_of_that_one(tmp_path: Path) -> None:
    async with fake_node(tmp_path, sandboxes_max=2) as client:
        come = (await ask(client, "a", "", "b", "c")).items

        codes = [item.error and item.error.code for item in come]
        assert codes[1] == "limit_exceeded"
        assert sorted(code or "" for code in codes) == ["", "", "limit_exceeded", "no_capacity"]
        assert len(client.node.registry) == 2


async def test_one_that_takes_long_does_not_hold_the_others_up_and_is_found_by_its_key(tmp_path: Path) -> None:
    held = asyncio.Event()
    steps = iter([True])

    async def sleep(_: float) -> None:
        await held.wait()

    host = FakeHost(delay_s=lambda step: 60.0 if step == "connect" and next(steps, False) else 0.0, sleep=sleep)
    async with fake_node(tmp_path, host=host) as client:
        come = (await ask(client, "a", "b", "c")).items

        (late,) = [key for key, item in zip("abc", come, strict=True) if item.sandbox is None]
        assert [item.error for item in come] == [None] * 3
        held.set()
        made = await client.call(Method.CREATE, REQUEST, Sandbox, key=late)
        assert len(client.node.registry) == 3
        assert made.id not in {item.sandbox.id for item in come if item.sandbox}


async def test_they_go_on_when_who_asked_goes_away(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def sleep(_: float) -> None:
        await held.wait()

    host = FakeHost(delay_s=lambda step: 60.0 if step == "connect" else 0.0, sleep=sleep)
    async with fake_node(tmp_path, host=host) as client:
        asking = asyncio.create_task(ask(client, "a", "b"))
        await eventually(lambda: len(client.node.registry) == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        held.set()

        made = [(await client.call(Method.CREATE, REQUEST, Sandbox, key=key)).id for key in "ab"]
        assert sorted(made) == sorted(sandbox.id for sandbox in client.node.registry)


async def test_no_more_than_a_few_are_taken() -> None:
    for count in (0, CREATES_TOGETHER_MAX + 1):
        with pytest.raises(LimitError):
            CreateMany(REQUEST, ("k",) * count)
