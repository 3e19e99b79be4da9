"""Environments that are not here are taken from stores that an operator has named, when a create asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from dsec.core.errors import ConflictError, DsecError, EnvironmentNotFoundError
from dsec.core.limits import PULLS_FAILED_KEPT, PULLS_MAX
from dsec.core.references import parse_reference
from dsec.observe.logs import get_logger
from dsec.wire.environments import BuildEvent, BuildRequest, StoreSource

log = get_logger(__name__)

_AGAIN_S: Final = 15.0  # a name that no store has is not looked for again at once

Build = Callable[[BuildRequest], AsyncIterator[BuildEvent]]


class Pulls:
    """Of one node. Only what says what there is comes at once; contents are loaded as they are read."""

    def __init__(self, stores: Sequence[str], build: Build) -> None:
        self._stores = tuple(stores)
        self._build = build
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._failed: dict[str, float] = {}  # name → until when
        self._turn = asyncio.Semaphore(PULLS_MAX)

    async def pull(self, name: str) -> bool:
        """Whether it is here now. For several who ask at once it is done once, and goes on when they go away."""
        loop = asyncio.get_running_loop()
        if not self._stores or self._failed.get(name, 0.0) > loop.time():
            return False
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = loop.create_task(self._take(name), name=f"pull {name}")
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return await asyncio.shield(task)

    async def _take(self, name: str) -> bool:
        async with self._turn:
            for store in self._stores:
                if await self._from(store, name):
                    log.info("an environment was taken from a store", environment=name, store=store)
                    return True
        while len(self._failed) >= PULLS_FAILED_KEPT:
            self._failed.pop(next(iter(self._failed)))
        self._failed[name] = asyncio.get_running_loop().time() + _AGAIN_S
        return False

    async def _from(self, store: str, name: str) -> bool:
        try:
            reference = parse_reference(name)
            tagged = reference.name if reference.digest is not None else name
            source = StoreSource(url=store, environment=tagged, digest=reference.digest)
            async for event in self._build(BuildRequest(name=tagged, source=source)):
                if event.kind == "done":
                    return True
                if event.kind == "error":
                    log.info("a store has no such environment", environment=name, store=store, why=event.message)
        except ConflictError:
            return True  # somebody else has made it meanwhile
        except DsecError as error:
            log.info("an environment was not taken from a store", environment=name, store=store, why=error.message)
        return False


async def missing(names: Sequence[str], has: Callable[[str], object]) -> list[str]:
    """Those that are not here."""
    found = []
    for name in names:
        try:
            await asyncio.to_thread(has, name)
        except EnvironmentNotFoundError:
            found.append(name)
    return found
