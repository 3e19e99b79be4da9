"""Calls: code that is run once, in a place made before (fncall)."""

from __future__ import annotations

from dsec.api.request import CALL_MARGIN_S, CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.wire.calls import CallAnswer, CallPoolPage, CallRequest, TaskTypePage, time_allowed_s
from dsec.wire.node import Method, Nothing, Right


async def call(request: Request) -> Answer:
    body = await request.record(CallRequest)
    timeout_s = time_allowed_s(body) + CALL_TIMEOUT_S + CALL_MARGIN_S
    return await request.forward(Method.CALL, body, CallAnswer, timeout_s=timeout_s, image=body.environment.base)


async def list_types(request: Request) -> Answer:
    return await request.forward(Method.CALL_TYPES, Nothing(), TaskTypePage)


async def list_pools(request: Request) -> Answer:
    return await request.forward(Method.CALL_POOLS, Nothing(), CallPoolPage)


ROUTES = (
    Route(
        "POST",
        "/v1/calls",
        call,
        "Run code once, and answer with what came of it. Nothing of it stays. 429 says when to try again.",
        Right.USE,
        body=CallRequest,
        answer=CallAnswer,
        statuses=(404, 429, 501),
    ),
    Route("GET", "/v1/calls/types", list_types, "What calls can be of.", Right.READ, answer=TaskTypePage),
    Route("GET", "/v1/calls/pools", list_pools, "The places for calls, now.", Right.READ, answer=CallPoolPage),
)
