"""What operators and the watcher say of a node, written one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from dsec.cluster.registry import Bucket, Registry
from dsec.core.errors import ConflictError, NodeRetiredError, NotFoundError, ProtocolError, UnavailableError
from dsec.core.ids import NodeId
from dsec.wire.cluster import Member, Ruling, Wanted, ruling_key
from dsec.wire.codec import pack, unpack

_ROUNDS: Final = 8


async def want(registry: Registry, node: NodeId, wanted: Wanted, *, note: str = "") -> Ruling:
    """Raises NotFoundError for what never was a member, NodeRetiredError for one that has left for good."""
    if await registry.get(Bucket.MEMBERS, node) is None:
        raise NotFoundError(f"there is no node {node} in this cluster")

    def change(old: Ruling) -> Ruling:
        if old.wanted == Wanted.RETIRE and wanted != Wanted.RETIRE:
            raise NodeRetiredError(f"node {node} has been retired", hint="its machine can join under a new id")
        return msgspec.structs.replace(old, wanted=wanted, note=note)

    return await _change(registry, node, change)


async def declare_lost(registry: Registry, member: Member, *, at: float) -> Ruling:
    """The term of `member`, and what came before: a node that has joined again meanwhile is not lost."""

    def change(old: Ruling) -> Ruling:
        if old.lost_term >= member.term:
            return old
        return msgspec.structs.replace(old, lost_term=member.term, lost_at=at)

    return await _change(registry, NodeId(member.node), change)


async def note_buried(registry: Registry, member: Member) -> Ruling:
    """What sandboxes of this term there were has tombstones."""

    def change(old: Ruling) -> Ruling:
        return msgspec.structs.replace(old, buried_term=max(old.buried_term, member.term))

    return await _change(registry, NodeId(member.node), change)


async def _change(registry: Registry, node: NodeId, change: Callable[[Ruling], Ruling]) -> Ruling:
    key = ruling_key(node)
    for _ in range(_ROUNDS):
        entry = await registry.get(Bucket.MEMBERS, key)
        old = Ruling() if entry is None else _read(entry.value)
        new = change(old)
        if entry is not None and new == old:
            return new
        try:
            if entry is None:
                await registry.create(Bucket.MEMBERS, key, pack(new))
            else:
                await registry.update(Bucket.MEMBERS, key, pack(new), revision=entry.revision)
            return new
        except ConflictError:
            continue
    raise UnavailableError(f"what is wanted of node {node} changes all the time")


def _read(value: bytes) -> Ruling:
    try:
        return unpack(value, Ruling)
    except ProtocolError:
        return Ruling()
