"""`POST /run_code`: the schema of SandboxFusion, served by calls. Errors are ours: of another status than 200."""

from __future__ import annotations

from typing import Final

from dsec.api.query import Kind, Param
from dsec.api.request import CALL_MARGIN_S, CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.wire.calls import CallAnswer, time_allowed_s
from dsec.wire.codec import to_json, unpack
from dsec.wire.node import Method, Right
from dsec.wire.run_code import RunCodeAnswer, RunCodeRequest, answer_of, request_of

_ENVIRONMENT: Final = "base"


async def run_code(request: Request) -> Answer:
    body = await request.record(RunCodeRequest)
    environment = request.query["environment"] or _ENVIRONMENT
    call = request_of(body, environment)
    timeout_s = time_allowed_s(call) + CALL_TIMEOUT_S + CALL_MARGIN_S
    answer = unpack(await request.call(Method.CALL, call, timeout_s=timeout_s, image=environment), CallAnswer)
    return Answer(to_json(answer_of(answer, body)))


ROUTES = (
    Route(
        "POST",
        "/run_code",
        run_code,
        "Run code, with the request and the answer of SandboxFusion.",
        Right.USE,
        params=(Param("environment", Kind.TEXT, "that it runs in; `base` without it"),),
        body=RunCodeRequest,
        answer=RunCodeAnswer,
        statuses=(404, 429, 501),
    ),
)
