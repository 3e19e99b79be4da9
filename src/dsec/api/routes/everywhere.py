"""What every node of a cluster has, in one answer: lists of environments, volumes and snapshots."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec

from dsec.api.request import CALL_TIMEOUT_S, Request
from dsec.core.errors import DeadlineError, NodeRetiredError, UnavailableError
from dsec.core.ids import NodeId, parse_node_id
from dsec.wire.api import HEADER_NODE
from dsec.wire.codec import pack, unpack
from dsec.wire.environments import EnvironmentInfo, EnvironmentPage
from dsec.wire.node import Method, Nothing
from dsec.wire.snapshots import SnapshotPage, SnapshotQuery
from dsec.wire.volumes import VolumePage

T = TypeVar("T")
_AWAY = (UnavailableError, DeadlineError, NodeRetiredError)


async def environments(request: Request) -> EnvironmentPage:
    """One row for each name and content, with the nodes that have it."""
    pages, missing = await _ask_all(request, Method.ENVIRONMENT_LIST, Nothing(), EnvironmentPage)
    found: dict[tuple[str, str, tuple[str, ...]], EnvironmentInfo] = {}
    for node, page in pages:
        for info in page.environments:
            known = found.get(key := (info.name, info.digest, info.layers), info)
            found[key] = msgspec.structs.replace(known, nodes=(*known.nodes, str(node)))
    return EnvironmentPage([found[key] for key in sorted(found)], missing)


async def volumes(request: Request) -> VolumePage:
    pages, missing = await _ask_all(request, Method.VOLUME_LIST, Nothing(), VolumePage)
    found = [msgspec.structs.replace(volume, node=str(node)) for node, page in pages for volume in page.volumes]
    return VolumePage(found, missing)


async def snapshots(request: Request, query: SnapshotQuery) -> SnapshotPage:
    """One node after the other: the cursor says which, and how far in it."""
    nodes = _nodes(request)
    first, slash, inside = (query.cursor or "").partition("/")
    if not slash and len(nodes) == 1:
        first, inside = str(nodes[0]), query.cursor or ""
    found, missing = SnapshotPage(), _silent(request)
    for index, node in enumerate(nodes):
        if node < first:
            continue
        left = query.limit - len(found.snapshots)
        own = msgspec.structs.replace(query, limit=left, cursor=(inside or None) if node == first else None)
        try:
            page = await _ask(request, node, Method.SNAPSHOT_LIST, own, SnapshotPage)
        except _AWAY:
            missing.append(str(node))
            continue
        more = [msgspec.structs.replace(snapshot, node=str(node)) for snapshot in page.snapshots]
        found = SnapshotPage([*found.snapshots, *more], None, missing)
        if page.next is not None:
            return msgspec.structs.replace(found, next=page.next if len(nodes) == 1 else f"{node}/{page.next}")
        if len(found.snapshots) == query.limit and index + 1 < len(nodes):
            return msgspec.structs.replace(found, next=f"{nodes[index + 1]}/")
    return SnapshotPage(found.snapshots, None, missing)


async def _ask_all(
    request: Request, method: Method, record: Any, kind: type[T]
) -> tuple[list[tuple[NodeId, T]], list[str]]:
    nodes, missing = _nodes(request), _silent(request)
    answers = await asyncio.gather(
        *(_ask(request, node, method, record, kind) for node in nodes), return_exceptions=True
    )
    found = list[tuple[NodeId, T]]()
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, _AWAY) and len(nodes) > 1:
            missing.append(str(node))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append((node, answer))
    return found, sorted(missing)


async def _ask(request: Request, node: NodeId, method: Method, record: Any, kind: type[T]) -> T:
    body = pack(record)
    answer = await request.services.rpc.call(node, method, body, caller=request.caller, timeout_s=CALL_TIMEOUT_S)
    return unpack(answer, kind)


def _nodes(request: Request) -> list[NodeId]:
    """The one that is named, or all."""
    named = request.header(HEADER_NODE.lower().encode())
    if named is not None:
        return [parse_node_id(named.decode("ascii", "replace"))]
    return sorted(request.services.fleet.nodes())


def _silent(request: Request) -> list[str]:
    """Of all that have something: those that are not even asked."""
    if request.header(HEADER_NODE.lower().encode()) is not None:
        return []
    return sorted(map(str, request.services.fleet.silent()))
