"""Streams of the fake agent that are no execs: files, archives, watches, connections."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Callable
from typing import Final

from dsec.backends.fake.connection import ServerStream
from dsec.backends.fake.failures import AgentFailure, file_failure
from dsec.backends.fake.files import ROOT, FileTree, Node, User
from dsec.backends.fake.users import user_of
from dsec.wire import agent

ECHO_PORT: Final = 7
ECHO_SOCKET: Final = b"/run/echo.sock"
_PIECE: Final = 64 * 1024
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


async def read_file(stream: ServerStream, files: FileTree, args: agent.ReadArgs) -> None:
    user = user_of(args.user)
    if args.offset < 0 or (args.length is not None and args.length < 0):
        raise AgentFailure("invalid", "a negative offset or length")
    stat = files.stat(args.path, user=user)
    if stat.kind != "file":
        errno = "EISDIR" if stat.kind == "directory" else None
        raise AgentFailure("not_a_file", f"{args.path[:80]!r} is a {stat.kind}", errno)
    stat, data = files.read(args.path, user=user)
    stream.reply(stat)
    at = args.offset
    stop = len(data) if args.length is None else min(len(data), at + args.length)
    while at < stop:
        at = await stream.send(at, bytes(data[at : min(at + _PIECE, stop)]))
    stream.end(agent.Empty())


def write_file(stream: ServerStream, files: FileTree, args: agent.WriteArgs) -> None:
    """A replacing write is one change at the end; one in place happens as the bytes come."""
    user = user_of(args.user)
    if args.append and args.offset is not None:
        raise AgentFailure("invalid", "append and offset exclude each other")
    if args.offset is not None and args.offset < 0:
        raise AgentFailure("invalid", "a negative offset")
    files.check_writable(args.path, parents=args.parents, user=user)
    in_place = args.append or args.offset is not None
    content = bytearray()
    written = 0
    if in_place:
        files.write(args.path, b"", offset=args.offset, append=args.append, mode=args.mode, user=user)

    def on_data(offset: int, data: bytes) -> None:
        nonlocal written
        if in_place:
            at = None if args.offset is None else args.offset + written
            files.write(args.path, data, offset=at, append=args.append, user=user)
        else:
            content.extend(data)
        written += len(data)
        stream.grant(len(data))

    def on_end() -> None:
        try:
            if not in_place:
                files.write(args.path, bytes(content), mode=args.mode, user=user)
            stream.end(agent.Written(written, 1))
        except AgentFailure as failure:
            stream.fail(failure)

    stream.on_data, stream.on_end = on_data, on_end
    stream.reply(agent.Empty())


async def send_archive(stream: ServerStream, files: FileTree, args: agent.PathArgs) -> None:
    user = user_of(args.user)
    stat = files.stat(args.path, user=user)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, node in files.walk(args.path, user=user):
            archive.addfile(_tar_entry(name, node), io.BytesIO(bytes(node.data or b"")))
    stream.reply(stat)
    content = buffer.getvalue()
    at = 0
    while at < len(content):
        at = await stream.send(at, content[at : at + _PIECE])
    stream.end(agent.Empty())


def _tar_entry(name: bytes, node: Node) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    entry.mode, entry.uid, entry.gid, entry.mtime = node.mode, node.uid, node.gid, node.mtime_ns // 10**9
    if node.target is not None:
        entry.type, entry.linkname = tarfile.SYMTYPE, node.target.decode("utf-8", "surrogateescape")
    elif node.entries is not None:
        entry.type = tarfile.DIRTYPE
    else:
        entry.size = len(node.data or b"")
    return entry


def extract_tar(stream: ServerStream, files: FileTree, args: agent.ExtractArgs) -> None:
    user = None if args.user is None else user_of(args.user)
    files.mkdir(args.path, parents=True, user=user or ROOT)
    content = bytearray()

    def on_data(offset: int, data: bytes) -> None:
        content.extend(data)
        stream.grant(len(data))

    def on_end() -> None:
        try:
            entries = _unpack(files, args.path, bytes(content), user)
            stream.end(agent.Written(len(content), entries))
        except AgentFailure as failure:
            stream.fail(failure)
        except tarfile.TarError as error:
            stream.fail(AgentFailure("invalid", f"not a tar stream: {error}"))

    stream.on_data, stream.on_end = on_data, on_end
    stream.reply(agent.Empty())


def _unpack(files: FileTree, path: bytes, content: bytes, user: User | None) -> int:
    count = 0
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for entry in archive:
            count += _unpack_entry(files, path, archive, entry, user)
    return count


def _unpack_entry(
    files: FileTree, path: bytes, archive: tarfile.TarFile, entry: tarfile.TarInfo, user: User | None
) -> int:
    parts = [part for part in entry.name.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise file_failure("EXDEV", entry.name.encode("utf-8", "surrogateescape"))
    target = path.rstrip(b"/") + b"".join(b"/" + part for part in parts)
    _refuse_links_on_the_way(files, path, parts[:-1])
    owner = user or ROOT
    if entry.isdir():
        files.mkdir(target, parents=True, mode=entry.mode, user=owner)
    elif entry.issym():
        files.remove(target, recursive=False, missing_ok=True, user=owner)
        files.symlink(target, entry.linkname.encode("utf-8", "surrogateescape"), user=owner)
    elif entry.isreg():
        source = archive.extractfile(entry)
        files.remove(target, recursive=False, missing_ok=True, user=owner)
        files.write(target, b"" if source is None else source.read(), mode=entry.mode, parents=True, user=owner)
    else:
        return 0
    if user is None:
        files.chown(target, uid=entry.uid, gid=entry.gid, follow=False)
    return 1


def _refuse_links_on_the_way(files: FileTree, path: bytes, parents: list[bytes]) -> None:
    """An entry below a symlink of the same archive could land anywhere."""
    here = path.rstrip(b"/")
    for part in parents:
        here += b"/" + part
        try:
            if files.stat(here, follow=False).kind == "symlink":
                raise file_failure("ELOOP", here)
        except AgentFailure as failure:
            if failure.errno != "ENOENT":
                raise
            return


def watch_tree(stream: ServerStream, files: FileTree, args: agent.WatchArgs, over: Callable[[], None]) -> None:
    watcher = files.watch(args.path, args.recursive, stream.event)

    def stop() -> None:
        files.unwatch(watcher)
        over()

    def on_end() -> None:
        stop()
        stream.end(agent.Empty())

    stream.on_cancel, stream.on_end = stop, on_end
    stream.reply(agent.Empty())


def connect_echo(stream: ServerStream, files: FileTree, args: agent.ConnectArgs) -> None:
    """What the fake sandbox listens on: an echo at one port and at one socket."""
    if (args.port is None) == (args.path is None):
        raise AgentFailure("invalid", "exactly one of port and path must be given")
    if args.path is not None and args.path != ECHO_SOCKET:
        raise AgentFailure(
            "connect_failed", f"{args.path[:80]!r}", "ECONNREFUSED" if files.exists(args.path) else "ENOENT"
        )
    if args.port is not None and (args.port != ECHO_PORT or args.host not in _LOOPBACK):
        raise AgentFailure("connect_failed", f"{args.host[:80]}:{args.port}", "ECONNREFUSED")
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def on_data(offset: int, data: bytes) -> None:
        pieces.put_nowait(data)

    async def echo() -> None:
        sent = 0
        while (piece := await pieces.get()) is not None:
            sent = await stream.send(sent, piece)
            stream.grant(len(piece))
        stream.end(agent.Empty())

    stream.on_data, stream.on_end = on_data, lambda: pieces.put_nowait(None)
    stream.reply(agent.Empty())
    stream.run(echo())
