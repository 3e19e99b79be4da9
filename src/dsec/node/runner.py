"""Carries an exec from start to journalled end: the only consumer of its output, and the writer of its record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec

from dsec.agent.execs import ExecStream
from dsec.core.clock import Clock
from dsec.core.errors import (
    ConflictError,
    DeadlineError,
    DsecError,
    ExecNotFoundError,
    InvalidArgumentError,
    Outcome,
    SandboxError,
    UnavailableError,
)
from dsec.core.limits import EXEC_UNACKED_BYTES_MAX, RECONNECTS_MAX
from dsec.node.execs import NodeExec
from dsec.node.exectable import ExecTable
from dsec.node.link import AgentLink
from dsec.wire import agent
from dsec.wire.agent import ExecEnd, ExecStatus

_ACK_BYTES: Final = EXEC_UNACKED_BYTES_MAX // 4
# The agent keeps unacknowledged output within bounds of bytes and of pieces, for one exec and for all of them, and
# stops reading at each bound: so many small pieces are acknowledged too, and in a pause whatever is there.
_ACK_CHUNKS: Final = 2_048
_ACK_IDLE_S: Final = 0.1
_ATTACH_AGAIN_S: Final = 0.05  # back-off between tries on an open channel
_LOST: Final = frozenset({"superseded", "cancelled", "detached"})


class ExecRunner:
    """Shared by all execs of one sandbox; each has a task of its own in `run`."""

    def __init__(
        self,
        *,
        table: ExecTable,
        link: Callable[[], AgentLink],
        clock: Clock,
        limit_hit: Callable[[NodeExec], Awaitable[str | None]],
        on_end: Callable[[], None],
    ) -> None:
        self._table = table
        self._link = link
        self._clock = clock
        self._limit_hit = limit_hit
        self._on_end = on_end

    async def run(self, exec: NodeExec, request: agent.Exec | None) -> None:
        """`request` starts it; None takes over one that the agent runs already."""
        try:
            await self._run(exec, request)
        finally:
            # An ended sandbox, or a node that stops: waiters of the start must not wait for ever.
            exec.fail_start(
                SandboxError(
                    "the sandbox ended while the exec was being started", exec=exec.id, outcome=Outcome.UNKNOWN
                )
            )

    async def _run(self, exec: NodeExec, request: agent.Exec | None) -> None:
        try:
            stream = await (self._attach(exec) if request is None else self._start(exec, request))
        except ExecNotFoundError:
            self._finish(exec, ExecEnd(status=ExecStatus.UNKNOWN, cause="node_lost"))
            return
        except DsecError as error:
            self._refuse(exec, error)
            return
        self._set_stream(exec, stream)
        try:
            end = await self._record(exec, stream)
        except ExecNotFoundError:
            self._finish(exec, ExecEnd(status=ExecStatus.UNKNOWN, cause="agent_lost"))
            return
        except DsecError:
            return  # the link is given up: the supervisor ends the sandbox, and its execs with it
        if self._finish(exec, await self._with_limit(exec, end)):
            with suppress(DsecError):
                (await self._link().client()).exit_ack_later(exec.id)

    async def _start(self, exec: NodeExec, request: agent.Exec) -> ExecStream:
        """A lost channel leaves open whether it was started: asking again with the same id never runs it twice."""
        for last in (*[False] * RECONNECTS_MAX, True):
            client = await self._link().client()
            try:
                return await client.exec(request)
            except (UnavailableError, DeadlineError):
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _attach(self, exec: NodeExec) -> ExecStream:
        """Raises ExecNotFoundError when the agent does not know it, and the link's failure when that is given up."""
        while True:
            client = await self._link().client()
            try:
                return await client.attach(exec.id, out=exec.record.out_bytes, err=exec.record.err_bytes)
            except ExecNotFoundError:
                raise
            except DsecError:
                await asyncio.sleep(_ATTACH_AGAIN_S)

    async def _record(self, exec: NodeExec, stream: ExecStream) -> ExecEnd:
        record = exec.record
        unacked = chunks = 0
        while True:
            try:
                if unacked and record.acknowledgeable:
                    async with asyncio.timeout(_ACK_IDLE_S):
                        data = await stream.receive()
                else:
                    data = await stream.receive()
            except TimeoutError:
                unacked = chunks = 0
                await self._ack(exec)
                continue
            except (UnavailableError, ConflictError) as error:
                if isinstance(error, ConflictError) and error.detail.get("code") not in _LOST:
                    raise
                stream = await self._attach(exec)
                self._set_stream(exec, stream)
                continue
            if data is None:
                return stream.end
            record.write(data.channel, data.offset, data.sequence, data.payload)
            exec.notify()
            unacked += len(data.payload)
            chunks += 1
            if chunks >= _ACK_CHUNKS:
                record.settle()
            if (unacked >= _ACK_BYTES or chunks >= _ACK_CHUNKS) and record.acknowledgeable:
                unacked = chunks = 0
                await self._ack(exec)

    async def _ack(self, exec: NodeExec) -> None:
        # What is lost here is made good by the next one; a lost channel shows at the next receive.
        with suppress(DsecError):
            client = await self._link().client()
            await client.ack(exec.id, out=exec.record.out_bytes, err=exec.record.err_bytes)

    def _set_stream(self, exec: NodeExec, stream: ExecStream) -> None:
        exec.stream = stream
        exec.mark_started()
        exec.notify()

    def _refuse(self, exec: NodeExec, error: DsecError) -> None:
        """The agent said no: nothing has run. Unless the channel failed, and then nobody knows."""
        error.exec = exec.id
        error.sandbox = self._table.sandbox
        exec.fail_start(error)
        if error.outcome is Outcome.UNCHANGED or "code" in error.detail:
            self._table.never_started(exec)
            exec.notify()
            self._on_end()
        else:
            self._finish(exec, ExecEnd(status=ExecStatus.UNKNOWN, cause="agent_lost"))

    def _finish(self, exec: NodeExec, end: ExecEnd) -> bool:
        written = self._table.finish(exec, end, self._clock.wall_s())
        self._on_end()
        return written

    async def _with_limit(self, exec: NodeExec, end: ExecEnd) -> ExecEnd:
        """A failed exec during which the kernel killed for memory says so, also when a child of it was hit; and one
        during which a layer's store gave none or wrong content, or that leaves the disk at its limit."""
        if end.cause is not None or (end.status == ExecStatus.EXITED and end.code == 0):
            return end
        cause = await self._limit_hit(exec)
        return end if cause is None else msgspec.structs.replace(end, cause=cause)


