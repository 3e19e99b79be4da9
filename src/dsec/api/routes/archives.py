"""Directories as tar streams, out of a sandbox and into one."""

from __future__ import annotations

from dsec.api.request import Answer, Request
from dsec.api.routes.files import PATH, USER, file_call, receive_into, user_of
from dsec.api.routing import Route
from dsec.api.transfer import send_archive
from dsec.wire import agent
from dsec.wire.api import TYPE_TAR
from dsec.wire.node import Method, Right
from dsec.wire.records import WriteAnswer


async def read_archive(request: Request) -> None:
    args = agent.PathArgs(path=request.query["path"], user=user_of(request))
    stream = await request.open(Method.FILE_ARCHIVE, file_call(request, args))
    try:
        await send_archive(request, stream)
    finally:
        await stream.close()


async def write_archive(request: Request) -> Answer:
    args = agent.ExtractArgs(path=request.query["path"], user=user_of(request))
    return await receive_into(request, Method.FILE_EXTRACT, args)


_ARCHIVE = "/v1/sandboxes/{id}/archive"

ROUTES = (
    Route(
        "GET",
        _ARCHIVE,
        read_archive,
        "A directory's content, or one file, as a tar stream. `X-Dsec-File` describes what is at the path.",
        Right.USE,
        params=(PATH, USER),
        answer={TYPE_TAR: bytes},
    ),
    Route(
        "PUT",
        _ARCHIVE,
        write_archive,
        "Unpack a tar stream below the path.",
        Right.USE,
        params=(PATH, USER),
        body={TYPE_TAR: bytes},
        answer=WriteAnswer,
        mutates=True,
    ),
)
