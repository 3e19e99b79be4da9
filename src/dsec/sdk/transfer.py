"""Files and directories between the caller's machine and a sandbox, in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from dsec.core.errors import ConflictError, InvalidArgumentError, LimitError, StorageError, UnavailableError
from dsec.core.spec import check_path
from dsec.sdk.files import AsyncFiles
from dsec.sdk.holes import write_with_holes
from dsec.sdk.parts import PIECE_BYTES, LocalFile, arrived, local_part, open_part, remote_part
from dsec.sdk.tar import tar_chunks
from dsec.sdk.transport import Query, Transport, decode_reply
from dsec.sdk.untar import Unpacker
from dsec.wire import api
from dsec.wire.records import FileInfo, WriteAnswer

_ATOMIC_BYTES_MAX: Final = 8 << 20  # sent whole and again when the connection breaks; larger ones are resumed
_ATTEMPTS_MAX: Final = 5
_PROGRESS_STALLS_MAX: Final = 20  # in a row, some 30 s: a node that is started again


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was transferred. `skipped` names what a download left out because it was not safe to take, and why."""

    bytes: int
    entries: int = 1
    skipped: list[str] = field(default_factory=list)


async def upload(
    transport: Transport, files: AsyncFiles, sandbox: str, local: Path, remote: str, *, user: str | None, resume: bool
) -> Transfer:
    if await asyncio.to_thread(local.is_dir):
        return await _upload_directory(transport, sandbox, local, remote, user)
    status = await asyncio.to_thread(_regular, local)
    target = await _target_of(files, remote, local.name, user)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if status.st_size <= _ATOMIC_BYTES_MAX:
        data = await asyncio.to_thread(local.read_bytes)
        await files.write(target, data, mode=mode, user=user)
        return Transfer(len(data))
    return await _upload_large(transport, files, sandbox, local, target, mode, user, resume)


