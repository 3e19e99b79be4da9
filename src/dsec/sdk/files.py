"""Files of a sandbox. Paths are absolute and are the sandbox's own; nothing here touches files of the caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, Self

import msgspec

from dsec.core import limits
from dsec.core.errors import (
    ConflictError,
    DsecError,
    FileError,
    InvalidArgumentError,
    LimitError,
    PathNotFoundError,
    ProtocolError,
    UnavailableError,
)
from dsec.core.spec import check_path
from dsec.sdk.requests import as_bytes
from dsec.sdk.transport import Messages, Query, Transport, decode_reply
from dsec.sdk.whole import Whole
from dsec.wire import api
from dsec.wire.records import FileInfo, FilePage, WatchNotice, WriteAnswer

READ_BYTES_DEFAULT: Final = 256 << 20  # what one read may bring into memory: the sandbox decides how big its files are
_TRANSFER_TIMEOUT_S: Final = 86_400.0
_RESUMES_MAX: Final = 20  # without progress, some 30 s: a node that is started again
RemotePath = str | bytes


class AsyncWatch:
    """Notices of changes, as they happen. One of kind "overflow" says that some were lost.

    Iterating raises UnavailableError when the connection is lost.
    """

    def __init__(self, stack: AsyncExitStack, messages: Messages) -> None:
        self._stack = stack
        self._messages = messages

    async def __aiter__(self) -> AsyncGenerator[WatchNotice, None]:
        while (text := await self._messages.receive()) is not None:
            yield decode_reply(text, WatchNotice)

    async def close(self) -> None:
        """Stops watching. Doing it twice is fine."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Nothing(msgspec.Struct):
    pass


