"""What a fake command runs in: its environment, and where its input and output go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from dsec.backends.fake.files import FileTree, User

PIPE_BYTES: Final = 64 * 1024

Sleep = Callable[[float], Awaitable[None]]


class Source(Protocol):
    async def read(self, size: int) -> bytes:
        """At least one byte; nothing at the end."""
        ...


class Sink(Protocol):
    async def write(self, data: bytes) -> None: ...


class ShellExit(Exception):
    """`exit` was called."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class KilledError(Exception):
    """The process ended itself by a signal."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass(slots=True)
class Context:
    """What all processes of one exec share."""

    files: FileTree
    sleep: Sleep
    pid: int
    tty: tuple[int, int] | None = None
    ignored: set[int] = field(default_factory=set)  # signals, by `trap ''`
    background: set[asyncio.Task[int]] = field(default_factory=set)


@dataclass(slots=True)
class Process:
    context: Context
    env: dict[bytes, bytes]
    cwd: bytes
    user: User
    stdin: Source
    stdout: Sink
    stderr: Sink

    def path(self, name: bytes) -> bytes:
        return name if name.startswith(b"/") else self.cwd.rstrip(b"/") + b"/" + name

    async def complain(self, text: str) -> None:
        await self.stderr.write(text.encode("utf-8", "surrogateescape") + b"\n")


class NullSource:
    async def read(self, size: int) -> bytes:
        return b""


class BytesSource:
    """A file's content as it was when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    async def read(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece


class ZeroSource:
    async def read(self, size: int) -> bytes:
        await asyncio.sleep(0)
        return bytes(size)


class NullSink:
    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)


class FileSink:
    def __init__(self, files: FileTree, path: bytes, user: User, *, append: bool) -> None:
        self._files = files
        self._path = path
        self._user = user
        files.write(path, b"", append=append, user=user)

    async def write(self, data: bytes) -> None:
        self._files.write(self._path, data, append=True, user=self._user)


class Pipe:
    """Between two commands: bounded, and broken when its reader is gone."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._write_closed = False
        self._read_closed = False

    async def read(self, size: int) -> bytes:
        while not self._buffer and not self._write_closed:
            await self._change()
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._changed.set()
        return piece

    async def write(self, data: bytes) -> None:
        while len(self._buffer) >= PIPE_BYTES and not self._read_closed:
            await self._change()
        if self._read_closed:
            raise BrokenPipeError
        self._buffer += data
        self._changed.set()
        await asyncio.sleep(0)

    def close_write(self) -> None:
        self._write_closed = True
        self._changed.set()

    def close_read(self) -> None:
        self._read_closed = True
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
