"""The node's end of `dsec-launch`: starts it when it does not run, speaks its protocol, hands out its exit events."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.core.errors import DeadlineError, HostError, LaunchError, Outcome, ProtocolError, UnavailableError
from dsec.wire.codec import pack, unpack
from dsec.wire.launch import (
    LAUNCH_VERSION,
    MESSAGE_BYTES_MAX,
    ExitEvent,
    HelloAnswer,
    HelloArgs,
    LaunchFailure,
    LaunchOp,
    LaunchReply,
    LaunchRequest,
    ListArgs,
    Listed,
)

T = TypeVar("T")

_REQUEST_S = 60.0
_START_AGAIN_S = 0.05
_HELD = 3  # its exit code when another one has the run directory
_REPEATABLE = frozenset(LaunchOp) - {LaunchOp.LAUNCH, LaunchOp.SHUTDOWN}
_EXITS_KEPT_MAX = 8_192


class LauncherRefusal(Exception):
    """The launcher's answer to one request: it failed at a step and undid it."""

    def __init__(self, op: str, failure: LaunchFailure):
        super().__init__(f"{op}: step {failure.step}: {failure.errno or ''} {failure.detail}".strip())
        self.failure = failure


class Launcher:
    """One connection to the launcher of a run directory; reconnects, and restarts it, on the next request."""

    def __init__(
        self, run_dir: Path, *, launch_binary: Path, agent_binary: Path, start_s: float, lxcfs: Path | None = None
    ):
        self._run_dir = run_dir
        self._launch_binary = launch_binary
        self._agent_binary = agent_binary
        self._start_s = start_s
        self._lxcfs = lxcfs
        self._socket: socket.socket | None = None
        self._connecting = asyncio.Lock()
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[LaunchReply]] = {}
        self._unsent: list[bytes] = []
        self._exits: OrderedDict[str, ExitEvent] = OrderedDict()
        self._exit_waiters: dict[str, asyncio.Future[ExitEvent]] = {}
        self.connection = 0  # grows with each connection: what was registered on an earlier one must be again
        self.pid = 0

    @property
    def is_connected(self) -> bool:
        self._readable()  # its end may not have been noticed yet
        return self._socket is not None

    # ---- requests --------------------------------------------------------------------------------

    async def request(self, op: LaunchOp, args: Any, answer: type[T], *, timeout_s: float = _REQUEST_S) -> T:
        """Raises LauncherRefusal, UnavailableError (it cannot be reached), or DeadlineError (it may still happen)."""
        await self._ensure_connected()
        try:
            return await self._exchange(op, args, answer, timeout_s)
        except UnavailableError:
            if op not in _REPEATABLE:
                raise
        # It went away under the request, and may have done it or not: the next launcher does it as well.
        await self._ensure_connected()
        return await self._exchange(op, args, answer, timeout_s)

    async def listed(self) -> Listed:
        """All that it holds, page by page."""
        found = page = await self.request(LaunchOp.LIST, ListArgs(), Listed)
        while page.more and page.sandboxes:
            page = await self.request(LaunchOp.LIST, ListArgs(page.sandboxes[-1].sandbox), Listed)
            found.sandboxes.extend(page.sandboxes)
        return found

    async def _exchange(self, op: LaunchOp, args: Any, answer: type[T], timeout_s: float) -> T:
        message_id = self._next_id
        self._next_id += 1
        message = pack(LaunchRequest(message_id, op.value, args))
        if len(message) > MESSAGE_BYTES_MAX:
            raise LaunchError(
                f"the launch plan has {len(message)} bytes; the most is {MESSAGE_BYTES_MAX}",
                hint="the environment variables of the sandbox are too large",
                outcome=Outcome.UNCHANGED,
                step="check",
            )
        reply: asyncio.Future[LaunchReply] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = reply
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                result = await reply
        except TimeoutError as error:
            raise DeadlineError(f"the launcher did not answer {op.value} within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(message_id, None)
        if result.error is not None:
            raise LauncherRefusal(op.value, result.error)
        try:
            return msgspec.convert(result.ok if result.ok is not None else {}, answer)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the launcher's answer to {op.value} is not understood: {error}") from error

    def exit_of(self, sandbox: str) -> asyncio.Future[ExitEvent]:
        """Done when the launcher tells of the agent's end. Never done if it was restarted in between."""
        waiter = self._exit_waiters.get(sandbox)
        if waiter is None or waiter.cancelled():
            waiter = asyncio.get_running_loop().create_future()
            self._exit_waiters[sandbox] = waiter
            if (known := self._exits.pop(sandbox, None)) is not None:
                waiter.set_result(known)
        return waiter

    def forget(self, sandbox: str) -> None:
        self._exits.pop(sandbox, None)
        if (waiter := self._exit_waiters.pop(sandbox, None)) is not None:
            waiter.cancel()

    async def close(self) -> None:
        """Leave the launcher running: it holds what must outlive this process."""
        self._disconnect(UnavailableError("the node closed its launcher connection"))

    # ---- connection ------------------------------------------------------------------------------

    async def _ensure_connected(self) -> None:
        # One that has died already is noticed here: a launch sent to it would fail, and cannot be repeated.
        self._readable()
        if self._socket is not None:
            return
        async with self._connecting:
            if self._socket is None:
                await self._connect()

    async def _connect(self) -> None:
        link = await self._reached()
        link.setblocking(False)
        self._socket = link
        self.connection += 1
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable)
        try:
            hello = await self._exchange(LaunchOp.HELLO, HelloArgs(LAUNCH_VERSION), HelloAnswer, 10.0)
        except LauncherRefusal as refusal:
            self._disconnect(UnavailableError(str(refusal)))
            raise UnavailableError(
                f"the running dsec-launch is of another version: {refusal}",
                hint="destroy the sandboxes, `dsec down --launcher`, and start again",
            ) from refusal
        self.pid = hello.pid

    @property
    def _path(self) -> Path:
        return self._run_dir / "launch.sock"

    def _try_connect(self) -> socket.socket | None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
            link.connect(str(self._path))
        except OSError as error:
            link.close()
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                return None
            raise UnavailableError(f"cannot reach dsec-launch at {self._path}: {error}") from error
        return link

    async def _reached(self) -> socket.socket:
        """Starts it where nobody answers. What a killed one leaves may hold its run directory for a moment longer, and
        then the next cannot begin yet."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._start_s
        while (link := self._try_connect()) is None:
            if loop.time() >= until_s:
                raise UnavailableError(
                    f"dsec-launch does not answer at {self._path}", hint=f"its log is {self._run_dir / 'launch.log'}"
                )
            if not await self._start():
                await asyncio.sleep(_START_AGAIN_S)
        return link

    async def _start(self) -> bool:
        """It puts itself into the background and exits 0 once it accepts connections. False: another one holds the run
        directory, and may just be coming up, or be on its way out."""
        command = [str(self._launch_binary), "--run", str(self._run_dir), "--agent", str(self._agent_binary)]
        if self._lxcfs is not None:
            command += ["--lxcfs", str(self._lxcfs)]
        log_path = self._run_dir / "launch.log"
        try:
            self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            result = await asyncio.to_thread(self._run, command, log_path)
        except subprocess.TimeoutExpired as error:
            raise HostError(f"dsec-launch did not become ready within {self._start_s:g} s") from error
        except OSError as error:
            raise HostError(f"cannot run {command[0]}, with its log in {self._run_dir}: {error}") from error
        if result not in (0, _HELD):
            tail = log_path.read_text(errors="replace")[-500:].strip()
            raise HostError(
                f"dsec-launch failed to start on {self._run_dir} (exit {result}): {tail or 'it has left no word'}",
                hint=f"is there room in {self._run_dir}? see `dsec doctor`",
            )
        return result == 0

    def _run(self, command: list[str], log_path: Path) -> int:
        with log_path.open("ab") as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=self._start_s, start_new_session=True
            )
        return done.returncode

    def _disconnect(self, error: Exception) -> None:
        link, self._socket = self._socket, None
        if link is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(link.fileno())
            loop.remove_writer(link.fileno())
            link.close()
        self._unsent.clear()
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(error)

    # ---- bytes -----------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        if self._socket is None:
            raise UnavailableError("dsec-launch is not connected")
        if self._unsent or not self._sent(message):
            self._unsent.append(message)
            asyncio.get_running_loop().add_writer(self._socket.fileno(), self._writable)

    def _sent(self, message: bytes) -> bool:
        assert self._socket is not None
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            self._disconnect(UnavailableError(f"dsec-launch went away: {error}"))
        return True

    def _writable(self) -> None:
        while self._unsent and self._sent(self._unsent[0]):
            if self._unsent:
                self._unsent.pop(0)
        if not self._unsent and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                message = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                self._disconnect(UnavailableError(f"dsec-launch went away: {error}"))
                return
            if not message:
                self._disconnect(UnavailableError("dsec-launch went away"))
                return
            try:
                self._take(unpack(message, LaunchReply))
            except ProtocolError as error:
                self._disconnect(error)

    def _take(self, reply: LaunchReply) -> None:
        if reply.event is not None:
            self._take_exit(reply.event)
        elif (waiting := self._waiting.get(reply.id)) is not None and not waiting.done():
            waiting.set_result(reply)

    def _take_exit(self, event: ExitEvent) -> None:
        waiter = self._exit_waiters.get(event.sandbox)
        if waiter is not None:
            if not waiter.done():
                waiter.set_result(event)
            return
        self._exits[event.sandbox] = event
        while len(self._exits) > _EXITS_KEPT_MAX:
            self._exits.popitem(last=False)
