"""Snapshots, forks and rollbacks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routes import everywhere
from dsec.api.routing import Route
from dsec.core.ids import parse_name
from dsec.core.limits import CREATE_TIMEOUT_S_MAX, LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.wire.codec import to_json, unpack
from dsec.wire.node import Done, Method, Right
from dsec.wire.records import Sandbox
from dsec.wire.snapshots import (
    Fork,
    Forked,
    ForkRequest,
    Publish,
    Published,
    PublishRequest,
    Rollback,
    RollbackRequest,
    SnapshotInfo,
    SnapshotPage,
    SnapshotQuery,
    SnapshotRef,
    SnapshotRequest,
    SnapshotTake,
)

_TIMEOUT_S = CREATE_TIMEOUT_S_MAX  # what a sandbox has written may be much, and is read and written twice
_ROLLBACK_TIMEOUT_S = 180.0  # the node has its own, shorter deadlines for its steps


async def take_snapshot(request: Request) -> Answer:
    body = await request.record(SnapshotRequest)
    answer = await request.keyed(Method.SNAPSHOT_TAKE, SnapshotTake(request.sandbox, body), timeout_s=_TIMEOUT_S)
    return Answer(to_json(unpack(answer, SnapshotInfo)), status=201)


async def fork_sandbox(request: Request) -> Answer:
    body = await request.record(ForkRequest)
    fork = Fork(request.sandbox, body)
    services = request.services

    def ask() -> Coroutine[Any, Any, bytes]:
        return request.call(Method.FORK, fork, timeout_s=_TIMEOUT_S)

    answer = await request.kept(services.admission.fork(fork, ask, request.caller, request.key))
    return Answer(to_json(unpack(answer, Forked)), status=201)


async def roll_sandbox_back(request: Request) -> Answer:
    body = await request.record(RollbackRequest)
    return await request.forward(
        Method.ROLLBACK, Rollback(request.sandbox, body), Sandbox, timeout_s=_ROLLBACK_TIMEOUT_S
    )


async def list_snapshots(request: Request) -> Answer:
    query = request.query
    listing = SnapshotQuery(sandbox=query["sandbox"], limit=query["limit"], cursor=query["cursor"])
    return Answer(to_json(await everywhere.snapshots(request, listing)))


async def get_snapshot(request: Request) -> Answer:
    return await request.forward(Method.SNAPSHOT_GET, _named(request), SnapshotInfo)


async def remove_snapshot(request: Request) -> Answer:
    return await request.forward(Method.SNAPSHOT_REMOVE, _named(request), Done)


async def publish_snapshot(request: Request) -> Answer:
    body = await request.record(PublishRequest)
    publish = Publish(_named(request).snapshot, body)
    return await request.forward(Method.SNAPSHOT_PUBLISH, publish, Published, timeout_s=_TIMEOUT_S)


def _named(request: Request) -> SnapshotRef:
    return SnapshotRef(parse_name(request.segment("name"), "snapshot name"))


_LIST = (
    Param("sandbox", Kind.TEXT, "only those of this sandbox, by its id"),
    Param("limit", Kind.INT, "of one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
    Param("cursor", Kind.TEXT, "`next` of the page before"),
)
_ONE = "/v1/snapshots/{name}"

ROUTES = (
    Route(
        "POST",
        "/v1/sandboxes/{id}:snapshot",
        take_snapshot,
        "Keep what a sandbox has on its disk now. It stands still for a moment, and goes on.",
        Right.USE,
        body=SnapshotRequest,
        answer=SnapshotInfo,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}:fork",
        fork_sandbox,
        "Make several sandboxes on what this one has on its disk now: all of them, or none.",
        Right.USE,
        body=ForkRequest,
        answer=Forked,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}:rollback",
        roll_sandbox_back,
        "Take a sandbox back to a snapshot. All that runs in it ends; it stays the same sandbox.",
        Right.USE,
        body=RollbackRequest,
        answer=Sandbox,
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route("GET", "/v1/snapshots", list_snapshots, "List snapshots.", Right.READ, params=_LIST, answer=SnapshotPage),
    Route("GET", _ONE, get_snapshot, "One snapshot, by name or id.", Right.READ, answer=SnapshotInfo, statuses=(404,)),
    Route(
        "POST",
        "/v1/snapshots/{name}:publish",
        publish_snapshot,
        "Make a workspace or toolkit of what a snapshot has above its environment, without residue.",
        Right.ADMIN,
        body=PublishRequest,
        answer=Published,
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "DELETE",
        _ONE,
        remove_snapshot,
        "Remove a snapshot that no living sandbox was made from.",
        Right.USE,
        answer=Done,
        statuses=(404, 409),
        mutates=True,
    ),
)
