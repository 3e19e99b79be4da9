"""The node's end of `dsec-egress`: starts it with the first sandbox that has a network, and attaches all again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dsec.binaries import find_binary
from dsec.core.errors import (
    DeadlineError,
    DsecError,
    HostError,
    InvalidArgumentError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from dsec.observe.logs import get_logger
from dsec.storage import desk
from dsec.wire.codec import pack, unpack
from dsec.wire.egress import (
    MESSAGE_BYTES_MAX,
    AttachAnswer,
    AttachArgs,
    CountsAnswer,
    CountsArgs,
    DetachArgs,
    EgressCounts,
    EgressDenied,
    EgressFailure,
    EgressOp,
    EgressReply,
    EgressRequest,
    EgressRule,
    HelloAnswer,
    HelloArgs,
    RulesArgs,
)

log = get_logger(__name__)

T = TypeVar("T")

_REQUEST_S: Final = 30.0
_POLL_S: Final = 0.02
_AGAIN_S: Final = (0.05, 5.0)  # between attempts to have all attached again: at first, at most

Rules = tuple[EgressRule, ...] | None


class Egress:
    """The forwarder of a run directory. It outlives us, as sandboxes do; after our start each one is attached again,
    which cuts nothing that its rules allow."""

    def __init__(
        self,
        run_dir: Path,
        *,
        settings: HelloArgs | None = None,
        denied: Callable[[EgressDenied], None] | None = None,
        binary: Path | None = None,
        wrap: tuple[str, ...] = (),
    ) -> None:
        """`denied` is told of refusals, on the event loop. `binary` is ours unless given; `wrap` are words before it
        (of tests: into another network). Nothing runs before the first sandbox is attached."""
        self._run_dir = run_dir
        self._settings = settings or HelloArgs()
        self._denied = denied
        self._binary = binary
        self._wrap = wrap
        self._socket: socket.socket | None = None
        self._connecting = asyncio.Lock()
        self._sending = asyncio.Lock()  # an event loop waits for one sender a socket
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[EgressReply]] = {}
        self._attached: dict[str, AttachArgs] = {}
        self._restored = False  # on this connection: requests wait until all is as it was
        self._missing: set[str] = set()  # those of which that has failed, and may not the next time
        self._again: asyncio.Task[None] | None = None
        self._closed = False
        self.pid = 0

    # ---- what the node asks ----------------------------------------------------------------------

    async def attach(
        self, sandbox: str, pid: int, start_ticks: int, rules: Rules, *, connections: int = 0
    ) -> AttachAnswer:
        """From now on the network namespace of that process reaches what `rules` allow. May be repeated.

        Raises NotFoundError when the process has ended, CapacityError when there are too many, InvalidArgumentError
        for rules that it does not take, HostError when the kernel lacks what it needs, UnavailableError, DeadlineError.
        """
        args = AttachArgs(sandbox=sandbox, pid=pid, start=start_ticks, rules=rules, connections=connections)
        answer = await self._request(EgressOp.ATTACH, args, AttachAnswer)
        self._attached[sandbox] = args
        return answer

    async def rules(self, sandbox: str, rules: Rules) -> None:
        """Other rules in place: connections that they allow go on, the others are cut. Raises as `attach`, and
        NotFoundError for one that is not attached. Unless they are no rules, they hold once it is attached again."""
        known = self._attached.get(sandbox)
        if known is None:
            raise NotFoundError(f"sandbox {sandbox} has no network")
        wanted = msgspec.structs.replace(known, rules=rules)
        self._attached[sandbox] = wanted  # also for the next one, should this one die now
        try:
            await self._request(EgressOp.RULES, RulesArgs(sandbox=sandbox, rules=rules), dict)
        except InvalidArgumentError:
            if self._attached.get(sandbox) is wanted:
                self._attached[sandbox] = known
            raise

    async def detach(self, sandbox: str) -> EgressCounts:
        """Nothing passes any more; its last counts. One that is not attached is fine. Raises UnavailableError,
        DeadlineError."""
        self._forget(sandbox)
        if self._socket is None and not self._is_held():
            return EgressCounts(sandbox=sandbox)
        try:
            return await self._request(EgressOp.DETACH, DetachArgs(sandbox), EgressCounts)
        finally:
            self._forget(sandbox)  # an attach that was under way may have been answered meanwhile

    def _forget(self, sandbox: str) -> None:
        self._attached.pop(sandbox, None)
        self._missing.discard(sandbox)

    async def counts(self) -> dict[str, EgressCounts]:
        """Of all that it has; nothing when it does not run. Raises UnavailableError, DeadlineError."""
        found: dict[str, EgressCounts] = {}
        after = ""
        while self._socket is not None or self._is_held():
            page = await self._request(EgressOp.COUNTS, CountsArgs(after), CountsAnswer)
            found.update((counts.sandbox, counts) for counts in page.sandboxes)
            if not page.more or not page.sandboxes:
                break
            after = page.sandboxes[-1].sandbox
        return found

    async def close(self) -> None:
        """Leave it running."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._again
        self._disconnect(UnavailableError("the node closed its connection to dsec-egress"))

    async def shutdown(self) -> None:
        """End it; sandboxes reach nothing any more. One that does not run is fine. Raises DeadlineError."""
        self._attached.clear()
        await self._stop_attaching()
        try:
            async with asyncio.timeout(desk.START_S):
                while self._is_held():
                    with contextlib.suppress(UnavailableError):
                        if self._socket is None and not await self._connected_now():
                            await asyncio.sleep(_POLL_S)
                            continue
                        await self._exchange(EgressOp.SHUTDOWN, {}, dict)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(f"dsec-egress in {self._run_dir} does not end within {desk.START_S:g} s") from error
        await self.close()

    # ---- again after its death -------------------------------------------------------------------

    def _lost(self, error: Exception) -> None:
        self._disconnect(error)
        if self._attached:
            log.warning("dsec-egress went away; its sandboxes are attached again", sandboxes=len(self._attached))
        self._see_to_it()

    def _see_to_it(self) -> None:
        if self._attached and not self._closed and (self._again is None or self._again.done()):
            self._again = asyncio.get_running_loop().create_task(self._attach_again())

    async def _attach_again(self) -> None:
        pause_s, most_s = _AGAIN_S
        while self._attached and not self._closed:
            try:
                await self._ensure_connected()
                await self._restore(self._missing & self._attached.keys())
                if not self._missing:
                    return
            except DsecError as error:
                log.warning("dsec-egress does not come back", error=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

    async def _stop_attaching(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            again.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await again

    async def _restore(self, sandboxes: Collection[str]) -> None:
        """As they were: a new one knows nothing, and one that we had lost is told again, which cuts nothing."""
        for sandbox in sandboxes:
            args = self._attached.get(sandbox)
            if args is None:
                continue
            self._missing.discard(sandbox)
            try:
                await self._exchange(EgressOp.ATTACH, args, AttachAnswer)
            except (UnavailableError, DeadlineError):
                self._missing.add(sandbox)
                raise
            except NotFoundError:
                pass  # it has ended; whoever removes it detaches it
            except DsecError as error:
                log.warning("a sandbox is without its network", sandbox=sandbox, error=str(error))
                self._missing.add(sandbox)

    # ---- requests --------------------------------------------------------------------------------

    async def _request(self, op: EgressOp, args: Any, answer: type[T]) -> T:
        for last in (False, True):
            await self._ensure_connected()
            try:
                return await self._exchange(op, args, answer)
            except UnavailableError:
                if last:  # all operations may be repeated
                    raise
        raise AssertionError("unreachable")

    async def _exchange(self, op: EgressOp, args: Any, answer: type[T]) -> T:
        message_id = self._next_id
        self._next_id += 1
        message = pack(EgressRequest(message_id, op.value, args))
        if len(message) > MESSAGE_BYTES_MAX:
            raise InvalidArgumentError(f"a request of {len(message)} bytes is too long for dsec-egress")
        link = self._socket
        if link is None:
            raise UnavailableError("dsec-egress is not connected", retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[EgressReply] = loop.create_future()
        self._waiting[message_id] = reply
        try:
            async with asyncio.timeout(_REQUEST_S):
                async with self._sending:
                    await loop.sock_sendall(link, message)
                result = await reply
        except TimeoutError as error:
            raise DeadlineError(f"dsec-egress did not answer {op.value} within {_REQUEST_S:g} s") from error
        except OSError as error:
            lost = UnavailableError(f"dsec-egress went away: {error}", retry_after_s=1.0)
            if self._socket is link:
                self._lost(lost)
            raise lost from error
        finally:
            self._waiting.pop(message_id, None)
        if result.error is not None:
            raise _error_of(op, result.error)
        try:
            return msgspec.convert(result.ok if result.ok is not None else {}, answer)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"dsec-egress's answer to {op.value} is not understood: {error}") from error

    # ---- connection ------------------------------------------------------------------------------

    async def _ensure_connected(self) -> None:
        self._readable()  # one that has died already is noticed here
        if self._restored:
            return
        async with self._connecting:
            if not self._restored:
                await self._connect()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + desk.START_S
        while not await self._connected_now():
            if loop.time() >= until_s:
                raise UnavailableError(
                    f"dsec-egress does not answer in {self._run_dir}", hint=f"its log is {self._run_dir / 'egress.log'}"
                )
            if not await self._start():
                await asyncio.sleep(_POLL_S)
        try:
            hello = await self._exchange(EgressOp.HELLO, self._settings, HelloAnswer)
            await self._restore(list(self._attached))
            self.pid = hello.pid
            self._restored = True
            if self._missing:
                self._see_to_it()
        except BaseException as error:
            self._lost(UnavailableError(f"dsec-egress was not greeted: {error}", retry_after_s=1.0))
            raise

    async def _connected_now(self) -> bool:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
            link.connect(os.fspath(self._run_dir / "egress.sock"))
        except OSError as error:
            link.close()
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                return False
            raise UnavailableError(f"cannot reach dsec-egress in {self._run_dir}: {error}") from error
        self._socket = link
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable)
        return True

    def _is_held(self) -> bool:
        """Whether one has the run directory: the lock says."""
        return desk.is_held(self._run_dir / "egress.lock")

    async def _start(self) -> bool:
        """False: another one holds the run directory."""
        log_path = self._run_dir / "egress.log"
        words = [*self._wrap, os.fspath(self._binary or find_binary("dsec-egress")), "--run", os.fspath(self._run_dir)]
        try:
            self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(f"cannot make the run directory {self._run_dir}: {error}") from error
        return await asyncio.to_thread(
            desk.start, "dsec-egress", words, log_path, hint="see `dsec doctor`", keep_log=True
        )

    def _disconnect(self, error: Exception) -> None:
        link, self._socket = self._socket, None
        self._restored = False
        if link is not None:
            asyncio.get_running_loop().remove_reader(link.fileno())
            link.close()
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(error)

    def _readable(self) -> None:
        while (link := self._socket) is not None:
            try:
                message = link.recv(MESSAGE_BYTES_MAX)
                if not message:
                    raise ConnectionResetError("end of the connection")
                self._take(unpack(message, EgressReply))
            except BlockingIOError:
                return
            except (OSError, ProtocolError) as error:
                self._lost(UnavailableError(f"dsec-egress went away: {error}", retry_after_s=1.0))

    def _take(self, reply: EgressReply) -> None:
        if reply.denied is not None:
            if self._denied is not None:
                self._denied(reply.denied)
        elif (waiting := self._waiting.get(reply.id)) is not None and not waiting.done():
            waiting.set_result(reply)


def _error_of(op: EgressOp, failure: EgressFailure) -> DsecError:
    text = f"dsec-egress refuses {op.value}: {failure.message}"
    return desk.error_of(text, failure.code, hint="a network needs Linux 5.9 with BPF for root; see `dsec doctor`")