async def feed_stdin(exec: NodeExec, data: bytes) -> None:
    """All of stdin at once, then its end. What the agent has already is not sent again."""
    async with exec.stdin_lock:
        while (stream := await _stream_of(exec)) is not None:
            try:
                await stream.send_stdin(data[stream.stdin_offset :])
                stream.close_stdin()
                exec.stdin_closed = True
                return
            except ConflictError:
                return  # it takes no more: it has ended, or closed its input
            except DsecError:
                await _next_stream(exec, stream)


async def write_stdin(exec: NodeExec, data: bytes, *, offset: int | None, eof: bool) -> int:
    """Returns the bytes of stdin accepted in all. Bytes below what was accepted are skipped, so that a retry does no
    harm. Raises ConflictError when there would be a hole (`detail["accepted"]` says where to go on), or when the exec
    has ended or has no open stdin."""
    async with exec.stdin_lock:
        if not exec.start.stdin:
            raise InvalidArgumentError(
                "the exec was started without stdin", hint="start it with stdin=True", exec=exec.id
            )
        position: int | None = offset
        while True:
            stream = await _stream_of(exec)
            if stream is None:
                raise ConflictError("the exec has ended", exec=exec.id, detail={"code": "ended"})
            accepted = stream.stdin_offset
            if position is None:
                position = accepted
            if position > accepted:
                raise ConflictError(
                    f"stdin goes on at byte {accepted}, not at {position}",
                    exec=exec.id,
                    detail={"code": "stdin_gap", "accepted": accepted},
                )
            rest = data[accepted - position :]
            if exec.stdin_closed and rest:
                raise ConflictError("the exec's stdin was closed", exec=exec.id, detail={"code": "stdin_closed"})
            try:
                await stream.send_stdin(rest)
            except UnavailableError:
                await _next_stream(exec, stream)
                continue
            if eof:
                stream.close_stdin()
                exec.stdin_closed = True
            return stream.stdin_offset


async def _stream_of(exec: NodeExec) -> ExecStream | None:
    """The exec's stream, once it has one; None when it has ended."""
    while exec.live and exec.stream is None:
        await exec.changed()
    return exec.stream if exec.live else None


async def _next_stream(exec: NodeExec, lost: ExecStream) -> None:
    """Returns when the runner has attached again (it tells of it as a change), or the exec has ended."""
    while exec.live and exec.stream is lost:
        await exec.changed()
