"""The ASGI application: one thin layer does ids, credentials, queries, errors and metrics for every route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any, Final, cast

from dsec.api import errors
from dsec.api.errors import Headers
from dsec.api.gate import check_right
from dsec.api.query import parse_query
from dsec.api.request import Answer, ClientGoneError, Receive, Request, Send, Services
from dsec.api.routing import WEBSOCKET, Handler, Route, RouteTable, SocketHandler
from dsec.api.websocket import Socket
from dsec.core.errors import InvalidArgumentError, UnavailableError
from dsec.iam.secrets import without_tokens
from dsec.observe.context import ids, new_request_id
from dsec.observe.metrics import API_REQUESTS
from dsec.wire.api import TYPE_JSON
from dsec.wire.codec import to_json
from dsec.wire.iam import AuditEntry

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")
_CLIENT_GONE: Final = 499  # in metrics and the audit log only: nothing was answered
_TARGET_BYTES_MAX: Final = 512  # of a path, in the audit log

Scope = MutableMapping[str, Any]


class Application:
    def __init__(self, table: RouteTable, services: Services) -> None:
        self.table = table
        self.services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(
            self.services,
            id=_request_id(scope["headers"]),
            headers=scope["headers"],
            peer=scope["state"]["peer"],
            inbox=scope["state"].get("inbox"),
            send=send,
            cut=scope["state"]["connection"].cut,
        )
        try:
            with ids(request=request.id):
                if scope["type"] == "http":
                    await self._http(scope, request)
                else:
                    await self._websocket(scope, request, Socket(receive, send, request.id))
        finally:
            request.release()
        self._note(scope, request)
        route = request.found.route.name if request.found else "none"
        API_REQUESTS.labels(route, str(request.status or _CLIENT_GONE)).inc()

    async def _http(self, scope: Scope, request: Request) -> None:
        try:
            route = self._admit(scope["method"], scope, request)
            if route.method == WEBSOCKET:
                raise InvalidArgumentError("this path speaks WebSocket", hint="connect with 'Upgrade: websocket'")
            handler = cast(Handler, route.handler)
            answer = await handler(request)
            if answer is not None:
                with scope["state"]["connection"].joined():
                    await request.answer(answer)
        except ClientGoneError:
            _abort(scope)
        except asyncio.CancelledError:
            # The client went away, or the server is stopping. The task ends here, so the cancellation is done with.
            await self._stop(scope, request)
        except Exception as error:
            await self._fail(scope, request, error)

    async def _websocket(self, scope: Scope, request: Request, socket: Socket) -> None:
        try:
            handler = cast(SocketHandler, self._admit(WEBSOCKET, scope, request).handler)
            await handler(request, socket)
            request.status = 101
        except ClientGoneError:
            request.status = 101 if socket.accepted else 0
        except asyncio.CancelledError:
            request.status = 503
            await _refuse(request, socket, UnavailableError("the service is stopping"))
        except Exception as error:
            request.status = errors.status_of(error)
            await _refuse(request, socket, error)

    def _note(self, scope: Scope, request: Request) -> None:
        """Who changed what, or tried to. Those of whom nobody knows who they are have changed nothing."""
        who, found = request.principal, request.found
        if who is None or found is None or not found.route.audited:
            return
        self.services.iam.audit.note(
            AuditEntry(
                at=self.services.iam.directory.now(),
                principal=who.id or who.name,
                project=who.project,
                action=found.route.name,
                target=without_tokens(scope["raw_path"][:_TARGET_BYTES_MAX].decode("ascii", "replace")),
                status=request.status or _CLIENT_GONE,
                request=request.id,
                token=who.token,
            )
        )

    def _admit(self, method: str, scope: Scope, request: Request) -> Route:
        found = request.found = self.table.find(method, scope["raw_path"])
        if found.route.right is not None:
            authorization = request.header(b"authorization")
            within = request.header(b"dsec-project")
            request.principal = self.services.gate.principal(authorization, request.peer, within)
            check_right(request.principal, found.route.right)
        request.query = parse_query(scope["query_string"], found.route.params)
        if found.route.mutates:
            request.check_key()
        return found.route

    async def _fail(self, scope: Scope, request: Request, error: Exception) -> None:
        if request.started:
            errors.told(error)  # logs what is not ours
            request.status = errors.status_of(error)
            _abort(scope)
            return
        try:
            await request.answer(_error_answer(error))
        except ClientGoneError:
            _abort(scope)

    async def _stop(self, scope: Scope, request: Request) -> None:
        connection = scope["state"]["connection"]
        if not request.started and not connection.transport.is_closing():
            stopping = UnavailableError("the service is stopping", hint="try again in a moment", retry_after_s=1.0)
            await request.answer(_error_answer(stopping))
        _abort(scope)


def _error_answer(error: BaseException) -> Answer:
    body = errors.told(error)
    return Answer(to_json(body), errors.status_of(error), TYPE_JSON, errors.headers_of(error, body))


async def _refuse(request: Request, socket: Socket, error: BaseException) -> None:
    """Before the upgrade an error is an HTTP answer, after it a message and a close code."""
    try:
        if socket.accepted:
            await socket.fail(error)
            return
        answer = _error_answer(error)
        headers: Headers = [
            (b"content-type", TYPE_JSON.encode()),
            (b"x-request-id", request.id.encode()),
            *(answer.headers or ()),
        ]
        await request.refuse_upgrade(answer, headers)
    except ClientGoneError:
        pass


def _abort(scope: Scope) -> None:
    """Cut the connection, so that a client cannot take an answer that is not whole for a whole one."""
    scope["state"]["connection"].abort()


def _request_id(headers: Headers) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            return value.decode()
    return new_request_id()
