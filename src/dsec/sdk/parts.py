"""Unfinished transfers: beside their target, under a name by which the same transfer is found again."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import ConflictError, InvalidArgumentError, PathNotFoundError
from dsec.sdk.files import AsyncFiles
from dsec.wire.records import FileInfo

PIECE_BYTES: Final = 1 << 20  # read or written in a thread at once; a thread costs as much as copying a tenth of that
_SUFFIX: Final = ".dsec-part"
_NAME_BYTES: Final = 100  # of the target's own name, which may be as long as names can be


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the caller that is being sent: the same one as long as size and time of change are the same."""

    path: Path
    descriptor: int
    size: int
    mtime_ns: int

    @classmethod
    def open(cls, path: Path) -> LocalFile:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        return cls(path, descriptor, status.st_size, status.st_mtime_ns)

    def close(self) -> None:
        os.close(self.descriptor)

    def check_same(self) -> None:
        """Raises ConflictError when it was changed since it was opened."""
        status = os.fstat(self.descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ConflictError(f"{self.path} was changed while it was being uploaded", hint="upload it again")

    async def pieces(self, offset: int) -> AsyncIterator[bytes]:
        while offset < self.size:
            count = min(PIECE_BYTES, self.size - offset)
            piece = await asyncio.to_thread(os.pread, self.descriptor, count, offset)
            if not piece:
                raise ConflictError(f"{self.path} became shorter while it was being uploaded", hint="upload it again")
            offset += len(piece)
            yield piece


def _cut(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:_NAME_BYTES])


def remote_part(local: LocalFile, target: str, *, resume: bool) -> str:
    """Of an upload. With `resume` the same for the same file and target, whoever sends it."""
    directory, _, name = target.rpartition("/")
    identity = secrets.token_hex(8)
    if resume:
        identity = _mark(local.path.absolute(), local.size, local.mtime_ns, target)
    return f"{directory}/.{_cut(name)}.{identity}{_SUFFIX}"


def local_part(local: Path, sandbox: str, remote: str, info: FileInfo, *, resume: bool) -> Path:
    """Of a download. With `resume` the same for the same file of the same sandbox as long as it is not changed.

    Raises ConflictError when it was changed since an earlier part of it came; that part is removed.
    """
    if not resume:
        return local.with_name(f".{_cut(local.name)}.{secrets.token_hex(8)}{_SUFFIX}")
    begin = f".{_cut(local.name)}.{_mark(sandbox, remote)}."
    part = local.with_name(f"{begin}{_mark(info.size, info.mtime_ns, info.mode)}{_SUFFIX}")
    stale = [path for path in _entries(local.parent) if path.name.startswith(begin) and path != part]
    for path in stale:
        path.unlink(missing_ok=True)
    if stale:
        raise ConflictError(
            f"{remote[:200]!r} was changed since its download began",
            hint="what had come of it is removed; download it again",
            sandbox=sandbox,
        )
    return part


def open_part(part: Path, *, resume: bool) -> int:
    """For writing; with `resume` what is there of it stays."""
    file = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if resume else os.O_EXCL)
        file = os.open(part, flags, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError as error:
        os.close(file)
        raise ConflictError(f"{part} is being written by another download") from error
    except OSError as error:
        raise InvalidArgumentError(
            f"{part.parent} cannot be written to: {error.strerror}",
            hint="name a directory of this machine that is there, and that you may write to",
        ) from error


async def arrived(files: AsyncFiles, part: str, local: LocalFile, *, user: str | None) -> int:
    """How much of an upload is in its part and is what the file holds: all of it is read back and compared."""
    try:
        info = await files.stat(part, follow=False, user=user)
    except PathNotFoundError:
        return 0
    if info.kind != "file" or info.size > local.size:
        await files.remove(part, recursive=True, missing_ok=True, user=user)
        return 0
    same = 0
    async with aclosing(files.stream(part, length=info.size, user=user)) as pieces:
        async for piece in pieces:
            own = await asyncio.to_thread(os.pread, local.descriptor, len(piece), same)
            if own != piece:
                return same  # the rest is written over it
            same += len(piece)
    return same


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []  # making the part tells why


def _mark(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
