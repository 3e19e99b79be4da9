"""What happens to sandboxes and nodes, as lines that go on as long as the caller reads."""

from __future__ import annotations

from dsec.api.errors import error_line
from dsec.api.query import Kind, Param
from dsec.api.request import ClientGoneError, Request
from dsec.api.routes.sandboxes import labels_of
from dsec.api.routing import Route
from dsec.core.errors import ProtocolError
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.codec import to_json, unpack
from dsec.wire.events import EventLine, EventQuery
from dsec.wire.frames import Frame, FrameType
from dsec.wire.node import Right, Stream


async def read_events(request: Request) -> None:
    query = request.query
    if query["project"] is not None:
        request.services.iam.projects.get(query["project"], by=request.who)  # raises NotFoundError
    asked = EventQuery(
        after=query["after"],
        follow=query["follow"],
        project=query["project"],
        labels=labels_of(query["label"]),
        sandbox=query["sandbox"],
        job=query["job"],
        kinds=tuple(query["kind"]),
    )
    stream = await request.opened(lambda: request.services.fleet.events(asked, caller=request.caller))
    try:
        first = await stream.recv()  # it says where the stream begins; an error has its own status until then
        await request.start(200, TYPE_NDJSON, [])
        await _lines(request, stream, first)
        await request.end()
    finally:
        await stream.close()


async def _lines(request: Request, stream: Stream, frame: Frame | None) -> None:
    try:
        while frame is not None and frame.type != FrameType.END:
            if frame.type != FrameType.EVENT:
                raise ProtocolError(f"the node sent a frame of type {frame.type}")
            await request.write(to_json(unpack(frame.body, EventLine)) + b"\n")
            frame = await stream.recv()
    except ClientGoneError:
        raise
    except Exception as error:
        await request.write(error_line(error) + b"\n")


ROUTES = (
    Route(
        "GET",
        "/v1/events",
        read_events,
        "What happened to sandboxes of the caller's projects, one line each: `{event, position}`; a line with a "
        "position alone says how far it has been read. An event of kind `gap` stands for what is not kept any more.",
        Right.READ,
        params=(
            Param("after", Kind.TEXT, "a position, or `oldest`; default: now, and without `follow` the oldest"),
            Param("follow", Kind.BOOL, "false: only what has happened by now", default=True),
            Param("project", Kind.TEXT, "this one and those below it; default: all that the caller sees"),
            Param("label", Kind.TEXT, "key=value of the sandbox; several must all hold", repeated=True),
            Param("sandbox", Kind.TEXT, "of this one"),
            Param("job", Kind.TEXT, "of sandboxes of this one"),
            Param("kind", Kind.TEXT, "any of these", repeated=True),
        ),
        answer={TYPE_NDJSON: EventLine},
    ),
)
