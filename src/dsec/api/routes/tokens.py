"""Tokens: made, listed, replaced and revoked by who manages their projects."""

from __future__ import annotations

from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.iam.principals import closed_rights, highest_right
from dsec.iam.rows import TokenRow
from dsec.wire.codec import to_json
from dsec.wire.iam import HeldInfo, WhoAmI
from dsec.wire.node import Right
from dsec.wire.tokens import RotateRequest, TokenAnswer, TokenInfo, TokenPage, TokenRequest

_SELF = "self"  # in place of an id: the token that the request came with


async def create_token(request: Request) -> Answer:
    body = await request.record(TokenRequest)
    right = highest_right(map(str, body.rights))
    text, token = await request.services.iam.tokens.create(
        body.principal, project=body.project, right=right, ttl_s=body.ttl_s, by=request.who
    )
    return Answer(to_json(TokenAnswer(token=text, info=_info(token))), status=201)


async def rotate_token(request: Request) -> Answer:
    body = await request.record(RotateRequest)
    text, token = await request.services.iam.tokens.rotate(
        _id(request), overlap_s=body.overlap_s, ttl_s=body.ttl_s, by=request.who
    )
    return Answer(to_json(TokenAnswer(token=text, info=_info(token))), status=201)


async def list_tokens(request: Request) -> Answer:
    found = request.services.iam.tokens.list(by=request.who)
    return Answer(to_json(TokenPage([_info(token) for token in found])))


async def revoke_token(request: Request) -> Answer:
    token = await request.services.iam.tokens.revoke(_id(request), by=request.who)
    return Answer(to_json(_info(token)))


async def whoami(request: Request) -> Answer:
    who = request.who
    held = [HeldInfo(project=item.project, right=item.right, expires_at=item.expires_at) for item in who.held]
    answer = WhoAmI(
        principal=who.name,
        id=who.id,
        project=who.project,
        rights=sorted(who.rights),
        expires_at=who.expires_at,
        token=who.token,
        held=held,
    )
    return Answer(to_json(answer))


def _id(request: Request) -> str:
    named = request.segment("token")
    return request.who.token or named if named == _SELF else named


def _info(token: TokenRow) -> TokenInfo:
    return TokenInfo(
        id=token.id,
        principal=token.principal.rpartition("@/")[0],
        project=token.project,
        rights=sorted(closed_rights((token.right,))),
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
        created_by=token.created_by,
    )


ROUTES = (
    Route(
        "POST",
        "/v1/tokens",
        create_token,
        "Make a token for a project that you manage, with at most your rights. It is shown this once.",
        Right.MANAGE,
        body=TokenRequest,
        answer=TokenAnswer,
        status=201,
        statuses=(404, 409, 429),
    ),
    Route("GET", "/v1/tokens", list_tokens, "The tokens of your projects.", Right.MANAGE, answer=TokenPage),
    Route(
        "POST",
        "/v1/tokens/{token}:rotate",
        rotate_token,
        "A new token in the place of one, which stays good for a while. `self` is the one that you show.",
        Right.READ,
        body=RotateRequest,
        answer=TokenAnswer,
        status=201,
        statuses=(404, 409, 429),
    ),
    Route(
        "DELETE",
        "/v1/tokens/{token}",
        revoke_token,
        "Revoke a token, and those made of it by rotation, at once.",
        Right.READ,
        answer=TokenInfo,
        statuses=(404,),
        mutates=True,
    ),
    Route("GET", "/v1/whoami", whoami, "Who you are here, and what you may do where.", Right.READ, answer=WhoAmI),
)
