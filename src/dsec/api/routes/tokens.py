"""Tokens: an administrator makes, lists and revokes them."""

from __future__ import annotations

from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.iam.principals import Principal
from dsec.iam.tokens import Token
from dsec.wire.codec import to_json
from dsec.wire.node import Right
from dsec.wire.tokens import TokenAnswer, TokenInfo, TokenPage, TokenRequest


async def create_token(request: Request) -> Answer:
    body = await request.record(TokenRequest)
    text, token = await request.services.tokens.create(
        body.principal, project=body.project, rights=set(map(str, body.rights)), ttl_s=body.ttl_s, by=_who(request)
    )
    return Answer(to_json(TokenAnswer(token=text, info=_info(token))), status=201)


async def list_tokens(request: Request) -> Answer:
    return Answer(to_json(TokenPage([_info(token) for token in request.services.tokens.tokens(by=_who(request))])))


async def revoke_token(request: Request) -> Answer:
    token = await request.services.tokens.revoke(request.segment("token"), by=_who(request))
    return Answer(to_json(_info(token)))


def _who(request: Request) -> Principal:
    assert request.principal is not None  # the routes need a right
    return request.principal


def _info(token: Token) -> TokenInfo:
    return TokenInfo(
        id=token.id,
        principal=token.principal.name,
        project=token.principal.project,
        rights=sorted(token.principal.rights),
        created_at=token.created_at,
        expires_at=token.principal.expires_at,
        revoked_at=token.revoked_at,
    )


ROUTES = (
    Route(
        "POST",
        "/v1/tokens",
        create_token,
        "Make a token for a project of yours, with at most your rights. It is shown this once.",
        Right.ADMIN,
        body=TokenRequest,
        answer=TokenAnswer,
        status=201,
        statuses=(429,),
    ),
    Route("GET", "/v1/tokens", list_tokens, "The tokens of your projects.", Right.ADMIN, answer=TokenPage),
    Route(
        "DELETE",
        "/v1/tokens/{token}",
        revoke_token,
        "Revoke a token, at once.",
        Right.ADMIN,
        answer=TokenInfo,
        statuses=(404,),
        mutates=True,
    ),
)
