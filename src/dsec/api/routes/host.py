"""The service itself: health, doctor, metrics, the OpenAPI document."""

from __future__ import annotations

from functools import cache

from dsec.api.openapi import document
from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.observe import metrics
from dsec.wire.codec import to_json
from dsec.wire.collect import GcReport, GcRequest
from dsec.wire.node import Method, Nothing, Right
from dsec.wire.records import DoctorReport, Health

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GC_TIMEOUT_S = 600.0  # trees of millions of files are counted, and removed
_DOCTOR_TIMEOUT_S = 120.0  # probes boot and mount things


async def health(request: Request) -> Answer:
    services = request.services
    if not services.gate.is_known(request.header(b"authorization"), request.peer):
        return Answer(to_json(Health(version=services.version, node="", started_at=0.0)))
    return Answer(to_json(await services.fleet.health(services.version)))


async def doctor(request: Request) -> Answer:
    return await request.forward(Method.DOCTOR, Nothing(), DoctorReport, timeout_s=_DOCTOR_TIMEOUT_S)


async def collect(request: Request) -> Answer:
    body = await request.record(GcRequest)
    return await request.forward(Method.GC, body, GcReport, timeout_s=_GC_TIMEOUT_S)


async def prometheus(request: Request) -> Answer:
    return Answer(metrics.render(), type=_METRICS_TYPE)


async def openapi(request: Request) -> Answer:
    return Answer(_document(request.services.version))


@cache
def _document(version: str) -> bytes:
    from dsec.api.routes import ROUTES  # all routes: this file's are among them

    return to_json(document(ROUTES, version=version))


ROUTES = (
    Route(
        "GET",
        "/v1/health",
        health,
        "Whether the service answers. Without credentials: its version only.",
        None,
        answer=Health,
    ),
    Route("GET", "/v1/doctor", doctor, "What this host can do, and what not.", Right.ADMIN, answer=DoctorReport),
    Route(
        "POST",
        "/v1/gc",
        collect,
        "Remove what nothing needs any more; or, with `dry_run`, say what that is.",
        Right.ADMIN,
        body=GcRequest,
        answer=GcReport,
        mutates=True,
    ),
    Route(
        "GET",
        "/metrics",
        prometheus,
        "Metrics, for Prometheus.",
        Right.ADMIN,
        answer={_METRICS_TYPE: str},
    ),
    Route("GET", "/openapi.json", openapi, "This document.", None, answer=dict),
)