class AsyncFiles:
    """`sandbox.files`. `user` acts with that user's rights (default root). Failures raise FileError with the errno,
    or PathNotFoundError."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox}"

    async def read(
        self,
        path: RemotePath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        max_bytes: int = READ_BYTES_DEFAULT,
        user: str | None = None,
    ) -> str:
        """The file as text. Raises FileError when it is not; `errors="replace"` gives it anyway."""
        data = await self.read_bytes(path, max_bytes=max_bytes, user=user)
        try:
            return data.decode(encoding, errors)
        except UnicodeDecodeError as error:
            raise FileError(
                f"{_shown(path)} is not text in {encoding}: {error.reason} at byte {error.start}",
                hint='read_bytes() gives its bytes, errors="replace" the text that there is',
            ) from error
        except LookupError as error:
            raise InvalidArgumentError(str(error)) from error

    async def read_bytes(
        self,
        path: RemotePath,
        *,
        offset: int = 0,
        length: int | None = None,
        max_bytes: int = READ_BYTES_DEFAULT,
        user: str | None = None,
    ) -> bytes:
        """The file's content, or `length` bytes of it from `offset`. Raises LimitError above `max_bytes`."""
        whole = Whole(max_bytes)
        end = _end_of(offset, length)
        async with aclosing(self._content(path, offset, end, user, None, whole.expect)) as pieces:
            async for piece in pieces:
                if not whole.add(piece):
                    raise LimitError(
                        f"{_shown(path)} has more than {max_bytes} bytes", hint="pass max_bytes=, or use download()"
                    )
        return whole.take()

    async def stream(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The file's content in pieces, in constant memory. A lost connection is made again where it broke.

        Raises ConflictError when the file has been changed in between.
        """
        async with aclosing(self._content(path, offset, _end_of(offset, length), user, None)) as pieces:
            async for piece in pieces:
                yield piece

    async def _content(
        self,
        path: RemotePath,
        at: int,
        end: int | None,
        user: str | None,
        first: FileInfo | None,
        expect: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The bytes from `at` on. `first`: what the file was when the bytes before were read. `expect` is told how many
        there seem to be left."""
        failures = 0
        while end is None or at < end:
            try:
                async with self._transport.stream(
                    "GET",
                    f"{self._path}/files",
                    query={"path": check_path(path), "user": user},
                    headers=_range(at, end),
                ) as response:
                    info = _info_of(response.headers.get(api.HEADER_FILE_INFO.lower()))
                    if first is not None and _changed(first, info):
                        raise _was_changed(path)
                    first = info
                    if expect is not None and info is not None:
                        expect((info.size if end is None else min(info.size, end)) - at)
                    async for piece in response.pieces():
                        at += len(piece)
                        failures = 0
                        yield piece
                return
            except InvalidArgumentError:
                # A range from the end on is refused; reading there gives nothing.
                info = await self.stat(path, user=user)
                if first is not None and _changed(first, info):
                    raise _was_changed(path) from None
                if at == 0 or at < info.size:
                    raise
                return
            except UnavailableError as error:
                if first is not None and first.size == 0:
                    raise  # of /proc, say: such a file cannot be taken up in its middle
                if first is not None and at >= first.size:
                    return  # all of it had come
                failures += 1
                await self._transport.pause(error, failures, most=_RESUMES_MAX)

    async def write(
        self,
        path: RemotePath,
        data: str | bytes,
        *,
        offset: int | None = None,
        append: bool = False,
        mode: int | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> int:
        """Writes the file; gives the bytes written. Without `offset` and `append` it is replaced atomically.

        Text is sent as UTF-8. `mode` is kept when None (0644 for a new file); missing directories are made.
        """
        raw = as_bytes(data, "data")
        answer = await self._transport.call(
            "PUT",
            f"{self._path}/files",
            WriteAnswer,
            query={
                "path": check_path(path),
                "offset": offset,
                "append": append or None,
                "mode": None if mode is None else f"{mode:o}",
                "parents": parents,
                "user": user,
            },
            data=raw,
            headers={"Content-Type": api.TYPE_BYTES},
            repeatable=not append,
            long=True,
            timeout_s=_TRANSFER_TIMEOUT_S,
        )
        return answer.bytes

    async def stat(self, path: RemotePath, *, follow: bool = True, user: str | None = None) -> FileInfo:
        """What is at `path`; with `follow=False` a symbolic link itself."""
        query: Query = {"path": check_path(path), "follow": follow, "user": user}
        return await self._transport.call("GET", f"{self._path}/files:stat", FileInfo, query=query)

    async def exists(self, path: RemotePath, *, user: str | None = None) -> bool:
        """Whether anything is at `path`; a dangling symbolic link is not."""
        try:
            await self.stat(path, user=user)
        except PathNotFoundError:
            return False
        except DsecError as error:
            if error.detail.get("errno") in ("ENOENT", "ENOTDIR"):
                return False
            raise
        return True

    async def list(self, path: RemotePath, *, max_entries: int = 100_000, user: str | None = None) -> list[FileInfo]:
        """The entries of a directory, sorted by name. Raises LimitError above `max_entries`."""
        found: list[FileInfo] = []
        after: bytes | None = None
        while True:
            query: Query = {
                "path": check_path(path),
                "after": None if after is None else _cursor(after),
                "limit": limits.LIST_ENTRIES_MAX,
                "user": user,
            }
            page = await self._transport.call("GET", f"{self._path}/files:list", FilePage, query=query)
            found += page.entries
            if len(found) > max_entries:
                raise LimitError(f"{_shown(path)} has more than {max_entries} entries", hint="pass max_entries=")
            if page.after is None:
                return found
            if page.after == after:
                raise ProtocolError(f"the list of {_shown(path)} does not get on")
            after = page.after

    async def mkdir(
        self, path: RemotePath, *, parents: bool = True, mode: int = 0o755, user: str | None = None
    ) -> None:
        """Makes a directory. With `parents` missing ones are made too, and one that exists is fine."""
        await self._do(
            "mkdir", {"path": check_path(path), "parents": parents, "mode": f"{mode:o}", "user": user}, parents
        )

    async def move(
        self, path: RemotePath, target: RemotePath, *, replace: bool = True, user: str | None = None
    ) -> None:
        """Renames `path` to `target`."""
        query = {"path": check_path(path), "target": check_path(target, "target"), "replace": replace, "user": user}
        await self._do("move", query, repeatable=False)

    async def remove(
        self, path: RemotePath, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Removes a file or an empty directory; with `recursive` a directory and all below it."""
        query = {"path": check_path(path), "recursive": recursive, "missing_ok": missing_ok, "user": user}
        await self._do("remove", query, repeatable=missing_ok)

    async def chmod(self, path: RemotePath, mode: int, *, user: str | None = None) -> None:
        """Sets the permission bits, such as 0o755."""
        await self._do("chmod", {"path": check_path(path), "mode": f"{mode:o}", "user": user})

    async def chown(
        self, path: RemotePath, owner: str | int | None = None, group: str | int | None = None, *, follow: bool = True
    ) -> None:
        """Sets owner and group, each by name or number; None leaves it."""
        query: dict[str, Any] = {"path": check_path(path), "owner": owner, "group": group, "follow": follow}
        await self._do("chown", query)

    async def symlink(self, path: RemotePath, target: RemotePath, *, user: str | None = None) -> None:
        """Makes a symbolic link at `path` that holds `target`."""
        query = {"path": check_path(path), "target": check_path(target, "target"), "user": user}
        await self._do("symlink", query, repeatable=False)

    async def watch(self, path: RemotePath, *, recursive: bool = False) -> AsyncWatch:
        """Changes below a directory, from the return of this call on: iterate over it, and close it at the end."""
        query: Query = {"path": check_path(path), "recursive": recursive}
        async with AsyncExitStack() as stack:
            socket = await stack.enter_async_context(self._transport.websocket(f"{self._path}/watch", query=query))
            messages = self._transport.messages(socket)
            if await messages.receive() is None:
                raise UnavailableError("the watch was ended before it began")
            return AsyncWatch(stack.pop_all(), messages)

    async def _do(self, operation: str, query: dict[str, Any], repeatable: bool = True) -> None:
        await self._transport.call(
            "POST", f"{self._path}/files:{operation}", _Nothing, query=query, repeatable=repeatable
        )


async def write_pieces(files: AsyncFiles, path: RemotePath, pieces: AsyncIterable[bytes], *, user: str | None) -> int:
    """Replaces the file by what comes of `pieces`, in constant memory: all of it, or nothing when it breaks off.

    They cannot be had again: a lost connection raises UnavailableError.
    """
    async with files._transport.stream(
        "PUT",
        f"{files._path}/files",
        query={"path": check_path(path), "parents": True, "user": user},
        data=pieces,
        headers={"Content-Type": api.TYPE_BYTES},
    ) as response:
        return decode_reply(await response.read(), WriteAnswer).bytes


def _range(start: int, end: int | None) -> dict[str, str]:
    if start == 0 and end is None:
        return {}
    return {"Range": f"bytes={start}-{'' if end is None else end - 1}"}


def _info_of(header: str | None) -> FileInfo:
    if header is None:
        raise ProtocolError("the service did not say which file it sends")
    return decode_reply(header, FileInfo)


def _was_changed(path: RemotePath) -> ConflictError:
    return ConflictError(f"{_shown(path)} was changed while it was being read", hint="read it again")


def _changed(before: FileInfo, now: FileInfo) -> bool:
    return (before.size, before.mtime_ns, before.mode) != (now.size, now.mtime_ns, now.mode)


def _cursor(name: bytes) -> str:
    import base64

    return base64.urlsafe_b64encode(name).decode()


def _end_of(offset: int, length: int | None) -> int | None:
    if offset < 0 or (length is not None and length < 0):
        raise LimitError("offset and length must not be negative")
    return None if length is None else offset + length


def _shown(path: RemotePath) -> str:
    return repr(path)[:200]
