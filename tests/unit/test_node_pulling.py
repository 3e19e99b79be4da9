"""Environments that a create asks for and the node lacks, from the stores that an operator has named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dsec.core.errors import ConflictError, StorageError
from dsec.node.pulling import Pulls, missing
from dsec.testing.nodes import FakeEnvironments
from dsec.wire.environments import BuildEvent, BuildRequest, StoreSource

ONE, OTHER = "s3://one/layers", "s3://other/layers"


class Stores:
    def __init__(self, **has: set[str]) -> None:
        self.has = has
        self.asked: list[tuple[str, str, str | None]] = []
        self.gate: asyncio.Event | None = None

    async def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        assert isinstance(request.source, StoreSource)
        source = request.source
        self.asked.append((source.url.split("/")[2], request.name, source.digest))
        if self.gate is not None:
            await self.gate.wait()
        yield BuildEvent(kind="progress", stage="resolve")
        if source.environment == "broken":
            raise StorageError("the store is away")
        if source.environment == "made":
            raise ConflictError("it is there with other content")
        found = source.environment in self.has.get(source.url.split("/")[2], set())
        yield BuildEvent(kind="done") if found else BuildEvent(kind="error", message="not here")


async def test_the_stores_are_asked_in_order_until_one_has_it() -> None:
    stores = Stores(one={"a"}, other={"a", "b:2"})
    pulls = Pulls((ONE, OTHER), stores.build)

    assert await pulls.pull("a")
    assert await pulls.pull("b:2")
    assert await pulls.pull("a@0123456789abcdef")
    assert stores.asked == [
        ("one", "a", None),
        ("one", "b:2", None),
        ("other", "b:2", None),
        ("one", "a", "0123456789abcdef"),
    ]


async def test_what_no_store_has_is_not_looked_for_again_at_once() -> None:
    stores = Stores()
    pulls = Pulls((ONE, OTHER), stores.build)

    assert [await pulls.pull(name) for name in ("none", "none", "broken", "broken")] == [False] * 4
    assert len(stores.asked) == 4
    assert await pulls.pull("made")
    assert not await Pulls((), stores.build).pull("a")


async def test_many_who_ask_at_once_make_one_request_that_outlives_them() -> None:
    stores = Stores(one={"a"})
    stores.gate = asyncio.Event()
    pulls = Pulls((ONE,), stores.build)
    asking = [asyncio.create_task(pulls.pull("a")) for _ in range(20)]
    await asyncio.sleep(0.01)
    asking[0].cancel()
    stores.gate.set()

    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert answers[1:] == [True] * 19
    assert len(stores.asked) == 1


async def test_what_is_missing_is_found() -> None:
    environments = FakeEnvironments(("base",))

    def has(name: str) -> object:
        return asyncio.run(environments.get(name))

    assert await missing(["base", "other"], has) == ["other"]
