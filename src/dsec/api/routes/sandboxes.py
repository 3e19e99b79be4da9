"""Sandboxes: create, find, change, end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import msgspec

from dsec.api.jobgate import made_in_job
from dsec.api.query import Kind, Param
from dsec.api.request import CALL_MARGIN_S, CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.cluster.queue import Patience
from dsec.core.errors import DeadlineError, InvalidArgumentError
from dsec.core.ids import NodeId, parse_node_id
from dsec.core.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX
from dsec.core.spec import Place, check_labels
from dsec.core.states import SandboxState
from dsec.wire.api import HEADER_NODE
from dsec.wire.codec import from_json, to_json
from dsec.wire.node import Method, Right, SetEgress, SetTtl
from dsec.wire.plans import Explanation
from dsec.wire.records import (
    CreateRequest,
    EgressRequest,
    ListQuery,
    Metrics,
    PauseRequest,
    Sandbox,
    SandboxPage,
    SandboxRef,
    TtlRequest,
)

_CHANGE_TIMEOUT_S = 120.0  # pause, resume and destroy: the node has its own, shorter deadlines for their steps
_PAUSE_TIMEOUT_S = 720.0  # a deep one writes memory to the disk, for which the node has ten minutes
_STATES = frozenset(map(str, SandboxState))
_WAIT = re.compile(r"wait=([0-9]{1,6}(?:\.[0-9]{1,3})?)\Z")


class _Keys(msgspec.Struct, frozen=True):
    spec: dict[str, msgspec.Raw] = {}


async def _asked(request: Request) -> CreateRequest:
    """With a snapshot, what is there in the text is said, though it is the default."""
    text = await request.body() or b"{}"
    body = from_json(text, CreateRequest)
    if body.snapshot is not None and body.given is msgspec.UNSET:
        body = msgspec.structs.replace(body, given=tuple(sorted(from_json(text, _Keys).spec)))
    return on_named_node(body, request)


async def create_sandbox(request: Request) -> Answer:
    body = await _asked(request)
    wait_s = _preferred_wait_s(request)
    sandbox = await create(request, body, key=request.key, wait_s=wait_s)
    return Answer(to_json(sandbox), status=201)


def on_named_node(body: CreateRequest, request: Request) -> CreateRequest:
    """The header says so of a create, as of all else that is of one node."""
    named = request.header(HEADER_NODE.lower().encode())
    if named is None:
        return body
    place = body.spec.place or Place()
    if place.node is not None:
        return body
    place = msgspec.structs.replace(place, node=parse_node_id(named.decode("ascii", "replace")))
    return msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, place=place))


async def create(
    request: Request, body: CreateRequest, *, key: str | None, wait_s: float | None = None, at: NodeId | None = None
) -> Sandbox:
    """With a key the creation completes whatever becomes of the caller, and is found by the key. `at`: on this node."""
    services = request.services
    patience = Patience(body.queue_s) if body.queue_s else None
    timeout_s = body.timeout_s if wait_s is None or key is not None else min(wait_s, body.timeout_s)

    async def make(wanted: CreateRequest) -> Sandbox:
        def ask() -> Coroutine[Any, Any, Sandbox]:
            return services.fleet.create(
                wanted,
                caller=request.caller,
                timeout_s=timeout_s + (CALL_MARGIN_S if timeout_s == wanted.timeout_s else 0.0),
                key=key,
                patience=patience,
                at=at,
            )

        return await services.admission.create(wanted, ask, request.caller, key)

    work = made_in_job(services.jobs, services.rpc, body, request.caller, make)
    if key is None:
        return await work
    try:
        return await _waited(services.keeper.start(work), None if wait_s is None else wait_s + body.queue_s)
    except asyncio.CancelledError:
        if patience is not None:
            patience.leave()
        raise


async def _waited(task: asyncio.Task[Sandbox], wait_s: float | None) -> Sandbox:
    try:
        async with asyncio.timeout(wait_s) as limit:
            return await asyncio.shield(task)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(
            f"the sandbox is not ready after {wait_s:g} s and is still being made",
            hint="ask again with the same Idempotency-Key",
            retry_after_s=1.0,
        ) from error


def _preferred_wait_s(request: Request) -> float | None:
    """`Prefer: wait=N` (RFC 7240). Preferences that we do not know are ignored, as it says."""
    for preference in (request.header(b"prefer") or b"").decode("latin-1").split(","):
        if preference.strip().partition("=")[0].strip().lower() == "wait":
            found = _WAIT.match(preference.strip().replace(" ", ""))
            if not found:
                raise InvalidArgumentError("Prefer: wait needs seconds", hint="such as 'Prefer: wait=10'")
            return float(found[1])
    return None


async def explain_create(request: Request) -> Answer:
    body = await _asked(request)
    return Answer(to_json(await request.services.admission.explain(body, request.caller)))


async def list_sandboxes(request: Request) -> Answer:
    query = request.query
    listing = ListQuery(
        labels=labels_of(query["label"]),
        name=query["name"],
        job=query["job"],
        states=_states(query["state"]),
        limit=query["limit"],
        cursor=query["cursor"],
        metrics=query["metrics"],
    )
    page = await request.services.fleet.listing(listing, caller=request.caller, timeout_s=CALL_TIMEOUT_S)
    return Answer(to_json(page))


def labels_of(given: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or key in labels:
            raise InvalidArgumentError(f"label {text[:40]!r} must be key=value, each key once")
        labels[key] = value
    check_labels(labels)
    return labels


def _states(given: list[str]) -> list[str]:
    for state in given:
        if state not in _STATES:
            raise InvalidArgumentError(f"there is no state {state[:40]!r}", hint=", ".join(sorted(_STATES)))
    return given


async def get_sandbox(request: Request) -> Answer:
    return await request.forward(Method.GET, SandboxRef(request.sandbox), Sandbox)


async def destroy_sandbox(request: Request) -> Answer:
    return await request.forward(Method.DESTROY, SandboxRef(request.sandbox), Sandbox, timeout_s=_CHANGE_TIMEOUT_S)


async def set_ttl(request: Request) -> Answer:
    body = await request.record(TtlRequest)
    await request.services.admission.check_ttl(request.sandbox, body.ttl_running_s, request.caller)
    return await request.forward(Method.SET_TTL, SetTtl(request.sandbox, body), Sandbox)


async def set_egress(request: Request) -> Answer:
    body = await request.record(EgressRequest)
    asked = SetEgress(request.sandbox, body)
    return await request.forward(Method.SET_EGRESS, asked, Sandbox, timeout_s=_CHANGE_TIMEOUT_S)


async def pause_sandbox(request: Request) -> Answer:
    asked = PauseRequest(request.sandbox, deep=request.query["deep"])
    return await request.forward(Method.PAUSE, asked, Sandbox, timeout_s=_PAUSE_TIMEOUT_S)


async def resume_sandbox(request: Request) -> Answer:
    return await request.forward(Method.RESUME, SandboxRef(request.sandbox), Sandbox, timeout_s=_CHANGE_TIMEOUT_S)


async def get_metrics(request: Request) -> Answer:
    return await request.forward(Method.METRICS, SandboxRef(request.sandbox), Metrics)


_LIST = (
    Param("label", Kind.TEXT, "key=value; several must all hold", repeated=True),
    Param("name", Kind.TEXT, "exact name"),
    Param("job", Kind.TEXT, "of this job"),
    Param("state", Kind.TEXT, "any of these; default: all that have not ended", repeated=True),
    Param("limit", Kind.INT, "of one page", default=LIST_PAGE_DEFAULT, maximum=LIST_PAGE_MAX),
    Param("cursor", Kind.TEXT, "`next` of the page before"),
    Param("metrics", Kind.BOOL, "with the figures of each as they are now", default=False),
)

ROUTES = (
    Route(
        "POST",
        "/v1/sandboxes",
        create_sandbox,
        "Create a sandbox. `Prefer: wait=N` bounds the wait; with an Idempotency-Key the creation goes on meanwhile.",
        Right.USE,
        body=CreateRequest,
        answer=Sandbox,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes:explain",
        explain_create,
        "What would become of a create now, and why: policies, caps, and each node. Nothing happens.",
        Right.USE,
        body=CreateRequest,
        answer=Explanation,
        statuses=(404, 501),
    ),
    Route("GET", "/v1/sandboxes", list_sandboxes, "List sandboxes.", Right.READ, params=_LIST, answer=SandboxPage),
    Route("GET", "/v1/sandboxes/{id}", get_sandbox, "One sandbox, ended ones too.", Right.READ, answer=Sandbox),
    Route(
        "DELETE",
        "/v1/sandboxes/{id}",
        destroy_sandbox,
        "Destroy a sandbox. One that has ended already is not an error.",
        Right.USE,
        answer=Sandbox,
        mutates=True,
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{id}/ttl",
        set_ttl,
        "Replace both times to live.",
        Right.USE,
        body=TtlRequest,
        answer=Sandbox,
        mutates=True,
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{id}/egress",
        set_egress,
        "Replace what it reaches. Connections that are still allowed go on, the others are cut.",
        Right.USE,
        body=EgressRequest,
        answer=Sandbox,
        statuses=(409, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/pause",
        pause_sandbox,
        "Stop everything inside and keep its memory; on the disk alone, if it is to be deep.",
        Right.USE,
        params=(Param("deep", Kind.BOOL, "of virtual machines: nothing of it is left to run", default=False),),
        answer=Sandbox,
        statuses=(501,),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/resume",
        resume_sandbox,
        "Let a paused sandbox run on.",
        Right.USE,
        answer=Sandbox,
        statuses=(429, 501),
        mutates=True,
    ),
    Route("GET", "/v1/sandboxes/{id}/metrics", get_metrics, "What it uses now.", Right.READ, answer=Metrics),
)
