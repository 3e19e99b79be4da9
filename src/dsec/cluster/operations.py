"""Creates with a key happen once, whichever replicas are asked (ruling 3): the registry says which node a key is at."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from dsec.cluster.registry import Bucket, Registry, key_of
from dsec.core.clock import Clock, SteadyWall
from dsec.core.errors import ConflictError, IdempotencyError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import IDEMPOTENCY_TTL_S
from dsec.wire.codec import pack, unpack
from dsec.wire.records import CreateRequest

_ROUNDS: Final = 16
_SKEW_S: Final = 60.0  # between clocks of replicas


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """OPS/<project>.<key>."""

    node: str
    request: bytes  # digest
    tries: int  # that have begun, by any replica, at this node
    until: float  # when the last of them has ended, whatever became of its replica


@dataclass(frozen=True, slots=True)
class Operation:
    """One try, of which the registry knows before the node is asked."""

    place: str
    node: NodeId
    request: bytes
    tries: int
    until: float
    alone: bool  # no other try is under way at this node
    revision: int

    @property
    def first(self) -> bool:
        """Nobody else can have asked this node: what has not reached it has not happened."""
        return self.tries == 1


class Operations:
    """Every try is written down by compare-and-set before the node is called. So who moves a key to another node does
    it on what it wrote itself, and knows that nobody has begun a try meanwhile."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._wall = SteadyWall(clock)

    async def again(self, project: str, key: str, request: CreateRequest, *, timeout_s: float) -> Operation | None:
        """A further try of a key that is known; None: it is not. Raises IdempotencyError for another request."""
        place, digest = key_of(project, key), _digest(request)
        for _ in range(_ROUNDS):
            entry = await self._registry.get(Bucket.OPS, place)
            if entry is None:
                return None
            stored = unpack(entry.value, _Stored)
            if stored.request != digest:
                raise IdempotencyError(
                    "the idempotency key was used for a different request", hint="use a new key for a new sandbox"
                )
            now = self._wall.now_s()
            found = Operation(
                place,
                NodeId(stored.node),
                digest,
                stored.tries + 1,
                max(stored.until, now + timeout_s + _SKEW_S),
                now > stored.until,
                entry.revision,
            )
            try:
                return await self._write(found)
            except ConflictError:
                continue
        raise UnavailableError(f"a key is tried by many at once: {key[:40]!r}", retry_after_s=1.0)

    async def node_of(self, project: str, key: str) -> NodeId | None:
        """Which node a key is at; None: it is not known."""
        entry = await self._registry.get(Bucket.OPS, key_of(project, key))
        return None if entry is None else NodeId(unpack(entry.value, _Stored).node)

    async def begin(
        self, project: str, key: str, request: CreateRequest, node: NodeId, *, timeout_s: float
    ) -> Operation:
        """The first try, at `node`. Raises ConflictError when somebody was faster."""
        place, digest = key_of(project, key), _digest(request)
        until = self._wall.now_s() + timeout_s + _SKEW_S
        stored = _Stored(node=node, request=digest, tries=1, until=until)
        revision = await self._registry.create(Bucket.OPS, place, pack(stored), ttl_s=IDEMPOTENCY_TTL_S)
        return Operation(place, node, digest, 1, until, True, revision)

    async def begin_all(
        self, project: str, keys: Sequence[str], request: CreateRequest, nodes: Sequence[NodeId], *, timeout_s: float
    ) -> list[Operation]:
        """As `begin` of each, at its node, in one write; of all or of none. Raises ConflictError, UnavailableError:
        then each is begun by itself, and what is there is found."""
        digest, until = _digest(request), self._wall.now_s() + timeout_s + _SKEW_S
        places = [key_of(project, key) for key in keys]
        values = {node: pack(_Stored(node=node, request=digest, tries=1, until=until)) for node in set(nodes)}
        entries = [(place, values[node]) for place, node in zip(places, nodes, strict=True)]
        revisions = await self._registry.create_all(Bucket.OPS, entries, ttl_s=IDEMPOTENCY_TTL_S)
        return [
            Operation(place, node, digest, 1, until, True, revision)
            for place, node, revision in zip(places, nodes, revisions, strict=True)
        ]

    async def over(self, operation: Operation) -> None:
        """It was refused for sure, and was `alone`: who asks again may be sent elsewhere. Not written is no harm."""
        try:
            await self._write(replace(operation, until=0.0))
        except (ConflictError, UnavailableError):
            return

    async def move(self, operation: Operation, node: NodeId, *, timeout_s: float) -> Operation:
        """Of one that is `alone`, to another node, after the one of before has refused for sure.

        Raises ConflictError when others have tried meanwhile: then ask `again`.
        """
        until = max(operation.until, self._wall.now_s() + timeout_s + _SKEW_S)
        return await self._write(replace(operation, node=node, tries=1, until=until))

    async def _write(self, operation: Operation) -> Operation:
        stored = _Stored(node=operation.node, request=operation.request, tries=operation.tries, until=operation.until)
        revision = await self._registry.update(
            Bucket.OPS, operation.place, pack(stored), revision=operation.revision, ttl_s=IDEMPOTENCY_TTL_S
        )
        return replace(operation, revision=revision)


def _digest(request: CreateRequest) -> bytes:
    return hashlib.sha256(pack(request)).digest()
