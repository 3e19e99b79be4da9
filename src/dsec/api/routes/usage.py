"""What sandboxes have used, of all nodes together."""

from __future__ import annotations

import asyncio

import msgspec

from dsec.api.query import Kind, Param
from dsec.api.request import CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.core.errors import DeadlineError, InvalidArgumentError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.wire.codec import pack, to_json, unpack
from dsec.wire.node import Method, Right
from dsec.wire.usage import UsageBy, UsagePage, UsageQuery, UsageTotal, added

_AWAY = (UnavailableError, DeadlineError)


async def get_usage(request: Request) -> Answer:
    query = request.query
    try:
        by = UsageBy(query["by"])
    except ValueError as error:
        raise InvalidArgumentError(f"there is no usage by {query['by'][:40]!r}", hint=", ".join(UsageBy)) from error
    asked = UsageQuery(
        project=query["project"],
        since=query["since"],
        until=query["until"],
        by=by,
        job=query["job"],
        limit=query["limit"],
    )
    nodes = sorted(request.services.admission.nodes())
    page = await (_records if by is UsageBy.SANDBOX else _totals)(request, asked, nodes, query["cursor"])
    if asked.project is not None and not page.totals and not page.records and query["cursor"] is None:
        request.services.iam.projects.get(asked.project, by=request.who)  # one that was removed has used something
    return Answer(to_json(page))


async def _totals(request: Request, query: UsageQuery, nodes: list[NodeId], _: str | None) -> UsagePage:
    answers = await asyncio.gather(*(_ask(request, node, query) for node in nodes))
    found: dict[tuple[str, str, str], UsageTotal] = {}
    for page in answers:
        for total in page.totals if page is not None else ():
            key = (total.project, total.day or "", total.job or "")
            found[key] = added(found[key], total) if key in found else total
    missing = [str(node) for node, page in zip(nodes, answers, strict=True) if page is None]
    return UsagePage(totals=[found[key] for key in sorted(found)], missing=missing)


async def _records(request: Request, query: UsageQuery, nodes: list[NodeId], cursor: str | None) -> UsagePage:
    """One node after the other: the cursor says which, and how far in it."""
    first, _, inside = (cursor or "").partition("/")
    found = UsagePage()
    for node in nodes:
        if node < first:
            continue
        left = query.limit - len(found.records)
        own = msgspec.structs.replace(query, limit=left, cursor=inside or None) if node == first else query
        page = await _ask(request, node, msgspec.structs.replace(own, limit=left))
        if page is None:
            found = msgspec.structs.replace(found, missing=[*found.missing, str(node)])
            continue
        found = msgspec.structs.replace(found, records=[*found.records, *page.records])
        if page.next is not None:
            return msgspec.structs.replace(found, next=f"{node}/{page.next}")
        if len(found.records) == query.limit and node != nodes[-1]:
            return msgspec.structs.replace(found, next=f"{nodes[nodes.index(node) + 1]}/")
    return found


async def _ask(request: Request, node: NodeId, query: UsageQuery) -> UsagePage | None:
    try:
        answer = await request.services.rpc.call(
            node, Method.USAGE, pack(query), caller=request.caller, timeout_s=CALL_TIMEOUT_S
        )
    except _AWAY:
        return None
    return unpack(answer, UsagePage)


ROUTES = (
    Route(
        "GET",
        "/v1/usage",
        get_usage,
        "What sandboxes of a project, and of those below it, have used.",
        Right.READ,
        params=(
            Param("project", Kind.TEXT, "this one and those below it; default: the caller's"),
            Param("since", Kind.SECONDS, "that ended then or later, since the epoch", default=0.0),
            Param("until", Kind.SECONDS, "that ended before; default: and those that live"),
            Param("by", Kind.TEXT, "project, day, job or sandbox", default="project"),
            Param("job", Kind.TEXT, "of this job, by job or sandbox"),
            Param("limit", Kind.INT, "of records in one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
            Param("cursor", Kind.TEXT, "`next` of the page before"),
        ),
        answer=UsagePage,
        statuses=(404,),
    ),
)
