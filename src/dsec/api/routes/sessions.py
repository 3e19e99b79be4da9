"""Sessions: lasting shells."""

from __future__ import annotations

from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.core.ids import parse_name
from dsec.wire.node import Done, Method, Right, SessionStart, SessionStop
from dsec.wire.records import SandboxRef, SessionInfo, SessionPage, SessionRequest


async def open_session(request: Request) -> Answer:
    body = await request.record(SessionRequest)
    return await request.forward(Method.SESSION_OPEN, SessionStart(request.sandbox, body), SessionInfo)


async def list_sessions(request: Request) -> Answer:
    return await request.forward(Method.SESSION_LIST, SandboxRef(request.sandbox), SessionPage)


async def close_session(request: Request) -> Answer:
    name = parse_name(request.segment("name"), "session name")
    return await request.forward(Method.SESSION_CLOSE, SessionStop(request.sandbox, name), Done)


ROUTES = (
    Route(
        "POST",
        "/v1/sandboxes/{id}/sessions",
        open_session,
        "Start a lasting shell; one of that name that is there already is taken.",
        Right.USE,
        body=SessionRequest,
        answer=SessionInfo,
        mutates=True,
    ),
    Route("GET", "/v1/sandboxes/{id}/sessions", list_sessions, "Its sessions.", Right.USE, answer=SessionPage),
    Route(
        "DELETE",
        "/v1/sandboxes/{id}/sessions/{name}",
        close_session,
        "End a session and what runs in it.",
        Right.USE,
        answer=Done,
        mutates=True,
    ),
)