def _regular(local: Path) -> os.stat_result:
    try:
        status = local.stat()
    except OSError as error:
        raise InvalidArgumentError(
            f"{local} cannot be uploaded: {error.strerror}",
            hint="it is a path of this machine, from here or whole, that you may read",
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgumentError(
            f"{local} is neither a file nor a directory",
            hint="what it holds comes by standard input: dsec cp - SANDBOX:PATH",
        )
    return status


async def _target_of(files: AsyncFiles, remote: str, name: str, user: str | None) -> str:
    """As `cp` does it: into a directory under the file's own name, else the path itself."""
    if remote.endswith("/") or (await files.exists(remote, user=user) and await _is_directory(files, remote, user)):
        return f"{remote.rstrip('/')}/{name}"
    return remote


async def _is_directory(files: AsyncFiles, remote: str, user: str | None) -> bool:
    return (await files.stat(remote, user=user)).kind == "directory"


async def _upload_large(
    transport: Transport,
    files: AsyncFiles,
    sandbox: str,
    local: Path,
    target: str,
    mode: int,
    user: str | None,
    resume: bool,
) -> Transfer:
    """To a temporary name beside the target, taken up where it broke, then renamed: nobody sees half a file."""
    file = await asyncio.to_thread(LocalFile.open, local)
    part = remote_part(file, target, resume=resume)
    try:
        at = await arrived(files, part, file, user=user) if resume else 0
        await _send_resumable(transport, files, sandbox, file, part, at, mode, user)
        file.check_same()
        await files.move(part, target, user=user)
    except BaseException as error:
        if not resume or isinstance(error, ConflictError):
            with contextlib.suppress(Exception):
                await asyncio.shield(files.remove(part, missing_ok=True, user=user))
        raise
    finally:
        file.close()
    return Transfer(file.size)


async def _send_resumable(
    transport: Transport,
    files: AsyncFiles,
    sandbox: str,
    file: LocalFile,
    part: str,
    at: int,
    mode: int,
    user: str | None,
) -> None:
    stalls = 0
    while True:
        query: Query = {"path": check_path(part), "offset": at, "mode": f"{mode:o}", "parents": True, "user": user}
        try:
            async with transport.stream(
                "PUT",
                f"/sandboxes/{sandbox}/files",
                query=query,
                data=_Once(file.pieces(at)),
                length=file.size - at,
                headers={"Content-Type": api.TYPE_BYTES},
            ) as response:
                at += decode_reply(await response.read(), WriteAnswer).bytes
            if at == file.size:
                return
            raise UnavailableError("the service took less than all of a file")
        except UnavailableError as error:
            had = at
            # What arrived is a beginning of the file; the rest goes from there.
            at = (await files.stat(part, user=user)).size if await files.exists(part, user=user) else 0
            stalls = 0 if at > had else stalls + 1
            await transport.pause(error, max(stalls, 1), most=_PROGRESS_STALLS_MAX)


async def _upload_directory(transport: Transport, sandbox: str, local: Path, remote: str, user: str | None) -> Transfer:
    """The content of `local` below `remote`. A broken connection begins again: unpacking twice does no harm."""
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        try:
            async with transport.stream(
                "PUT",
                f"/sandboxes/{sandbox}/archive",
                query={"path": check_path(remote), "user": user},
                data=_Once(_stepped(lambda: tar_chunks(local))),
                headers={"Content-Type": api.TYPE_TAR},
            ) as response:
                answer = decode_reply(await response.read(), WriteAnswer)
                return Transfer(answer.bytes, answer.entries)
        except UnavailableError as error:
            await transport.pause(error, attempt, most=_ATTEMPTS_MAX - 1)
    raise AssertionError("unreachable")


async def _stepped(start: Callable[[], Iterator[bytes]]) -> AsyncIterator[bytes]:
    """A blocking iterator, each step in a thread."""
    iterator = start()
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


class _Once:
    """A body that cannot be sent twice by mistake: a second, empty one would look like an empty file."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces: AsyncIterator[bytes] | None = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._pieces is None:
            raise UnavailableError("the connection was lost while a file was being sent")
        pieces, self._pieces = self._pieces, None
        return pieces


async def download(
    transport: Transport,
    files: AsyncFiles,
    sandbox: str,
    remote: str,
    local: Path,
    *,
    below: bool,
    user: str | None,
    max_bytes: int,
    max_entries: int,
    resume: bool,
) -> Transfer:
    info = await files.stat(remote, user=user)
    if info.kind == "directory":
        return await _download_directory(transport, sandbox, remote, local, user, max_bytes, max_entries)
    if info.kind != "file":
        raise InvalidArgumentError(
            f"{remote[:200]!r} is a {info.kind}; only files and directories can be downloaded",
            hint="a command in the sandbox can put what comes of it into a file",
        )
    if below or await asyncio.to_thread(local.is_dir):
        # The caller's own spelling, never a name that the sandbox gave.
        local = local / PurePosixPath(remote).name
    return await _download_file(files, sandbox, remote, local, info, user, max_bytes, resume)


async def _download_file(
    files: AsyncFiles,
    sandbox: str,
    remote: str,
    local: Path,
    info: FileInfo,
    user: str | None,
    max_bytes: int,
    resume: bool,
) -> Transfer:
    """To a temporary name beside `local`, then renamed. Set-id bits are not taken over; runs of zeroes become holes."""
    too_large = LimitError(f"{remote[:200]!r} has more than {max_bytes} bytes", hint="pass max_bytes=")
    if info.size > max_bytes:
        raise too_large
    part = await asyncio.to_thread(local_part, local, sandbox, remote, info, resume=resume)
    file = await asyncio.to_thread(open_part, part, resume=resume)
    try:
        size = os.lseek(file, 0, os.SEEK_END)
        if size > info.size:
            os.ftruncate(file, 0)
            size = os.lseek(file, 0, os.SEEK_SET)
        # With nothing left to come the stream says still whether the file is the same.
        pieces = files._content(remote, size, None, user, info if resume else None)
        async for piece in _joined(pieces):
            size += sum(map(len, piece))
            if size > max_bytes:
                raise too_large
            await asyncio.to_thread(_write_all, file, piece)
        await asyncio.to_thread(_finish, file, part, local, size, info)
    except BaseException as error:
        if not resume or isinstance(error, (ConflictError, LimitError)):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"{local} cannot be written: {error.strerror}") from error
        raise
    finally:
        os.close(file)
    return Transfer(size)


def _finish(file: int, part: Path, local: Path, size: int, info: FileInfo) -> None:
    os.ftruncate(file, size)
    os.fchmod(file, info.mode & 0o777)
    with contextlib.suppress(OverflowError):  # the sandbox's clock is its own affair
        os.utime(file, ns=(info.mtime_ns, info.mtime_ns))
    part.replace(local)


async def _joined(pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[list[bytes]]:
    """Pieces gathered until they are worth a thread."""
    gathered: list[bytes] = []
    size = 0
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            gathered.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES:
                yield gathered
                gathered, size = [], 0
    if gathered:
        yield gathered


def _write_all(file: int, pieces: list[bytes]) -> None:
    for piece in pieces:
        write_with_holes(file, piece)


async def _download_directory(
    transport: Transport, sandbox: str, remote: str, local: Path, user: str | None, max_bytes: int, max_entries: int
) -> Transfer:
    """The content of `remote` below `local`. A broken connection begins again, over what is there."""
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        try:
            with await asyncio.to_thread(Unpacker, local, bytes_max=max_bytes, entries_max=max_entries) as unpacker:
                async with transport.stream(
                    "GET", f"/sandboxes/{sandbox}/archive", query={"path": check_path(remote), "user": user}
                ) as response:
                    await _feed(unpacker, response.pieces())
                done = await asyncio.to_thread(unpacker.finish)
                return Transfer(done.bytes, done.entries, done.skipped)
        except UnavailableError as error:
            await transport.pause(error, attempt, most=_ATTEMPTS_MAX - 1)
    raise AssertionError("unreachable")


async def _feed(unpacker: Unpacker, pieces: AsyncIterable[bytes]) -> None:
    async for piece in pieces:
        await asyncio.to_thread(unpacker.feed, piece)
