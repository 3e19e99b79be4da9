"""Both forms of shared state, for suites that hold for both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.cluster.embedded.database import Database
from dsec.cluster.embedded.log import EmbeddedLog
from dsec.cluster.embedded.registry import EmbeddedRegistry
from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.engine.setup import prepare
from dsec.cluster.leases import RegistryLease
from dsec.cluster.log import Log
from dsec.cluster.registry import Registry
from dsec.core.clock import SystemClock
from dsec.testing.nats_servers import NatsServers

FORMS: Final = ("embedded", "engine")
_units = itertools.count()


@dataclass
class State:
    """`other` sees the same as `registry`, from another process where there are several."""

    registry: Registry
    other: Registry
    log: Log

    def lease(self, *, other: bool = False) -> RegistryLease:
        return RegistryLease(self.other if other else self.registry, SystemClock())


@contextlib.asynccontextmanager
async def state_of(form: str, directory: Path, servers: NatsServers) -> AsyncIterator[State]:
    if form == "embedded":
        async with embedded(directory / "cluster.db") as state:
            yield state
        return
    layout = Layout(f"unit-{next(_units)}")
    engines = [await connect(servers, layout, who) for who in ("one", "two")]
    try:
        await prepare(engines[0], replicas=1, log_bytes_max=16 << 20)
        one, other = (EngineRegistry(engine) for engine in engines)
        yield State(one, other, EngineLog(engines[0]))
    finally:
        for engine in engines:
            await engine.close()


@contextlib.asynccontextmanager
async def embedded(path: Path) -> AsyncIterator[State]:
    database = await Database.open(path)
    registry = EmbeddedRegistry(database, SystemClock())
    await registry.start()
    try:
        yield State(registry, registry, EmbeddedLog(database))
    finally:
        await registry.close()
        await database.close()


async def connect(servers: NatsServers, layout: Layout, who: str) -> Engine:
    return await Engine.connect(EngineSettings(servers.urls, layout, who, servers.control(who), servers.tls()))
