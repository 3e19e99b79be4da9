"""Files inside a sandbox, by the agent: one at a time, and what is done to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dsec.api.errors import RangeError
from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routing import Route
from dsec.api.transfer import file_header, send_body, send_file
from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import LIST_ENTRIES_MAX, READ_BYTES_MAX
from dsec.wire import agent
from dsec.wire.api import TYPE_BYTES
from dsec.wire.codec import pack, to_json, unpack
from dsec.wire.node import Done, FileCall, Method, Right
from dsec.wire.records import FileInfo, FilePage, WriteAnswer

_RANGE: Final = re.compile(rb"bytes=([0-9]{0,19})-([0-9]{0,19})\Z")
_USER_CHARS_MAX: Final = 255


def file_call(request: Request, args: msgspec.Struct) -> FileCall:
    return FileCall(request.sandbox, msgspec.Raw(pack(args)))


def user_of(request: Request) -> str | None:
    user: str | None = request.query["user"]
    if user is not None and not 0 < len(user) <= _USER_CHARS_MAX:
        raise InvalidArgumentError(f"user must be 1 to {_USER_CHARS_MAX} characters")
    return user


# ---- content -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """`start` negative: that many bytes before the end. `stop` is exclusive."""

    start: int
    stop: int | None = None


def parse_range(raw: bytes | None) -> Range | None:
    """One byte range. As RFC 9110 has it, what is malformed or several is ignored: the whole file is the answer."""
    found = _RANGE.match(raw.strip()) if raw is not None else None
    if not found or not (found[1] or found[2]):
        return None
    if not found[1]:
        return Range(-int(found[2]))
    start, stop = int(found[1]), int(found[2]) + 1 if found[2] else None
    if stop is not None and stop <= start:
        return None
    return Range(min(start, READ_BYTES_MAX), stop)


async def read_file(request: Request) -> None:
    path, user = request.query["path"], user_of(request)
    wanted = parse_range(request.header(b"range"))
    if wanted is not None and wanted.start <= 0 and wanted.stop is None:
        wanted = await _from_end(request, wanted, path=path, user=user)
    offset = wanted.start if wanted else 0
    length = wanted.stop - offset if wanted and wanted.stop is not None else None
    args = agent.ReadArgs(path=path, offset=offset, length=length, user=user)
    stream = await request.open(Method.FILE_READ, file_call(request, args))
    try:
        await send_file(request, stream, offset=offset, length=length, partial=wanted is not None)
    finally:
        await stream.close()


async def _from_end(request: Request, wanted: Range, *, path: bytes, user: str | None) -> Range:
    args = agent.PathArgs(path=path, user=user)
    info = unpack(await request.call(Method.FILE_STAT, file_call(request, args)), FileInfo)
    if wanted.start == 0:
        if info.size == 0:
            raise RangeError(0)
        return Range(0)
    return Range(max(0, info.size + wanted.start))


async def write_file(request: Request) -> Answer:
    query = request.query
    if query["append"] and query["offset"] is not None:
        raise InvalidArgumentError("append and offset exclude each other")
    args = agent.WriteArgs(
        path=query["path"],
        offset=query["offset"],
        append=query["append"],
        mode=query["mode"],
        parents=query["parents"],
        user=user_of(request),
    )
    return await receive_into(request, Method.FILE_WRITE, args)


async def receive_into(request: Request, method: Method, args: msgspec.Struct) -> Answer:
    """The request's body goes into a stream; the node's END is the answer."""
    call = file_call(request, args)
    stream = await request.open(method, call)
    try:
        return Answer(to_json(unpack(await send_body(request, stream), WriteAnswer)))
    finally:
        await stream.close()


# ---- the rest ------------------------------------------------------------------------------------


async def stat_file(request: Request) -> Answer:
    args = agent.PathArgs(path=request.query["path"], follow=request.query["follow"], user=user_of(request))
    return await request.forward(Method.FILE_STAT, file_call(request, args), FileInfo)


async def list_files(request: Request) -> Answer:
    query = request.query
    args = agent.ListArgs(path=query["path"], after=query["after"], limit=query["limit"], user=user_of(request))
    return await request.forward(Method.FILE_LIST, file_call(request, args), FilePage)


async def make_directory(request: Request) -> Answer:
    query = request.query
    args = agent.MkdirArgs(path=query["path"], parents=query["parents"], mode=query["mode"], user=user_of(request))
    return await _done(request, Method.FILE_MKDIR, args)


async def move_file(request: Request) -> Answer:
    query = request.query
    args = agent.MoveArgs(source=query["path"], target=query["target"], replace=query["replace"], user=user_of(request))
    return await _done(request, Method.FILE_MOVE, args)


async def remove_file(request: Request) -> Answer:
    query = request.query
    args = agent.RemoveArgs(
        path=query["path"], recursive=query["recursive"], missing_ok=query["missing_ok"], user=user_of(request)
    )
    return await _done(request, Method.FILE_REMOVE, args)


async def change_mode(request: Request) -> Answer:
    args = agent.ChmodArgs(path=request.query["path"], mode=request.query["mode"], user=user_of(request))
    return await _done(request, Method.FILE_CHMOD, args)


async def change_owner(request: Request) -> Answer:
    query = request.query
    if query["owner"] is None and query["group"] is None:
        raise InvalidArgumentError("owner or group must be given")
    args = agent.ChownArgs(path=query["path"], owner=query["owner"], group=query["group"], follow=query["follow"])
    return await _done(request, Method.FILE_CHOWN, args)


async def make_symlink(request: Request) -> Answer:
    args = agent.SymlinkArgs(path=request.query["path"], target=request.query["target"], user=user_of(request))
    return await _done(request, Method.FILE_SYMLINK, args)


async def _done(request: Request, method: Method, args: msgspec.Struct) -> Answer:
    return await request.forward(method, file_call(request, args), Done)


PATH: Final = Param("path", Kind.PATH, "absolute, percent-encoded bytes", required=True)
USER: Final = Param("user", Kind.TEXT, "acts with this user's rights; default root")
_PARENTS: Final = Param("parents", Kind.BOOL, "make missing directories above", default=True)
_FILES: Final = "/v1/sandboxes/{id}/files"
_STATUSES: Final = (501,)


def _change(handler: Any, verb: str, summary: str, *params: Param) -> Route:
    return Route(
        "POST",
        f"{_FILES}:{verb}",
        handler,
        summary,
        Right.USE,
        params=params,
        answer=Done,
        statuses=_STATUSES,
        mutates=True,
    )


ROUTES = (
    Route(
        "GET",
        _FILES,
        read_file,
        "The bytes of a regular file. `Range: bytes=a-b` gives a part. `X-Dsec-File` describes it.",
        Right.USE,
        params=(PATH, USER),
        answer={TYPE_BYTES: bytes},
        statuses=(206, 416),
    ),
    Route(
        "PUT",
        _FILES,
        write_file,
        "Write a file from the request's body: replaced as a whole when the body is complete, or in place with "
        "`offset` or `append`.",
        Right.USE,
        params=(
            PATH,
            Param("offset", Kind.INT, "write in place from here", maximum=READ_BYTES_MAX),
            Param("append", Kind.BOOL, "write at the end", default=False),
            Param("mode", Kind.MODE, "octal; default: as it is, or 0644"),
            _PARENTS,
            USER,
        ),
        body={TYPE_BYTES: bytes},
        answer=WriteAnswer,
        mutates=True,
    ),
    Route(
        "GET",
        f"{_FILES}:stat",
        stat_file,
        "What is at a path.",
        Right.USE,
        params=(PATH, Param("follow", Kind.BOOL, "follow a symlink at the end", default=True), USER),
        answer=FileInfo,
    ),
    Route(
        "GET",
        f"{_FILES}:list",
        list_files,
        "The entries of a directory, by name.",
        Right.USE,
        params=(
            PATH,
            Param("after", Kind.BASE64, "`after` of the page before, as URL-safe base64"),
            Param("limit", Kind.INT, "of one page", default=LIST_ENTRIES_MAX, maximum=LIST_ENTRIES_MAX),
            USER,
        ),
        answer=FilePage,
    ),
    _change(
        make_directory,
        "mkdir",
        "Make a directory.",
        PATH,
        _PARENTS,
        Param("mode", Kind.MODE, "octal", default=0o755),
        USER,
    ),
    _change(
        move_file,
        "move",
        "Move or rename.",
        PATH,
        Param("target", Kind.PATH, "absolute", required=True),
        Param("replace", Kind.BOOL, "replace what is there", default=True),
        USER,
    ),
    _change(
        remove_file,
        "remove",
        "Remove a file or directory.",
        PATH,
        Param("recursive", Kind.BOOL, "with everything below", default=False),
        Param("missing_ok", Kind.BOOL, "nothing there is success", default=False),
        USER,
    ),
    _change(
        change_mode, "chmod", "Change permission bits.", PATH, Param("mode", Kind.MODE, "octal", required=True), USER
    ),
    _change(
        change_owner,
        "chown",
        "Change owner and group, by name or number.",
        PATH,
        Param("owner", Kind.TEXT, "name or number"),
        Param("group", Kind.TEXT, "name or number"),
        Param("follow", Kind.BOOL, "follow a symlink at the end", default=True),
    ),
    _change(
        make_symlink,
        "symlink",
        "Make a symbolic link.",
        PATH,
        Param("target", Kind.TARGET, "what it says", required=True),
        USER,
    ),
)

__all__ = ["PATH", "ROUTES", "USER", "file_call", "file_header", "receive_into", "user_of"]
