"""Environments of the node: what sandboxes start from."""

from __future__ import annotations

from dsec.api.errors import told
from dsec.api.request import Answer, ClientGoneError, Request
from dsec.api.routes import everywhere
from dsec.api.routing import Route
from dsec.core.errors import ProtocolError
from dsec.core.references import parse_reference
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.codec import to_json, unpack
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    EnvironmentInfo,
    EnvironmentPage,
    EnvironmentRef,
    EnvironmentStats,
    EnvironmentTrace,
    MachineBuild,
    PushRequest,
    PushTarget,
)
from dsec.wire.frames import Frame, FrameType
from dsec.wire.images import Export, ExportedImage, ExportRequest
from dsec.wire.layers import CollapseRequest
from dsec.wire.machines import MachineInfo
from dsec.wire.node import Done, Method, Right


async def list_environments(request: Request) -> Answer:
    return Answer(to_json(await everywhere.environments(request)))


async def get_environment(request: Request) -> Answer:
    return await request.forward(Method.ENVIRONMENT_GET, named(request), EnvironmentInfo)


async def remove_environment(request: Request) -> Answer:
    return await request.forward(Method.ENVIRONMENT_REMOVE, named(request), Done)


def named(request: Request) -> EnvironmentRef:
    return EnvironmentRef(str(parse_reference(request.segment("name"))))


async def environment_stats(request: Request) -> Answer:
    return await request.forward(Method.ENVIRONMENT_STATS, named(request), EnvironmentStats)


async def trace_environment(request: Request) -> Answer:
    return await request.forward(Method.ENVIRONMENT_TRACE, named(request), EnvironmentTrace)


async def build_environment(request: Request) -> None:
    await tell(request, Method.ENVIRONMENT_BUILD, await request.record(BuildRequest))


async def push_environment(request: Request) -> None:
    target = await request.record(PushTarget)
    await tell(request, Method.ENVIRONMENT_PUSH, PushRequest(name=named(request).name, store=target.store))


async def export_environment(request: Request) -> None:
    export = await request.record(Export)
    await tell(request, Method.ENVIRONMENT_EXPORT, ExportRequest(name=named(request).name, target=export.target))


Told = BuildRequest | PushRequest | ExportRequest | CollapseRequest | MachineBuild


async def tell(request: Request, method: Method, record: Told) -> None:
    """What fails after its first line is told in the last one; the client's going away cancels it."""
    stream = await request.open(method, record)
    try:
        frame = await stream.recv()
        await request.start(200, TYPE_NDJSON, [])
        try:
            kind = ""
            while frame is not None and kind != "done":  # told by an event, and once more by the stream's END
                event = _event(frame, method)
                kind = event.kind
                await request.write(to_json(event) + b"\n")
                frame = await stream.recv()
        except ClientGoneError:
            raise
        except Exception as error:
            await request.write(to_json(BuildEvent(kind="error", error=told(error))) + b"\n")
        await request.end()
    finally:
        await stream.close()


def _event(frame: Frame, method: Method) -> BuildEvent:
    match frame.type:
        case FrameType.EVENT:
            return unpack(frame.body, BuildEvent)
        case FrameType.END if method is Method.ENVIRONMENT_EXPORT:
            return BuildEvent(kind="done", exported=unpack(frame.body, ExportedImage))
        case FrameType.END if method is Method.MACHINE_BUILD:
            return BuildEvent(kind="done", machine=unpack(frame.body, MachineInfo))
        case FrameType.END:
            return BuildEvent(kind="done", environment=unpack(frame.body, EnvironmentInfo))
    raise ProtocolError(f"the node sent a frame of type {frame.type}")


_ONE = "/v1/environments/{name}"

ROUTES = (
    Route(
        "GET",
        "/v1/environments",
        list_environments,
        "The environments of this node.",
        Right.READ,
        answer=EnvironmentPage,
    ),
    Route("GET", _ONE, get_environment, "One environment.", Right.READ, answer=EnvironmentInfo, statuses=(404, 501)),
    Route(
        "DELETE",
        _ONE,
        remove_environment,
        "Forget an environment; its layers go when nothing uses them.",
        Right.ADMIN,
        answer=Done,
        statuses=(404, 409, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/environments",
        build_environment,
        "Build an environment. Answers a line for each event; the last is `done` or `error`.",
        Right.ADMIN,
        body=BuildRequest,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/environments/{name}:push",
        push_environment,
        "Put an environment into a store. Answers a line for each event; the last is `done` or `error`.",
        Right.ADMIN,
        body=PushTarget,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/environments/{name}:export",
        export_environment,
        "Make an environment an image of a registry, an OCI layout or a docker archive. Answers as a push does.",
        Right.ADMIN,
        body=Export,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "GET",
        "/v1/environments/{name}/stats",
        environment_stats,
        "How much of an environment has been loaded from its store, layer by layer.",
        Right.READ,
        answer=EnvironmentStats,
        statuses=(404, 501),
    ),
    Route(
        "POST",
        "/v1/environments/{name}:trace",
        trace_environment,
        "Record in the store what has been read of an environment, for others to load first.",
        Right.ADMIN,
        answer=EnvironmentTrace,
        statuses=(404, 409, 501),
        mutates=True,
    ),
)
