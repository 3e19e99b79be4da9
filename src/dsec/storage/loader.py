"""The node's end of `dsec-loader`: starts it where it does not run, speaks its protocol. Blocking; safe for threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dsec.binaries import find_binary
from dsec.core.errors import (
    DeadlineError,
    InvalidArgumentError,
    ProtocolError,
    UnavailableError,
)
from dsec.storage import desk
from dsec.wire import codec
from dsec.wire.loader import (
    MESSAGE_BYTES_MAX,
    HelloAnswer,
    HelloArgs,
    LoaderOp,
    LoaderReply,
    LoaderRequest,
)

T = TypeVar("T")

FRONTS: Final = ("auto", "fuse", "fanotify")  # how readers come to chunks; auto: FUSE, where there is any
_REQUEST_S: Final = 60.0
_POLL_S: Final = 0.02


class Loader:
    """The loader of a run directory. It outlives us: sandboxes read through it."""

    def __init__(
        self, run_dir: Path, cache_dir: Path, *, cache_bytes: int, front: str = "auto", binary: Path | None = None
    ) -> None:
        """`binary` is ours unless given. Nothing runs before the first request.

        `front` is one of FRONTS; a loader that runs already keeps the one it has.
        """
        self._run_dir = run_dir
        self._cache_dir = cache_dir
        self._binary = binary
        self._front = front
        self._cache_bytes = cache_bytes
        self._mutex = threading.Lock()
        self._asking = asyncio.Lock()
        self._socket: socket.socket | None = None
        self._next_id = 1

    def request(self, op: LoaderOp, args: Any, answer: type[T], *, start: bool = True) -> T:
        """Starts the loader if need be. Raises what it answers as a typed error, UnavailableError, DeadlineError.

        Without `start`, one that does not run is an UnavailableError.
        """
        with self._mutex:
            for last in (False, True):
                try:
                    link = self._connected(start=start)
                    return self._exchange(link, op, args, answer)
                except (ConnectionError, BrokenPipeError) as error:
                    # Its worker went away under the request. All operations may be repeated.
                    self._disconnect()
                    if last:
                        raise UnavailableError(f"the loader went away: {error}", retry_after_s=1.0) from error
        raise AssertionError("unreachable")

    async def ask(self, op: LoaderOp, args: Any, answer: type[T], *, timeout_s: float) -> T:
        """`request` without a thread, of a loader that runs, by a connection of its own: neither those who use the
        other one nor a loader that hangs hold it up. Raises what it answers as a typed error, UnavailableError,
        DeadlineError."""
        message = _message(1, op, args)
        try:
            # One at a time: the loader has few connections, and would drop the other one for these.
            async with asyncio.timeout(timeout_s), self._asking:
                data = await self._ask(message)
        except TimeoutError as error:
            raise DeadlineError(f"the loader did not answer {op.value} within {timeout_s:g} s") from error
        except OSError as error:
            raise UnavailableError(f"the loader does not answer: {error}", retry_after_s=1.0) from error
        return _answer_in(data, 1, op, answer)

    async def _ask(self, message: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as link:
            link.setblocking(False)
            await loop.sock_connect(link, os.fspath(self._run_dir / "loader.sock"))
            await loop.sock_sendall(link, message)
            data = await loop.sock_recv(link, MESSAGE_BYTES_MAX)
        if not data:
            raise ConnectionResetError("end of the connection")
        return data

    def hello(self) -> HelloAnswer:
        return self.request(LoaderOp.HELLO, HelloArgs(), HelloAnswer)

    def is_running(self) -> bool:
        """Whether one answers, without starting it."""
        with self._mutex:
            try:
                if self._socket is None:
                    self._socket = self._connect()
            except OSError:
                return False
            return True

    def close(self) -> None:
        """Leave the loader running."""
        with self._mutex:
            self._disconnect()

    def shutdown(self) -> None:
        """End it: nothing may read through it any more. One that does not run is fine. Raises DeadlineError."""
        deadline = time.monotonic() + desk.START_S
        with self._mutex:
            # Its worker may be dead at the moment, and another one about to take its place.
            while self._is_held():
                if time.monotonic() > deadline:
                    raise DeadlineError(f"dsec-loader in {self._run_dir} does not end within {desk.START_S:g} s")
                with contextlib.suppress(OSError):
                    link = self._socket or self._connect()
                    self._socket = link
                    self._exchange(link, LoaderOp.SHUTDOWN, {}, dict)
                self._disconnect()
                time.sleep(_POLL_S)
            self._disconnect()

    def _is_held(self) -> bool:
        """Whether a loader has the run directory: the lock says."""
        return desk.is_held(self._run_dir / "loader.lock")

    def _exchange(self, link: socket.socket, op: LoaderOp, args: Any, answer: type[T]) -> T:
        message_id = self._next_id
        self._next_id += 1
        message = _message(message_id, op, args)
        try:
            link.send(message)
            data = link.recv(MESSAGE_BYTES_MAX)
        except TimeoutError as error:
            self._disconnect()
            raise DeadlineError(f"the loader did not answer {op.value} within {_REQUEST_S:g} s") from error
        if not data:
            raise ConnectionResetError("end of the connection")
        try:
            return _answer_in(data, message_id, op, answer)
        except ProtocolError:
            self._disconnect()
            raise

    def _connected(self, *, start: bool) -> socket.socket:
        if self._socket is None:
            try:
                self._socket = self._connect()
            except OSError as error:
                if not start and not self._is_held():
                    raise UnavailableError("the loader does not run", retry_after_s=1.0) from error
                self._start()
        assert self._socket is not None
        return self._socket

    def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            link.settimeout(_REQUEST_S)
            link.connect(os.fspath(self._run_dir / "loader.sock"))
        except BaseException:
            link.close()
            raise
        return link

    def _start(self) -> None:
        """A process of its own session, with a log of its own; it runs on when we end."""
        log = self._run_dir / "loader.log"
        self._cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        words = [os.fspath(self._binary or find_binary("dsec-loader"))]
        words += ["--run", os.fspath(self._run_dir), "--cache", os.fspath(self._cache_dir)]
        words += ["--cache-bytes", str(self._cache_bytes), "--front", self._front]
        hint = "layers of a store need FUSE, or fanotify of Linux 6.14; see `dsec doctor`"
        desk.start("dsec-loader", words, log, hint=hint, keep_log=False)
        self._socket = self._connect_soon()

    def _connect_soon(self) -> socket.socket:
        """A worker that takes the place of a dead one needs a moment."""
        deadline = time.monotonic() + desk.START_S
        while True:
            try:
                return self._connect()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"dsec-loader does not answer: {error}", retry_after_s=5.0) from error
            time.sleep(_POLL_S)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _message(message_id: int, op: LoaderOp, args: Any) -> bytes:
    message = codec.pack(LoaderRequest(message_id, op.value, args))
    if len(message) > MESSAGE_BYTES_MAX:
        raise InvalidArgumentError(f"a request of {len(message)} bytes is too long for the loader")
    return message


def _answer_in(data: bytes, message_id: int, op: LoaderOp, answer: type[T]) -> T:
    reply = codec.unpack(data, LoaderReply)
    if reply.id != message_id:
        raise ProtocolError(f"the loader answered request {reply.id} instead of {message_id}")
    if reply.error is not None:
        raise desk.error_of(f"the loader refuses {op.value}: {reply.error.message}", reply.error.code)
    try:
        return msgspec.convert(reply.ok, answer)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the loader's answer to {op.value} is not understood: {error}") from error


def has_pre_content_events(binary: Path, directory: Path) -> bool:
    """Whether the front end fanotify works for a cache in `directory`, or where it would be made."""
    while not directory.exists():
        directory = directory.parent
    words = [os.fspath(binary), "--probe", "--run", "/", "--cache", os.fspath(directory), "--cache-bytes", "1"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=desk.START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def why_no_block_devices(binary: Path) -> str | None:
    """Why layers cannot be block devices on this machine; None when they can."""
    words = [os.fspath(binary), "--probe-blocks"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=desk.START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the loader does not say: {error}"
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").removeprefix("dsec-loader:").strip()[:300] or "the loader does not say"
