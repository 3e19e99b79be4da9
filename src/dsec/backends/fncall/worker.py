"""One container of the call service, and `dsec-call` in it: one call at a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from dsec.agent.client import AgentClient
from dsec.agent.execs import ExecStream
from dsec.backends.base import Instance
from dsec.backends.fncall import runner, zygote
from dsec.backends.fncall.runner import Answer, Decoder, Order
from dsec.backends.fncall.tasks import TaskType
from dsec.core.errors import (
    ConflictError,
    HostError,
    Outcome,
    PlatformError,
    ProtocolError,
    SandboxFaultError,
    UnsupportedError,
)
from dsec.core.ids import new_exec_id
from dsec.core.limits import DATA_BYTES_MAX, MIB
from dsec.wire import agent
from dsec.wire.frames import Channel

_PROGRAM: Final = b"/.dsec/dsec-call"
_PATH: Final = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ZYGOTE: Final = b"/.dsec/zygote.py"
_START_S: Final = 60.0  # a large import list from a cold disk
_ANSWER_S: Final = 30.0  # beyond what the call itself may take: clean-up of what it left
_CHECK_S: Final = 10.0  # of one that has nothing to do
_ACK_BYTES: Final = 256 * 1024  # the agent keeps what is not acknowledged, and stops reading at four times as much
_HEADROOM_BYTES: Final = 8 * MIB  # a limit is never set so low that the place itself would not fit


@dataclass(frozen=True, slots=True)
class Launched:
    """A container for calls, with its agent on the line. `remove` ends it for sure, whether or not it is awaited."""

    instance: Instance
    client: AgentClient
    memory_bytes: int  # its limit
    env: dict[str, str]  # of the environment
    remove: Callable[[], asyncio.Task[None]]


class Worker:
    def __init__(self, launched: Launched, stream: ExecStream) -> None:
        self.id = str(launched.instance.id)
        self.started_at = time.monotonic()
        self.idle_since = self.seen_at = self.started_at
        self.calls = 0
        self._launched = launched
        self._stream = stream
        self._decoder = Decoder()
        self._read = self._acked = 0
        self._removal: asyncio.Task[None] | None = None
        self.own_bytes = 0  # of the place itself, before a run
        self._kills = 0  # for memory, so far
        self._bound_bytes = launched.memory_bytes

    @classmethod
    async def start(
        cls, launch: Callable[[], Awaitable[Launched]], type: TaskType, *, program: bytes, preload: tuple[str, ...]
    ) -> Worker:
        """Raises what `launch` raises, UnsupportedError when the environment lacks the interpreter, PlatformError."""
        launched = await launch()
        try:
            async with asyncio.timeout(_START_S):
                return await cls._start(launched, type, program, preload)
        except BaseException as error:
            launched.client.close()
            launched.remove()
            if isinstance(error, TimeoutError):
                raise SandboxFaultError(
                    "a place for calls was not ready in time",
                    sandbox=launched.instance.id,
                    hint="the node is slow, or the environment lacks a part of the interpreter (python3-minimal does)",
                ) from error
            raise

    @classmethod
    async def _start(cls, launched: Launched, type: TaskType, program: bytes, preload: tuple[str, ...]) -> Worker:
        client = launched.client
        await client.write(agent.WriteArgs(path=_PROGRAM, mode=0o500), program)
        if type.warm is not None:
            await client.write(agent.WriteArgs(path=_ZYGOTE, mode=0o400), _zygote())
        stream = await client.exec(
            agent.Exec(id=new_exec_id(), argv=[_PROGRAM], cwd=b"/", user="0", stdin=True, env={b"PATH": _PATH})
        )
        worker = cls(launched, stream)
        ready = (await worker._answer()).ready
        if ready is None or ready.version != runner.VERSION:
            raise ProtocolError("dsec-call is of another version than this node")
        if type.warm is not None:
            words = [type.warm.encode(), b"-IB", _ZYGOTE, *(name.encode() for name in preload)]
            env = worker.environment(type, {})
            order = Order(warm=runner.Warm(argv=words, env=env, wait_ms=int(_START_S * 1000)))
            (answer,) = await worker._ask([order], 1, timeout_s=_START_S)
            if answer.refused is not None:
                raise UnsupportedError(f"no {type.warm} for calls is to be had here: {answer.refused[:500]}")
        worker.weigh()
        return worker

    # -- one call ----------------------------------------------------------------------------------

    async def ask(self, orders: Sequence[Order], *, later: int = 0) -> list[Answer]:
        """Sends all of them in one piece; their answers, in order, but for the last `later`, which `rest` gives.

        Raises SandboxFaultError when one does not come. What became of the orders is not known then, unless its outcome
        says that nothing did.
        """
        runs_s = sum(order.run.wall_ms for order in orders if order.run is not None) / 1000
        return await self._ask(orders, len(orders) - later, timeout_s=runs_s + _ANSWER_S)

    async def rest(self) -> Answer:
        """As `ask`: the next answer to what was asked before."""
        return (await self._ask((), 1, timeout_s=_ANSWER_S))[0]

    async def check(self) -> bool:
        """Whether all is well here, while there is no call: what runs calls answers, and nothing is there of any."""
        self.seen_at = time.monotonic()
        try:
            (answer,) = await self._ask([Order(check=True)], 1, timeout_s=_CHECK_S)
        except SandboxFaultError:
            return False
        return answer.ready is not None

    def done(self) -> None:
        """A call has come to its end here."""
        self.calls += 1
        self.idle_since = self.seen_at = time.monotonic()
        self.weigh()

    def weigh(self) -> None:
        """What the place uses by itself, while nothing runs in it: the next run is measured from there."""
        self.own_bytes = self._launched.instance.memory_now() or 0
        _, self._kills = self._launched.instance.memory_events()
        self._launched.instance.forget_memory_peak()

    async def bound(self, memory_bytes: int | None) -> None:
        """What the next run may use, above what the place itself does. None: as much as there is.

        Raises SandboxFaultError: nothing has been begun with then.
        """
        most = self._launched.memory_bytes
        wanted = most if memory_bytes is None else min(most, max(self.own_bytes, _HEADROOM_BYTES) + memory_bytes)
        if wanted != self._bound_bytes:
            try:
                await self._launched.instance.bound_memory(wanted)
            except HostError as error:
                raise SandboxFaultError(str(error), sandbox=self.id, outcome=Outcome.UNCHANGED) from error
            self._bound_bytes = wanted

    def memory(self) -> tuple[int | None, bool]:
        """Of the run since `weigh`: its peak, if this host tells, and whether anything was killed for memory."""
        peak, kills = self._launched.instance.memory_events()
        return (None if peak is None else max(0, peak - self.own_bytes)), kills > self._kills

    def environment(self, type: TaskType, env: dict[str, str]) -> list[bytes]:
        """`NAME=value` of what a program of a call gets: the environment's, the task type's, the caller's last."""
        merged = {"PATH": _PATH.decode(), "LANG": "C.UTF-8", **self._launched.env, **type.env, **env}
        return [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in merged.items()]

    @property
    def memory_bytes(self) -> int:
        return self._launched.memory_bytes

    @property
    def alive(self) -> bool:
        return self._removal is None and self._launched.client.channel.failure is None and not self._stream.ended

    def close(self) -> asyncio.Task[None]:
        """Idempotent. The container is removed beside; the task ends when it is."""
        if self._removal is None:
            self._launched.client.close()
            self._removal = self._launched.remove()
        return self._removal

    # -- inside ------------------------------------------------------------------------------------

    async def _ask(self, orders: Sequence[Order], answers: int, *, timeout_s: float) -> list[Answer]:
        before = self._stream.stdin_offset
        try:
            async with asyncio.timeout(timeout_s):
                message = b"".join(map(runner.encode, orders))
                for start in range(0, len(message), DATA_BYTES_MAX):
                    await self._stream.send_stdin(message[start : start + DATA_BYTES_MAX])
                return [await self._answer() for _ in range(answers)]
        except (TimeoutError, PlatformError, ConflictError) as error:
            cause = "gave no answer in time" if isinstance(error, TimeoutError) else f"is lost: {error}"
            unsent = bool(orders) and self._stream.stdin_offset == before
            outcome = Outcome.UNCHANGED if unsent else None
            raise SandboxFaultError(f"the place of a call {cause}", sandbox=self.id, outcome=outcome) from error

    async def _answer(self) -> Answer:
        while (answer := self._decoder.next()) is None:
            data = await self._stream.receive()
            if data is None:
                raise SandboxFaultError("dsec-call has ended", sandbox=self.id)
            if data.channel == Channel.OUT:
                self._decoder.feed(data.payload)
                self._read += len(data.payload)
            if self._read - self._acked >= _ACK_BYTES:
                self._acked = self._read
                await self._launched.client.ack(self._stream.started.id, out=self._read, err=0)
        return answer


@cache
def _zygote() -> bytes:
    return inspect.getsource(zygote).encode()
