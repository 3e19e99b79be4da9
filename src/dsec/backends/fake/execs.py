"""One exec of the fake agent: it belongs to the agent, not to a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from dsec.backends.fake.output import Retained, Stdin
from dsec.backends.fake.process import KilledError, Process, ShellExit
from dsec.core.limits import DRAIN_AFTER_EXIT_S, EXEC_UNACKED_BYTES_MAX
from dsec.wire.agent import Exec, ExecEnd, ExecStatus, ExecUsage
from dsec.wire.frames import Channel

_HARMLESS: Final = frozenset({0, 17, 18, 23, 28})  # ignored by default: CHLD, CONT, URG, WINCH
_KILL, _TERM, _STOP = 9, 15, 19


class World(Protocol):
    """What an exec needs of its sandbox."""

    def monotonic_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None:
        """Time that passes while frozen does not count."""
        ...

    async def running(self) -> None:
        """Returns once the sandbox is not frozen."""
        ...

    def adopt_orphan(self, task: asyncio.Task[int]) -> None: ...


class OutputReader(Protocol):
    def pump(self) -> None: ...


class FakeExec:
    """Runs `main` as its leader. `end` is set when it is over; output is kept until it is acknowledged."""

    def __init__(self, world: World, request: Exec, pid: int) -> None:
        self.id = request.id
        self.pid = pid
        self.session = request.session
        self.request = request
        self.out = Retained()
        self.err = Retained()
        self.stdin = Stdin()
        self.end: ExecEnd | None = None
        self.reader: OutputReader | None = None
        self.session_ended = False
        self._world = world
        self._sequence = 0
        self._room = asyncio.Event()
        self._activity = asyncio.Event()
        self._closed = False
        self._cause: str | None = None
        self._death: int | None = None
        self._leader: asyncio.Task[int] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._on_end: Callable[[FakeExec], None] | None = None

    def start(self, process: Process, main: Callable[[], Awaitable[int]], on_end: Callable[[FakeExec], None]) -> None:
        self._process = process
        self._on_end = on_end
        self._runner = asyncio.get_running_loop().create_task(self._run(main))

    # -- output ------------------------------------------------------------------------------------

    def sink(self, channel: Channel) -> ExecSink:
        merged = self.request.merge_stderr or self.request.tty is not None
        return ExecSink(self, Channel.OUT if merged else channel)

    async def produce(self, channel: Channel, data: bytes) -> None:
        """Waits while too much is unacknowledged, as a process waits at a full pipe."""
        await self._world.running()
        left = memoryview(data)
        while left and not self._closed:
            room = EXEC_UNACKED_BYTES_MAX - self._unacked()
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            budget = self._budget()
            size = min(len(left), room) if budget is None else min(len(left), room, budget)
            if size:
                (self.out if channel == Channel.OUT else self.err).add(self._sequence, bytes(left[:size]))
                self._sequence += 1
                left = left[size:]
                self._activity.set()
                if self.reader is not None:
                    self.reader.pump()
            elif budget == 0:
                self.kill("output_budget")
            await asyncio.sleep(0)

    def ack(self, out: int, err: int) -> None:
        self.out.ack(out)
        self.err.ack(err)
        self._room.set()

    def _unacked(self) -> int:
        return self.out.produced - self.out.acked + self.err.produced - self.err.acked

    def _budget(self) -> int | None:
        most = self.request.output_bytes_max
        return None if most is None else most - self.out.produced - self.err.produced

    # -- signals -----------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        if self.end is not None or number in _HARMLESS or self._process is None:
            return
        if number in self._process.context.ignored and number not in (_KILL, _STOP):
            return
        self._death = number
        for task in (self._leader, *self._process.context.background):
            if task is not None:
                task.cancel()

    def kill(self, cause: str) -> None:
        if self.end is None:
            self._cause = self._cause or cause
            self.signal(_KILL)

    def resize(self, cols: int, rows: int) -> bool:
        """False when the exec has no terminal."""
        if self.request.tty is None or self._process is None:
            return False
        self._process.context.tty = (cols, rows)
        return True

    def cancel(self) -> list[asyncio.Task[None]]:
        """The sandbox goes away: everything stops, nothing is recorded."""
        if self._runner is None or self._runner.done():
            return []
        self._closed = True
        self._runner.cancel()
        return [self._runner]

    # -- inside ------------------------------------------------------------------------------------

    async def _run(self, main: Callable[[], Awaitable[int]]) -> None:
        started_s = self._world.monotonic_s()
        watch = self._watch_time() if self.request.timeout_s is not None else None
        watcher = None if watch is None else asyncio.get_running_loop().create_task(watch)
        try:
            code, signal = await self._lead(main)
            await self._drain()
        finally:
            if watcher is not None:
                watcher.cancel()
            self._closed = True
            self._abandon_background()
        wall_us = int((self._world.monotonic_s() - started_s) * 1e6)
        self.end = ExecEnd(
            status=ExecStatus.EXITED if signal is None else ExecStatus.SIGNALED,
            code=code if signal is None else None,
            signal=signal,
            cause=self._cause,
            out_bytes=self.out.produced,
            err_bytes=self.err.produced,
            usage=ExecUsage(wall_us=wall_us),
            session_ended=self.session_ended,
        )
        if self._on_end is not None:
            self._on_end(self)
        if self.reader is not None:
            self.reader.pump()

    async def _lead(self, main: Callable[[], Awaitable[int]]) -> tuple[int, int | None]:
        """(exit code, signal) of the leader."""

        async def lead() -> int:
            return await main()

        self._leader = asyncio.get_running_loop().create_task(lead())
        if self._death is not None:  # a signal that came before its first turn
            self._leader.cancel()
        try:
            await asyncio.wait([self._leader])
        except asyncio.CancelledError:
            self._leader.cancel()
            await asyncio.wait([self._leader])
            raise
        return self._verdict(self._leader)

    def _verdict(self, leader: asyncio.Task[int]) -> tuple[int, int | None]:
        if leader.cancelled():
            signal = self._death if self._death is not None else _KILL
            # A session's shell survives, and reports its command as shells do.
            return (128 + signal, None) if self.session is not None else (0, signal)
        error = leader.exception()
        if isinstance(error, ShellExit):
            self.session_ended = self.session is not None
            return error.code, None
        if isinstance(error, KilledError):
            self.session_ended = self.session is not None
            return 0, error.signal
        if error is not None:
            raise error
        return leader.result(), None

    async def _watch_time(self) -> None:
        assert self.request.timeout_s is not None
        await self._world.sleep(self.request.timeout_s)
        self._cause = self._cause or "timed_out"
        self.signal(_TERM)
        await self._world.sleep(self.request.grace_s)
        self.signal(_KILL)

    async def _drain(self) -> None:
        """Output of what the leader left behind is read until it is quiet for a moment."""
        assert self._process is not None
        while background := set(self._process.context.background):
            self._activity.clear()
            active = asyncio.get_running_loop().create_task(self._activity.wait())
            done, _ = await asyncio.wait(
                {active, *background}, timeout=DRAIN_AFTER_EXIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            active.cancel()
            if not done:
                return

    def _abandon_background(self) -> None:
        if self._process is not None:
            for task in set(self._process.context.background):
                self._world.adopt_orphan(task)
        self._room.set()


class ExecSink:
    def __init__(self, exec: FakeExec, channel: Channel) -> None:
        self._exec = exec
        self._channel = channel

    async def write(self, data: bytes) -> None:
        await self._exec.produce(self._channel, data)
