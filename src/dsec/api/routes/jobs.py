"""Jobs: sandboxes that are paused, resumed and stopped together, and have a lease."""

from __future__ import annotations

import contextlib

import msgspec

from dsec.api.errors import told
from dsec.api.query import Kind, Param
from dsec.api.request import Answer, ClientGoneError, Request
from dsec.api.routing import Handler, Route
from dsec.cluster.jobs.orders import KIND_OF, is_done
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_name
from dsec.core.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.iam.projects import reaches
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.codec import to_json
from dsec.wire.jobs import JobExtend, JobInfo, JobLine, JobPage, JobRequest, JobState, info_of
from dsec.wire.node import Done, Right


async def create_job(request: Request) -> Answer:
    body = await request.record(JobRequest)
    caller = request.caller
    row = await request.services.jobs.create(body, project=caller.project, principal=caller.principal)
    return Answer(to_json(info_of(row)), status=201)


async def list_jobs(request: Request) -> Answer:
    caller, limit = request.caller, request.query["limit"]
    after = _place(request.query["cursor"])
    if limit < 1:
        raise InvalidArgumentError("a page has at least one job")
    rows = request.services.jobs.list(lambda project: reaches(caller.project, project))
    left = [row for row in rows if (row.project, row.name) > after]
    page, more = left[:limit], len(left) > limit
    next = f"{page[-1].project} {page[-1].name}" if more else None
    return Answer(to_json(JobPage([info_of(row) for row in page], next)))


def _place(cursor: str | None) -> tuple[str, str]:
    project, _, name = (cursor or "").partition(" ")
    return project, name


async def get_job(request: Request) -> Answer:
    services = request.services
    row = await services.jobs.get(request.caller.project, _name(request))
    counts, missing = await services.orders.counts(row, request.caller)
    info = msgspec.structs.replace(info_of(row), sandboxes=counts, missing=missing)
    return Answer(to_json(info))


async def remove_job(request: Request) -> Answer:
    await request.services.jobs.remove(request.caller.project, _name(request))
    return Answer(to_json(Done()))


async def heartbeat_job(request: Request) -> Answer:
    row = await request.services.jobs.beat(request.caller.project, _name(request))
    return Answer(to_json(info_of(row)))


async def extend_job(request: Request) -> Answer:
    body = await request.record(JobExtend)
    row = await request.services.jobs.extend(request.caller.project, _name(request), body)
    return Answer(to_json(info_of(row)))


async def pause_job(request: Request) -> None:
    await _order(request, JobState.PAUSED)


async def resume_job(request: Request) -> None:
    await _order(request, JobState.RUNNING)


async def stop_job(request: Request) -> None:
    await _order(request, JobState.STOPPED)


async def _order(request: Request, state: JobState) -> None:
    """Tells what each node has done as it comes. What is not done when it ends is done by who watches leases."""
    services = request.services
    row = await services.jobs.move(request.caller.project, _name(request), state)
    await request.start(200, TYPE_NDJSON, [])
    try:
        done, kind = True, KIND_OF[state]
        async with contextlib.aclosing(services.orders.give(row, kind)) as parts:
            async for part in parts:
                done = done and is_done(part, kind)
                await _write(request, JobLine(part=part))
        if done:
            await services.jobs.settle(row)
            row = await services.jobs.get(row.project, row.name)
        await _write(request, JobLine(job=info_of(row)))
    except ClientGoneError:
        raise
    except Exception as error:
        await _write(request, JobLine(error=told(error)))
    await request.end()


async def _write(request: Request, line: JobLine) -> None:
    await request.write(to_json(line) + b"\n")


def _name(request: Request) -> str:
    return parse_name(request.segment("name"), "job name")


_ONE = "/v1/jobs/{name}"


def _acting(verb: str, handler: Handler, summary: str) -> Route:
    return Route(
        "POST",
        f"{_ONE}/{verb}",
        handler,
        summary,
        Right.USE,
        answer={TYPE_NDJSON: JobLine},
        statuses=(404, 409),
        mutates=True,
    )


_PAGE = (
    Param("limit", Kind.INT, "of one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
    Param("cursor", Kind.TEXT, "`next` of the page before"),
)

ROUTES = (
    Route(
        "POST",
        "/v1/jobs",
        create_job,
        "Make a job. The same again is success, and so is one after another of that name that was stopped.",
        Right.USE,
        body=JobRequest,
        answer=JobInfo,
        status=201,
        statuses=(409,),
        mutates=True,
    ),
    Route("GET", "/v1/jobs", list_jobs, "The jobs of your projects.", Right.READ, params=_PAGE, answer=JobPage),
    Route("GET", _ONE, get_job, "One job, and its sandboxes by state.", Right.READ, answer=JobInfo, statuses=(404,)),
    Route(
        "DELETE",
        _ONE,
        remove_job,
        "Forget a job that is stopped. It goes by itself after a day.",
        Right.USE,
        answer=Done,
        statuses=(404, 409),
        mutates=True,
    ),
    Route(
        "POST",
        f"{_ONE}/heartbeat",
        heartbeat_job,
        "The lease begins anew. A job that was paused by a missed lease goes on.",
        Right.USE,
        answer=JobInfo,
        statuses=(404, 409),
        mutates=True,
    ),
    Route(
        "POST",
        f"{_ONE}/extend",
        extend_job,
        "The lease is good for so long from now on, without heartbeats.",
        Right.USE,
        body=JobExtend,
        answer=JobInfo,
        statuses=(404, 409),
        mutates=True,
    ),
    _acting("pause", pause_job, "Pause its sandboxes, on all nodes. Takes nothing new."),
    _acting("resume", resume_job, "Let its sandboxes go on, on all nodes."),
    _acting("stop", stop_job, "Destroy its sandboxes, on all nodes, for good."),
)
