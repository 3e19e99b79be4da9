"""The layers that environments are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dsec.core.references import parse_reference
from dsec.sdk.environments import AsyncEnvironments
from dsec.sdk.transport import Transport
from dsec.wire.environments import BuildEvent, BuildSource, EnvironmentInfo, LayerUse
from dsec.wire.layers import LayerInfo, LayerPage, LayerRef


class _Nothing(msgspec.Struct):
    pass


class AsyncLayers:
    """`client.layers`: what is on the node's disk, each once however many environments have it."""

    def __init__(self, transport: Transport, environments: AsyncEnvironments) -> None:
        self._transport = transport
        self._environments = environments

    async def build(
        self,
        name: str,
        source: BuildSource,
        *,
        replace: bool = False,
        refresh: bool = False,
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> EnvironmentInfo:
        """Makes the layers of `name` (NAME, or NAME:TAG), to be a part of environments or one by itself.

        As `client.environments.build`: an image keeps one layer for each of its own, other sources give one.
        """
        return await self._environments.build(name, source, replace=replace, refresh=refresh, on_event=on_event)

    async def list(self) -> list[LayerInfo]:
        """All of them, by digest."""
        return (await self._transport.call("GET", "/layers", LayerPage)).layers

    async def get(self, digest: str) -> LayerInfo:
        """One of them, by its digest or 12 digits of it. Raises NotFoundError."""
        return await self._transport.call("GET", f"/layers/{LayerRef(digest).digest}", LayerInfo)

    async def stats(self, digest: str) -> LayerUse:
        """How much of it has been loaded from its store, and why the store failed last."""
        return await self._transport.call("GET", f"/layers/{LayerRef(digest).digest}/stats", LayerUse)

    async def remove(self, digest: str) -> None:
        """Removes a layer that no environment and no sandbox has. Raises NotFoundError, ConflictError."""
        await self._transport.call("DELETE", f"/layers/{LayerRef(digest).digest}", _Nothing, repeatable=True)

    async def collapse(
        self, environment: str, *, on_event: Callable[[BuildEvent], Any] | None = None
    ) -> EnvironmentInfo:
        """Makes one layer of runs of an environment's lower layers, for creates from now on; sandboxes see the same.

        Of environments with more than 16 layers; it is done by itself when they are built or composed.
        """
        return await self._environments.collapse(str(parse_reference(environment)), on_event=on_event)
