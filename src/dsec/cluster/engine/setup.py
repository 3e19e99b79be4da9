"""Makes the buckets and streams of a deployment, or finds them."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec.cluster.engine.connection import Engine
from dsec.core.errors import PlatformError


class _Config(msgspec.Struct, frozen=True):
    num_replicas: int = 1
    subjects: tuple[str, ...] = ()


class _Info(msgspec.Struct, frozen=True):
    config: _Config = _Config()


async def prepare(engine: Engine, *, replicas: int, log_bytes_max: int) -> None:
    """Safe to do again, and by several at once. Raises UnavailableError, or PlatformError for what another version or
    another number of replicas has made."""
    for config in engine.layout.streams(replicas=replicas, log_bytes_max=log_bytes_max):
        await _make(engine, config)


async def _make(engine: Engine, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        await engine.ask(f"STREAM.CREATE.{name}", config, dict)
    except PlatformError as error:
        if "already in use" not in error.message:
            raise
        # It is there with other settings: those of now hold, but for where it lies.
        found: _Info = await engine.ask(f"STREAM.INFO.{name}", {}, _Info)
        kept = {"num_replicas": found.config.num_replicas, "subjects": found.config.subjects}
        await engine.ask(f"STREAM.UPDATE.{name}", {**config, **kept}, dict)
