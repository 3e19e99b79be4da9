"""Projects, their quotas and policies, and what was done in them."""

from __future__ import annotations

from bisect import bisect_right

from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.core.errors import ConflictError, UnavailableError
from dsec.core.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.iam.principals import Right as Words
from dsec.iam.projects import ROOT, parse_project
from dsec.iam.rows import ProjectRow
from dsec.observe.logs import get_logger
from dsec.wire.codec import to_json
from dsec.wire.iam import AuditPage, Policy, ProjectInfo, ProjectPage, ProjectRequest, Quota, QuotaInfo
from dsec.wire.node import Done, Right

log = get_logger(__name__)


async def create_project(request: Request) -> Answer:
    body = await request.record(ProjectRequest)
    projects, path = request.services.iam.projects, parse_project(body.path)
    if projects.may_be_made(path, by=request.who):
        # Of an earlier project of this path: a request that was under way when it was removed may have made something.
        _refuse_what_is_left(path, await request.services.admission.left_of(path, strict=False))
        await _clear(request, path)
    row = await projects.create(body.path, by=request.who)
    return Answer(to_json(_info(row)), status=201)


async def list_projects(request: Request) -> Answer:
    query = request.query
    found = request.services.iam.projects.visible(by=request.who, below=parse_project(query["below"] or ROOT))
    start = bisect_right(found, query["cursor"], key=lambda row: row.path) if query["cursor"] else 0
    page = found[start : start + max(1, query["limit"])]
    more = page[-1].path if start + len(page) < len(found) else None
    return Answer(to_json(ProjectPage([_info(row) for row in page], next=more)))


async def get_project(request: Request) -> Answer:
    return Answer(to_json(_info(request.services.iam.projects.get(_path(request), by=request.who))))


async def remove_project(request: Request) -> Answer:
    path, iam = _path(request), request.services.iam
    iam.projects.get(path, by=request.who)
    # Nodes know projects by their paths: whoever makes one of this path again must not find what this one had.
    _refuse_what_is_left(path, await request.services.admission.left_of(path, strict=True))
    await iam.projects.remove(path, by=request.who)
    await _clear(request, path)
    return Answer(to_json(Done()))


def _refuse_what_is_left(path: str, left: dict[str, int]) -> None:
    if left:
        what = ", ".join(f"{kind} ({count})" for kind, count in sorted(left.items()))
        raise ConflictError(f"in {path} there are {what}", hint="remove them first", detail={"left": left})


async def _clear(request: Request, path: str) -> None:
    """Of a project that is not there, and has no sandboxes: its jobs end, and what is leased of its caps. What is not
    removed now is removed before there is one of this path again."""
    services = request.services
    try:
        await services.jobs.drop(path)
        await services.admission.ledger.forget(path)
    except UnavailableError as error:
        log.warning("jobs of a removed project are there yet", project=path, why=error.message)


async def get_quota(request: Request) -> Answer:
    row = request.services.iam.projects.get(_path(request), by=request.who)
    return Answer(to_json(await _quota(request, row)))


async def set_quota(request: Request) -> Answer:
    body = await request.record(Quota)
    row = await request.services.iam.projects.lay_down(_path(request), quota=body, by=request.who)
    return Answer(to_json(await _quota(request, row)))


async def set_policy(request: Request) -> Answer:
    body = await request.record(Policy)
    row = await request.services.iam.projects.lay_down(_path(request), policy=body, by=request.who)
    return Answer(to_json(_info(row)))


async def _quota(request: Request, row: ProjectRow) -> QuotaInfo:
    services = request.services
    binding = await services.admission.ledger.uses(services.iam.directory.rules(row.path).quotas)
    return QuotaInfo(project=row.path, quota=row.quota, binding=binding)


async def list_audit(request: Request) -> Answer:
    query, who = request.query, request.who
    page = await request.services.iam.audit.page(
        lambda project: who.best(project, Words.MANAGE) is not None,
        after=query["cursor"],
        limit=query["limit"],
        principal=query["principal"],
    )
    return Answer(to_json(page))


def _path(request: Request) -> str:
    return parse_project(request.query["path"])


def _info(row: ProjectRow) -> ProjectInfo:
    return ProjectInfo(
        path=row.path, created_at=row.created_at, created_by=row.created_by, quota=row.quota, policy=row.policy
    )


_PATH = (Param("path", Kind.TEXT, "of the project, such as /team/run-7", required=True),)
_PAGE = (
    Param("limit", Kind.INT, "of one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
    Param("cursor", Kind.TEXT, "`next` of the page before"),
)

ROUTES = (
    Route(
        "POST",
        "/v1/projects",
        create_project,
        "Make a project below one that you manage.",
        Right.MANAGE,
        body=ProjectRequest,
        answer=ProjectInfo,
        status=201,
        statuses=(404, 409, 429),
    ),
    Route(
        "GET",
        "/v1/projects",
        list_projects,
        "The projects that you may read, by path.",
        Right.READ,
        params=(Param("below", Kind.TEXT, "only this one and those below it"), *_PAGE),
        answer=ProjectPage,
    ),
    Route(
        "GET",
        "/v1/project",
        get_project,
        "One project, with its quota and its policy.",
        Right.READ,
        params=_PATH,
        answer=ProjectInfo,
        statuses=(404,),
    ),
    Route(
        "DELETE",
        "/v1/project",
        remove_project,
        "Remove a project without sandboxes, snapshots, volumes and projects below, with its jobs, principals, grants "
        "and tokens.",
        Right.MANAGE,
        params=_PATH,
        answer=Done,
        statuses=(404, 409),
        mutates=True,
    ),
    Route(
        "GET",
        "/v1/project/quota",
        get_quota,
        "Its caps, those of the projects above it that bind it, and what is used of each.",
        Right.READ,
        params=_PATH,
        answer=QuotaInfo,
        statuses=(404,),
    ),
    Route(
        "PUT",
        "/v1/project/quota",
        set_quota,
        "Replace its caps. Takes the right manage over the project above it.",
        Right.MANAGE,
        params=_PATH,
        body=Quota,
        answer=QuotaInfo,
        statuses=(404,),
        mutates=True,
    ),
    Route(
        "PUT",
        "/v1/project/policy",
        set_policy,
        "Replace its policy. Takes the right manage over the project above it.",
        Right.MANAGE,
        params=_PATH,
        body=Policy,
        answer=ProjectInfo,
        statuses=(404,),
        mutates=True,
    ),
    Route(
        "GET",
        "/v1/audit",
        list_audit,
        "Who changed what, newest first, in projects that you manage.",
        Right.MANAGE,
        params=(Param("principal", Kind.TEXT, "only of this one, such as ci@/team"), *_PAGE),
        answer=AuditPage,
    ),
)
