"""The OpenAPI 3.1 document, written from the route table and the records."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from dsec.api.errors import STATUS
from dsec.api.query import Kind, Param
from dsec.api.routing import WEBSOCKET, Route
from dsec.core.limits import IDEMPOTENCY_KEY_BYTES_MAX
from dsec.wire.api import HEADER_IDEMPOTENCY, HEADER_REQUEST_ID, TYPE_JSON
from dsec.wire.errors import ErrorBody

_EVERY_ROUTE: Final = (400, 413, 500, 503, 504)
_WITH_CREDENTIALS: Final = (401, 403, 429)
_ABOUT_A_SANDBOX: Final = (404, 409, 410)

_BINARY: Final = {"type": "string", "format": "binary"}
_SEGMENTS: Final = {
    "id": ("id of the sandbox", r"^sbx_[a-z2-7]{8}_[a-z2-7]{16}$"),
    "exec": ("id of the exec", r"^exe_[a-z2-7]{16}$"),
    "name": ("a name", r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"),
    "digest": ("digest of the layer, or the beginning of it", r"^[0-9a-f]{12,64}$"),
    "token": ("id of the token; `self` is the one shown", r"^(tok_[0-9a-f]{16}|self)$"),
    "grant": ("id of the grant", r"^grt_[0-9a-f]{16}$"),
}
_SCHEMAS: Final[dict[Kind, dict[str, Any]]] = {
    Kind.TEXT: {"type": "string"},
    Kind.PATH: {"type": "string", "minLength": 1, "pattern": "^/"},
    Kind.TARGET: {"type": "string", "minLength": 1},
    Kind.INT: {"type": "integer", "minimum": 0},
    Kind.SECONDS: {"type": "number", "minimum": 0},
    Kind.BOOL: {"type": "boolean"},
    Kind.MODE: {"type": "string", "pattern": "^[0-7]{1,4}$"},
    Kind.BASE64: {"type": "string", "pattern": "^[A-Za-z0-9_-]*$"},
}


def document(routes: Iterable[Route], *, version: str) -> dict[str, Any]:
    routes = tuple(routes)
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = "get" if route.method == WEBSOCKET else route.method.lower()
        paths.setdefault(route.path, {})[method] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsec",
            "version": version,
            "description": "Elastic compute for AI agents. docs/internals/api.md says what a schema cannot.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """Every record of the table as a component, so that each is written once."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        kinds: list[Any] = [ErrorBody]
        for route in routes:
            for kind in (*_media(route.body).values(), *_media(route.answer).values()):
                if _is_record(kind) and kind not in kinds:
                    kinds.append(kind)
        given, self.components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        self._by_kind = dict(zip(kinds, given, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        if _is_record(kind):
            schema: dict[str, Any] = self._by_kind[kind]
            return schema
        return {bytes: _BINARY, str: {"type": "string"}, dict: {"type": "object"}}[kind]


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *map(_parameter, route.params), *_headers(route)],
        "responses": _responses(route, schemas),
        "security": [{"token": []}] if route.right else [],
    }
    if route.right:
        operation["x-right"] = str(route.right)
    if route.method == WEBSOCKET:
        operation["x-websocket"] = True
    if route.body is not None:
        operation["requestBody"] = {
            "required": _is_record(route.body) and any(field.required for field in msgspec.structs.fields(route.body)),
            "content": _content(_media(route.body), schemas),
        }
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    found = []
    for segment in route.path.split("/"):
        if segment.startswith("{"):
            name = segment[1:].partition("}")[0]
            doc, pattern = _SEGMENTS[name]
            schema = {"type": "string", "pattern": pattern}
            found.append({"name": name, "in": "path", "required": True, "description": doc, "schema": schema})
    return found


def _parameter(param: Param) -> dict[str, Any]:
    schema = dict(_SCHEMAS[param.kind])
    if param.maximum is not None:
        schema["maximum"] = param.maximum
    if param.default is not None:
        schema["default"] = f"{param.default:04o}" if param.kind == Kind.MODE else param.default
    if param.repeated:
        schema = {"type": "array", "items": schema}
    return {
        "name": param.name,
        "in": "query",
        "required": param.required,
        "description": param.doc,
        "schema": schema,
    }


def _headers(route: Route) -> list[dict[str, Any]]:
    if not route.mutates:
        return []
    return [
        {
            "name": HEADER_IDEMPOTENCY,
            "in": "header",
            "required": False,
            "description": "a repeated request with the same key has the effect and the answer of the first",
            "schema": {"type": "string", "pattern": "^[ -~]+$", "maxLength": IDEMPOTENCY_KEY_BYTES_MAX},
        }
    ]


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    request_id = {HEADER_REQUEST_ID: {"schema": {"type": "string"}}}
    done: dict[str, Any] = {"description": HTTPStatus(route.status).phrase, "headers": request_id}
    if route.answer is not None:
        done["content"] = _content(_media(route.answer), schemas)
    if route.method == WEBSOCKET:
        done = {"description": "the connection is a WebSocket from here on"}
    responses = {"101" if route.method == WEBSOCKET else str(route.status): done}
    for status in _error_statuses(route):
        if status < 400:
            responses[str(status)] = {**done, "description": HTTPStatus(status).phrase}
            continue
        codes = sorted(code for code, known in STATUS.items() if known == status)
        responses[str(status)] = {
            "description": ", ".join(codes) or HTTPStatus(status).phrase,
            "headers": request_id,
            "content": {TYPE_JSON: {"schema": schemas.of(ErrorBody)}},
        }
    return responses


def _error_statuses(route: Route) -> list[int]:
    statuses = {*_EVERY_ROUTE, *route.statuses}
    if route.right is not None:
        statuses.update(_WITH_CREDENTIALS)
    if "{id}" in route.path:
        statuses.update(_ABOUT_A_SANDBOX)
    return sorted(statuses)


def _content(media: dict[str, Any], schemas: _Schemas) -> dict[str, Any]:
    return {name: {"schema": schemas.of(kind)} for name, kind in media.items()}


def _media(kind: Any) -> dict[str, Any]:
    """Media types and what they hold. A record by itself is JSON."""
    if kind is None:
        return {}
    return kind if isinstance(kind, dict) else {TYPE_JSON: kind}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
