"""Environments of a node that offers nothing but the fake substrate: every name is there, and is empty.

Started, each would do nothing, for ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from pathlib import Path

from dsec.backends.base import Layer
from dsec.core.errors import UnsupportedError
from dsec.core.spec import Environment
from dsec.image.environments import StoreFacts
from dsec.node.environments import Hold, Resolved
from dsec.storage.disks import DiskLayers
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    EnvironmentInfo,
    EnvironmentStats,
    EnvironmentTrace,
    LayerUse,
    MachineBuild,
    PushRequest,
)
from dsec.wire.images import ExportRequest
from dsec.wire.layers import CollapseRequest, ComposeRequest, LayerInfo

_COMMAND = ("sleep", "infinity")


class ImaginedEnvironments:
    async def acquire(self, environment: Environment) -> Resolved:
        return Resolved(hold=_NoHold(), command=_COMMAND)

    async def hold(self, digests: Collection[str]) -> Hold:
        return _NoHold()

    async def layers(self, digests: Sequence[str]) -> tuple[Hold, tuple[Layer, ...]]:
        return _NoHold(), tuple(Layer(digest, "fake", "") for digest in digests)

    def disks(self) -> DiskLayers:
        raise _nothing_here()

    async def list(self) -> list[EnvironmentInfo]:
        return [await self.get("base")]

    async def get(self, name: str) -> EnvironmentInfo:
        return EnvironmentInfo(
            name=name, layers=(), size_bytes=0, created_at=0.0, source="imagined", kind="fake", command=_COMMAND
        )

    async def remove(self, name: str, *, live: Collection[str]) -> None:
        raise _nothing_here()

    async def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        raise _nothing_here()
        yield  # makes this an iterator

    async def push(self, request: PushRequest) -> AsyncIterator[BuildEvent]:
        raise _nothing_here()
        yield  # makes this an iterator

    async def export(self, request: ExportRequest) -> AsyncIterator[BuildEvent]:
        raise _nothing_here()
        yield  # makes this an iterator

    async def build_machine(self, request: MachineBuild, target: Path) -> AsyncGenerator[BuildEvent]:
        raise _nothing_here()
        yield  # makes this an iterator

    async def compose(self, request: ComposeRequest) -> EnvironmentInfo:
        raise _nothing_here()

    async def update(self, name: str) -> EnvironmentInfo:
        raise _nothing_here()

    async def collapse(self, request: CollapseRequest) -> AsyncIterator[BuildEvent]:
        raise _nothing_here()
        yield  # makes this an iterator

    async def named(self) -> Collection[str]:
        return ()

    async def list_layers(self) -> Sequence[LayerInfo]:
        return ()

    async def get_layer(self, digest: str) -> LayerInfo:
        raise _nothing_here()

    async def use_of_layer(self, digest: str) -> LayerUse:
        raise _nothing_here()

    async def remove_layer(self, digest: str, *, live: Collection[str]) -> None:
        raise _nothing_here()

    async def stats(self, name: str) -> EnvironmentStats:
        return EnvironmentStats(name=name, layers=())

    async def trace(self, name: str) -> EnvironmentTrace:
        raise _nothing_here()

    async def renew(self) -> None:
        """Nothing is loaded."""

    async def tidy(self, *, live: Collection[str]) -> None:
        """There is nothing to remove."""

    async def read_failure(self, digests: Sequence[str], since_s: float) -> str | None:
        return None

    async def describe(self) -> StoreFacts | None:
        return None


class _NoHold:
    def release(self) -> None:
        pass


def _nothing_here() -> UnsupportedError:
    return UnsupportedError(
        "this node offers only the fake substrate, which has no environments of its own",
        hint="start it with --substrate container",
    )
