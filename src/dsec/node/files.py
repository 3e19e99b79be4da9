"""File calls: what a caller may send to the agent, and the agent's answers as records for callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from dsec.agent.client import AgentClient
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, ProtocolError
from dsec.core.spec import check_path, shown_path
from dsec.wire import agent, records
from dsec.wire.codec import unpack
from dsec.wire.node import AGENT_ARGS, Done, FileCall, Method

_PATHS: Final = ("path", "source", "target")
_MODE_MAX: Final = 0o7777
_OWNER_CHARS_MAX: Final = 255


def decode_args(method: Method, call: FileCall) -> Any:
    """The agent record of a file call, checked. Raises InvalidArgumentError or LimitError."""
    try:
        args = unpack(bytes(call.args), AGENT_ARGS[method])
    except ProtocolError as error:
        raise InvalidArgumentError(error.message) from error
    check_args(args)
    return args


def check_args(args: Any) -> None:
    for field in _PATHS:
        value = getattr(args, field, None)
        if value is not None:
            _check_path(field, value, relative=isinstance(args, agent.SymlinkArgs) and field == "target")
    for field in ("user", "owner", "group"):
        value = getattr(args, field, None)
        if value is not None and not (0 < len(value) <= _OWNER_CHARS_MAX and "\0" not in value):
            raise InvalidArgumentError(f"{field} must be 1 to {_OWNER_CHARS_MAX} characters without NUL")
    _check_number("mode", getattr(args, "mode", None), 0, _MODE_MAX)
    _check_number("offset", getattr(args, "offset", None), 0, limits.READ_BYTES_MAX)
    _check_number("length", getattr(args, "length", None), 0, limits.READ_BYTES_MAX)
    _check_number("limit", getattr(args, "limit", None), 1, limits.LIST_ENTRIES_MAX)
    if isinstance(args, agent.ListArgs) and args.after is not None and len(args.after) > limits.NAME_BYTES_MAX:
        raise LimitError(f"a cursor has at most {limits.NAME_BYTES_MAX} bytes")
    if isinstance(args, agent.ConnectArgs):
        _check_connect(args)


async def call_agent(client: AgentClient, method: Method, args: Any) -> Any:
    """One unary file operation, its answer as callers see it."""
    if method is Method.FILE_STAT:
        return file_info(await client.stat(args))
    if method is Method.FILE_LIST:
        reply = await client.list(args)
        after = reply.entries[-1].name if reply.more and reply.entries else None
        return records.FilePage([file_info(entry) for entry in reply.entries], after)
    acts: dict[Method, Callable[[Any], Awaitable[None]]] = {
        Method.FILE_MKDIR: client.mkdir,
        Method.FILE_MOVE: client.move,
        Method.FILE_REMOVE: client.remove,
        Method.FILE_CHMOD: client.chmod,
        Method.FILE_CHOWN: client.chown,
        Method.FILE_SYMLINK: client.symlink,
    }
    await acts[method](args)
    return Done()


def file_info(stat: agent.FileStat) -> records.FileInfo:
    name, name_bytes = shown(stat.name)
    target, target_bytes = (None, None) if stat.target is None else shown(stat.target)
    return records.FileInfo(
        name=name,
        name_bytes=name_bytes,
        kind=stat.kind,
        size=stat.size,
        mode=stat.mode,
        uid=stat.uid,
        gid=stat.gid,
        mtime_ns=stat.mtime_ns,
        target=target,
        target_bytes=target_bytes,
        nlink=stat.nlink,
    )


def watch_notice(event: agent.WatchEvent) -> records.WatchNotice:
    path, path_bytes = shown(event.path)
    source, source_bytes = (None, None) if event.source is None else shown(event.source)
    return records.WatchNotice(
        kind=event.kind,
        path=path,
        path_bytes=path_bytes,
        source=source,
        source_bytes=source_bytes,
        directory=event.directory,
    )


def session_info(state: agent.SessionState) -> records.SessionInfo:
    return records.SessionInfo(name=state.name, pid=state.pid, busy=state.busy, existing=state.existing)


def session_open(request: records.SessionRequest) -> agent.SessionOpen:
    return agent.SessionOpen(
        name=request.name,
        shell=None if request.shell is None else _bytes(request.shell),
        cwd=None if request.cwd is None else _bytes(request.cwd),
        env={_bytes(name): _bytes(value) for name, value in request.env.items()},
        user=request.user,
    )


def shown(raw: bytes) -> tuple[str, bytes | None]:
    """Text for people; and the bytes, when the text is not all that there is to them."""
    try:
        return raw.decode("utf-8"), None
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), raw


def _check_path(what: str, value: bytes, *, relative: bool) -> None:
    check_path(value, what)
    if not relative and not value.startswith(b"/"):
        raise InvalidArgumentError(f"{what} must be absolute, and is {shown_path(value)}")


def _check_number(what: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise LimitError(f"{what} must be between {low} and {high}, and is {value}")


def _check_connect(args: agent.ConnectArgs) -> None:
    if (args.port is None) == (args.path is None):
        raise InvalidArgumentError("exactly one of port and path must be given")
    _check_number("port", args.port, 1, 65_535)
    if not 0 < len(args.host) <= limits.NAME_BYTES_MAX or not args.host.isprintable():
        raise InvalidArgumentError("host must be an address or localhost")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
