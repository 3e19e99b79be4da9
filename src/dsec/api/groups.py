"""Starts a group: all its members, on one node where they fit there, in order, or none of them.

While it starts, its job has a lease that this replica renews: should the replica end, whoever watches leases stops what
there is by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from typing import Final

from dsec.api.request import Request
from dsec.api.routes.sandboxes import create
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DsecError,
    NotFoundError,
    Outcome,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, SandboxId, node_of
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack
from dsec.wire.groups import GroupNote, GroupRequest, create_request, levels, links_across
from dsec.wire.jobs import JobOrderKind, JobRequest, JobRow, JobState, OnMissed
from dsec.wire.records import CreateRequest, Sandbox

log = get_logger(__name__)

_LEASE_S: Final = 60.0
_BEAT_S: Final = 15.0
_TRIES: Final = 3  # each after a node has refused one of them, and all that was made is gone
_ELSEWHERE: Final = (CapacityError, NotFoundError, UnsupportedError)


async def start_group(request: Request, asked: GroupRequest) -> JobRow:
    """The row of a group that is whole. The same again is success.

    Raises ConflictError (another of that name), UnavailableError (it is being started: ask again), and what a create
    raises, with the member that failed in `detail`: then nothing is left of it.
    """
    jobs, caller = request.services.jobs, request.caller
    note = GroupNote(digest=hashlib.sha256(pack(asked)).digest())
    terms = JobRequest(name=asked.name, lease_s=_LEASE_S, on_missed=OnMissed.STOP, grace_s=0.0)
    before = jobs.known(caller.project, asked.name)
    row = await jobs.create(terms, project=caller.project, principal=caller.principal, group=note)
    if row.group is not None and row.group.members:
        return row
    if before is not None and before.id == row.id:
        raise UnavailableError(
            f"group {asked.name} is being started", outcome=Outcome.UNCHANGED, hint="ask again", retry_after_s=2.0
        )
    beating = asyncio.create_task(_beat(request, row), name=f"lease of group {row.name}")
    try:
        members = await _members(request, asked, row)
        return await jobs.started(row, members)
    except BaseException:
        # Whatever becomes of the caller.
        await asyncio.shield(asyncio.create_task(stop_group(request, row)))
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def stop_group(request: Request, row: JobRow) -> dict[str, str]:
    """What is not gone yet, and why. Without anything the name is free again."""
    jobs, orders = request.services.jobs, request.services.orders
    failed: dict[str, str] = {}
    # Of a group that was whole it is known where it is: another node that is away has nothing of it.
    members = {} if row.group is None else row.group.members
    places = {node_of(SandboxId(id)) for id in members.values()}
    try:
        row = await jobs.move(row.project, row.name, JobState.STOPPED, id=row.id)
        async with contextlib.aclosing(orders.give(row, JobOrderKind.STOP)) as parts:
            async for part in parts:
                if part.error is not None and (not places or part.node in places):
                    failed[part.node] = part.error.message
                failed |= {item.sandbox: item.error.message for item in part.items if item.error is not None}
        if not failed and await jobs.settle(row):
            await jobs.remove(row.project, row.name, id=row.id)
    except DsecError as error:
        log.warning("a group could not be stopped whole; it is gone on with", group=row.name, error=error.message)
        failed.setdefault(row.name, error.message)
    return failed


async def _members(request: Request, asked: GroupRequest, row: JobRow) -> dict[str, str]:
    """On other nodes when one lacks something."""
    wanted = {name: create_request(asked, name) for name in asked.members}
    refused: dict[str, set[NodeId]] = {}

    def places() -> dict[str, NodeId]:
        return request.services.fleet.places(wanted, refused, request.caller.project, linked=bool(asked.links))

    found = places()
    for left in reversed(range(_TRIES)):
        # Nodes look up there who may reach what, from the first member on.
        row = await _write_down(request, asked, row, found)
        try:
            return await _at(request, wanted, asked, found)
        except _ELSEWHERE as error:
            member = error.detail["member"]
            refused.setdefault(member, set()).add(found[member])
            if not left:
                raise
            try:
                found = places()
            except DsecError:
                raise error from None
            await _clear(request, row)
    raise AssertionError("the last try raises")


async def _write_down(request: Request, asked: GroupRequest, row: JobRow, places: Mapping[str, NodeId]) -> JobRow:
    several = len(set(places.values())) > 1
    nodes: dict[str, str] = {name: str(node) for name, node in places.items()} if several else {}
    across = links_across(asked, nodes) if several else {}
    if row.group is not None and (row.group.nodes, row.group.across) == (nodes, across):
        return row
    return await request.services.jobs.placed(row, nodes, across)


async def _at(
    request: Request, wanted: Mapping[str, CreateRequest], asked: GroupRequest, places: Mapping[str, NodeId]
) -> dict[str, str]:
    made: dict[str, str] = {}
    turn = asyncio.Semaphore(limits.GROUPS_AT_ONCE_MAX)

    async def make(name: str) -> Sandbox:
        async with turn:
            try:
                # Without a key, so that a create is given up with the group, and does not go on by itself.
                return await create(request, wanted[name], key=None, at=places[name])
            except DsecError as error:
                error.message = f"member {name} of group {asked.name} could not be started: {error.message}"
                error.detail = {**error.detail, "member": name}
                raise

    for level in levels(asked):
        tasks = [asyncio.create_task(make(name), name=f"member {name}") for name in level]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for failed in tasks:
            if not failed.cancelled() and failed.exception() is not None:
                failed.result()  # raises
        made |= {name: task.result().id for name, task in zip(level, tasks, strict=True)}
    return made


async def _clear(request: Request, row: JobRow) -> None:
    """What was made on a node that the group does not fit on. Raises when some of it is there yet."""
    if not await request.services.orders.carry_out(row, JobOrderKind.CLEAR, going=lambda: True):
        raise ConflictError(f"what was made of group {row.name} is not gone yet", outcome=Outcome.UNKNOWN)


async def _beat(request: Request, row: JobRow) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        with contextlib.suppress(DsecError):
            await request.services.jobs.beat(row.project, row.name)


def group_row(row: JobRow) -> JobRow:
    """Raises NotFoundError for a job that is no group."""
    if row.group is None:
        raise NotFoundError(f"there is no group {row.name!r}", hint="it is a job, with which `dsec job` deals")
    return row
