"""The table of routes: one record each, from which requests are dispatched and the OpenAPI document is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dsec.api.errors import MethodError
from dsec.api.query import Param, text_of, unquote
from dsec.core.errors import NotFoundError
from dsec.wire.node import Right

if TYPE_CHECKING:
    from dsec.api.request import Answer, Request
    from dsec.api.websocket import Socket

Handler = Callable[["Request"], Awaitable["Answer | None"]]
"""Gives the answer, or None when it has sent one itself."""
SocketHandler = Callable[["Request", "Socket"], Awaitable[None]]

WEBSOCKET: Final = "WS"
_CHANGE_NOTHING: Final = (
    "/v1/calls",
    "/run_code",
    "/v1/sandboxes:explain",
    "/v1/groups:explain",
    "/v1/jobs/{name}/heartbeat",
)  # that is there afterwards


@dataclass(frozen=True, slots=True)
class Route:
    """`answer` and `body` are a record (JSON) or media types with what they hold, for the document."""

    method: str
    path: str
    handler: Handler | SocketHandler
    summary: str
    right: Right | None  # None: open to everybody
    answer: Any = None
    status: int = 200
    params: tuple[Param, ...] = ()
    body: Any = None
    statuses: tuple[int, ...] = ()  # of errors, beside those that every route has
    mutates: bool = False  # takes Idempotency-Key

    @property
    def audited(self) -> bool:
        """Changes, but for what is done inside a sandbox: its execs, files and sessions have records of their own."""
        inside = any(part in self.path for part in ("}/execs", "}/files", "}/sessions", "}/archive"))
        changes = self.method in ("POST", "PUT", "DELETE") and self.path not in _CHANGE_NOTHING
        return changes and not inside and self.right is not None

    @property
    def name(self) -> str:
        return getattr(self.handler, "__name__", "")


@dataclass(frozen=True, slots=True)
class Found:
    route: Route
    segments: dict[str, str]


@dataclass(slots=True)
class _Level:
    fixed: dict[str, _Level] = field(default_factory=dict)
    named: _Level | None = None
    verbs: dict[str, _Level] = field(default_factory=dict)  # of `{name}:verb`
    routes: dict[str, tuple[Route, tuple[str, ...]]] = field(default_factory=dict)


class RouteTable:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._top = _Level()
        for route in self.routes:
            self._add(route)

    def find(self, method: str, raw_path: bytes) -> Found:
        """Raises NotFoundError for a path that is not there, MethodError for a method that it does not have."""
        level = self._top
        values: list[str] = []
        for raw in raw_path.split(b"/")[1:]:
            segment = text_of(unquote(raw), "the path")
            following = level.fixed.get(segment)
            if following is None:
                # A colon that is part of a name comes as %3A.
                raw_name, _, verb = raw.rpartition(b":")
                name = text_of(unquote(raw_name), "the path")
                following = level.verbs.get(verb.decode("ascii", "replace")) if name else None
                if following is None:
                    name, following = segment, level.named if segment else None
                values.append(name)
            if following is None:
                raise _not_found(raw_path)
            level = following
        entry = level.routes.get(method)
        if entry is None and method == "GET":
            entry = level.routes.get(WEBSOCKET)  # the caller of `find` says what is missing
        if entry is not None:
            return Found(entry[0], dict(zip(entry[1], values, strict=True)))
        if not level.routes:
            raise _not_found(raw_path)
        raise MethodError(method, sorted("GET" if known == WEBSOCKET else known for known in level.routes))

    def _add(self, route: Route) -> None:
        level = self._top
        names = []
        for segment in route.path.split("/")[1:]:
            if segment.startswith("{"):
                name, _, verb = segment[1:].partition("}")
                names.append(name)
                if verb:
                    level = level.verbs.setdefault(verb[1:], _Level())
                else:
                    level.named = level.named or _Level()
                    level = level.named
            else:
                level = level.fixed.setdefault(segment, _Level())
        if route.method in level.routes:
            raise AssertionError(f"two routes for {route.method} {route.path}")
        level.routes[route.method] = (route, tuple(names))


def _not_found(raw_path: bytes) -> NotFoundError:
    return NotFoundError(f"there is nothing at {raw_path[:120].decode('ascii', 'replace')}", hint="see /openapi.json")
