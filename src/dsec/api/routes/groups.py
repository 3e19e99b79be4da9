"""Groups: several sandboxes with private names, started and stopped as one."""

from __future__ import annotations

import asyncio

import msgspec

from dsec.api.groups import group_row, start_group, stop_group
from dsec.api.query import Kind, Param
from dsec.api.request import CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.core.errors import NotFoundError
from dsec.core.ids import parse_name
from dsec.core.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.core.states import SandboxState
from dsec.iam.projects import reaches
from dsec.wire.codec import to_json
from dsec.wire.groups import GroupDown, GroupInfo, GroupPage, GroupRequest
from dsec.wire.jobs import JobRow, group_of
from dsec.wire.node import Right
from dsec.wire.plans import GroupExplanation
from dsec.wire.records import ListQuery


async def create_group(request: Request) -> Answer:
    """Goes on without its client: by its name it is found, and asked for again it is answered."""
    body = await request.record(GroupRequest)
    row = await asyncio.shield(request.services.keeper.start(start_group(request, body)))
    return Answer(to_json(await _shown(request, row)), status=201)


async def explain_group(request: Request) -> Answer:
    body = await request.record(GroupRequest)
    return Answer(to_json(await request.services.admission.explain_group(body, request.caller)))


async def list_groups(request: Request) -> Answer:
    caller, limit, cursor = request.caller, request.query["limit"], request.query["cursor"] or ""
    rows = request.services.jobs.list(lambda project: reaches(caller.project, project))
    left = [row for row in rows if row.group is not None and f"{row.project} {row.name}" > cursor]
    more = len(left) > limit > 0
    page = left[:limit]
    return Answer(to_json(GroupPage([group_of(row) for row in page], _cursor(page[-1]) if more else None)))


def _cursor(row: JobRow) -> str:
    return f"{row.project} {row.name}"


async def get_group(request: Request) -> Answer:
    row = await _group(request)
    return Answer(to_json(await _shown(request, row)))


async def remove_group(request: Request) -> Answer:
    row = await _group(request)
    failed = await asyncio.shield(request.services.keeper.start(stop_group(request, row)))
    return Answer(to_json(GroupDown(failed=failed)))


async def _shown(request: Request, row: JobRow) -> GroupInfo:
    query = ListQuery(job=row.name, states=list(map(str, SandboxState)), limit=LIST_PAGE_MAX)
    page = await request.services.fleet.listing(query, caller=request.caller, timeout_s=CALL_TIMEOUT_S)
    own = set(row.group.members.values()) if row.group is not None else set()
    found = [one for one in page.sandboxes if one.project == row.project and (one.id in own or one.ended_at is None)]
    return msgspec.structs.replace(group_of(row), sandboxes=found, missing=page.missing)


async def _group(request: Request) -> JobRow:
    name = parse_name(request.segment("name"), "group name")
    try:
        row = await request.services.jobs.get(request.caller.project, name)
    except NotFoundError:
        raise NotFoundError(f"there is no group {name!r}", hint="`dsec group ls` shows them") from None
    return group_row(row)


_ONE = "/v1/groups/{name}"

ROUTES = (
    Route(
        "POST",
        "/v1/groups",
        create_group,
        "Start a group: all its members, in order, or none. The same again is success.",
        Right.USE,
        body=GroupRequest,
        answer=GroupInfo,
        status=201,
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/groups:explain",
        explain_group,
        "What would become of a group now, and why. Nothing happens.",
        Right.USE,
        body=GroupRequest,
        answer=GroupExplanation,
    ),
    Route(
        "GET",
        "/v1/groups",
        list_groups,
        "The groups of your projects.",
        Right.READ,
        params=(
            Param("limit", Kind.INT, "of one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
            Param("cursor", Kind.TEXT, "`next` of the page before"),
        ),
        answer=GroupPage,
    ),
    Route("GET", _ONE, get_group, "One group, and its sandboxes.", Right.READ, answer=GroupInfo, statuses=(404,)),
    Route(
        "DELETE",
        _ONE,
        remove_group,
        "Destroy the sandboxes of a group, and forget it.",
        Right.USE,
        answer=GroupDown,
        statuses=(404, 409),
        mutates=True,
    ),
)
