"""Grants and principals: who may do what where, and from whom they have it."""

from __future__ import annotations

from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.iam.rows import GrantRow, PrincipalRow
from dsec.wire.codec import to_json
from dsec.wire.iam import GrantInfo, GrantPage, GrantRequest, PrincipalInfo, PrincipalPage
from dsec.wire.node import Done, Right


async def create_grant(request: Request) -> Answer:
    body = await request.record(GrantRequest)
    row = await request.services.iam.delegation.grant(
        body.principal, project=body.project, right=str(body.right), ttl_s=body.ttl_s, by=request.who
    )
    return Answer(to_json(_info(row, in_force=True)), status=201)


async def list_grants(request: Request) -> Answer:
    found = request.services.iam.delegation.grants(by=request.who)
    return Answer(to_json(GrantPage([_info(row, in_force=in_force) for row, in_force in found])))


async def revoke_grant(request: Request) -> Answer:
    await request.services.iam.delegation.revoke(request.segment("grant"), by=request.who)
    return Answer(to_json(Done()))


async def list_principals(request: Request) -> Answer:
    rows = request.services.iam.delegation.principals(by=request.who)
    return Answer(to_json(PrincipalPage([_principal(request, row) for row in rows])))


async def remove_principal(request: Request) -> Answer:
    await request.services.iam.delegation.remove_principal(request.query["id"], by=request.who)
    return Answer(to_json(Done()))


def _info(row: GrantRow, *, in_force: bool) -> GrantInfo:
    return GrantInfo(
        id=row.id,
        principal=row.principal,
        project=row.project,
        right=row.right,
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        parent=row.parent,
        in_force=in_force,
    )


def _principal(request: Request, row: PrincipalRow) -> PrincipalInfo:
    view = request.services.iam.directory.view
    return PrincipalInfo(
        id=row.id,
        name=row.name,
        project=row.project,
        created_at=row.created_at,
        created_by=row.created_by,
        tokens=len(view.tokens_of(row.id)),
        grants=len(view.grants_of(row.id)),
    )


ROUTES = (
    Route(
        "POST",
        "/v1/grants",
        create_grant,
        "Give a principal a right over a project and all below it: at most what you have, for no longer.",
        Right.MANAGE,
        body=GrantRequest,
        answer=GrantInfo,
        status=201,
        statuses=(404, 409, 429),
    ),
    Route("GET", "/v1/grants", list_grants, "Grants over your projects, and your own.", Right.READ, answer=GrantPage),
    Route(
        "DELETE",
        "/v1/grants/{grant}",
        revoke_grant,
        "Take a grant back, and with it all that was given by it.",
        Right.READ,
        answer=Done,
        statuses=(404,),
        mutates=True,
    ),
    Route(
        "GET", "/v1/principals", list_principals, "The principals of your projects.", Right.MANAGE, answer=PrincipalPage
    ),
    Route(
        "DELETE",
        "/v1/principals",
        remove_principal,
        "Remove a principal, its tokens and grants, and all that it has given to others.",
        Right.MANAGE,
        params=(Param("id", Kind.TEXT, "such as ci@/team", required=True),),
        answer=Done,
        statuses=(404,),
        mutates=True,
    ),
)
