"""On which nodes there is what a request names and only some have: snapshots and volumes lie where they were made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from dsec.cluster.rpc import Rpc
from dsec.core.errors import (
    CapacityError,
    DsecError,
    InvalidArgumentError,
    NotFoundError,
    Outcome,
    UnavailableError,
)
from dsec.core.ids import NodeId
from dsec.wire.codec import pack
from dsec.wire.node import Caller, Method, Right
from dsec.wire.records import CreateRequest
from dsec.wire.snapshots import SnapshotRef
from dsec.wire.volumes import VolumeRef

_AT_ONCE: Final = 64
_NAMED_MAX: Final = 5
_ANSWER_S: Final = 5.0  # of one node

Asked = Sequence[tuple[Method, Any]]


def named_by(method: Method, record: Any) -> Asked:
    """What one node has and a request names, of those that are about such a thing alone."""
    if method in (Method.SNAPSHOT_GET, Method.SNAPSHOT_REMOVE, Method.SNAPSHOT_PUBLISH):
        return ((Method.SNAPSHOT_GET, SnapshotRef(record.snapshot)),)
    if method in (Method.VOLUME_GET, Method.VOLUME_REMOVE):
        return ((Method.VOLUME_GET, record),)
    return ()


def needs(request: CreateRequest) -> Asked:
    """What a node has to have for it."""
    snapshots = () if request.snapshot is None else ((Method.SNAPSHOT_GET, SnapshotRef(request.snapshot)),)
    names = dict.fromkeys(volume.name for volume in request.spec.volumes)
    return (*snapshots, *((Method.VOLUME_GET, VolumeRef(name=name)) for name in names))


def inspector(project: str) -> Caller:
    return Caller(principal="api", project=project, rights=frozenset({Right.READ}))


def held_alone(full: CapacityError, node: NodeId) -> CapacityError:
    return CapacityError(
        f"what it names is on node {node}: {full.message}",
        hint=full.hint,
        retry_after_s=full.retry_after_s,
        detail=full.detail,
    )


async def the_holder(rpc: Rpc, nodes: Sequence[NodeId], asked: Asked, caller: Caller) -> NodeId:
    """Raises UnavailableError while a node does not say, InvalidArgumentError when several have it; when none has, it
    is any of them, to say so."""
    found, silent = await holders(rpc, nodes, asked, caller)
    if len(found) > 1:
        raise InvalidArgumentError(
            f"several nodes have it: {', '.join(found[:_NAMED_MAX])}", hint="name one: `dsec --node NODE …`"
        )
    if silent and not found:
        raise UnavailableError(
            f"node {silent[0]} does not say whether it has it", outcome=Outcome.UNCHANGED, retry_after_s=1.0
        )
    return (found or sorted(nodes))[0]


async def holders(rpc: Rpc, nodes: Sequence[NodeId], asked: Asked, caller: Caller) -> tuple[list[NodeId], list[NodeId]]:
    """Those of the nodes that have all of it, and those that do not say."""
    found: list[NodeId] = []
    silent: list[NodeId] = []
    turn = asyncio.Semaphore(_AT_ONCE)

    async def ask(node: NodeId) -> None:
        async with turn:
            try:
                for method, record in asked:
                    await rpc.call(node, method, pack(record), caller=caller, timeout_s=_ANSWER_S)
            except NotFoundError:
                return
            except DsecError:
                silent.append(node)
                return
            found.append(node)

    if asked:
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
    return sorted(found), sorted(silent)
