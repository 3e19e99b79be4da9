"""What callers ask of layers, and of environments that are put together from others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dsec.image.compose import diff
from dsec.node import streams
from dsec.node.node import Node
from dsec.wire.environments import EnvironmentInfo, EnvironmentRef, LayerUse
from dsec.wire.layers import (
    CollapseRequest,
    ComposeRequest,
    DiffRequest,
    EnvironmentDiff,
    LayerInfo,
    LayerPage,
    LayerRef,
)
from dsec.wire.node import Caller, Done, Method, Nothing, Stream


class LayerDesk:
    def __init__(self, node: Node) -> None:
        self._node = node

    def unary(self) -> dict[Method, tuple[Any, Callable[..., Awaitable[Any]]]]:
        return {
            Method.ENVIRONMENT_COMPOSE: (ComposeRequest, self._compose),
            Method.ENVIRONMENT_UPDATE: (EnvironmentRef, self._update),
            Method.ENVIRONMENT_DIFF: (DiffRequest, self._diff),
            Method.LAYER_LIST: (Nothing, self._list),
            Method.LAYER_GET: (LayerRef, self._get),
            Method.LAYER_STATS: (LayerRef, self._stats),
            Method.LAYER_REMOVE: (LayerRef, self._remove),
        }

    def streaming(self) -> dict[Method, tuple[Any, Callable[..., Awaitable[None]]]]:
        return {Method.ENVIRONMENT_COLLAPSE: (CollapseRequest, self._collapse)}

    async def _compose(self, request: ComposeRequest, caller: Caller, _: str | None) -> EnvironmentInfo:
        info = await self._node.environments.compose(request)
        await self._node.collapse_soon(info)
        return info

    async def _update(self, request: EnvironmentRef, caller: Caller, _: str | None) -> EnvironmentInfo:
        info = await self._node.environments.update(request.name)
        await self._node.collapse_soon(info)
        return info

    async def _diff(self, request: DiffRequest, caller: Caller, _: str | None) -> EnvironmentDiff:
        environments = self._node.environments
        return diff(await environments.get(request.one), await environments.get(request.other))

    async def _collapse(self, request: CollapseRequest, caller: Caller, stream: Stream) -> None:
        await streams.send_build(self._node.environments.collapse(request), stream)

    async def _list(self, request: Nothing, caller: Caller, _: str | None) -> LayerPage:
        return LayerPage(list(await self._node.environments.list_layers()))

    async def _get(self, request: LayerRef, caller: Caller, _: str | None) -> LayerInfo:
        return await self._node.environments.get_layer(request.digest)

    async def _stats(self, request: LayerRef, caller: Caller, _: str | None) -> LayerUse:
        return await self._node.environments.use_of_layer(request.digest)

    async def _remove(self, request: LayerRef, caller: Caller, _: str | None) -> Done:
        async with self._node.snapshots.changing:
            await self._node.environments.remove_layer(request.digest, live=self._node.layers_in_use())
        await self._node.let_layers_go()
        return Done()
