"""A running command: its output as it comes, its stdin, signals, and its result."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from dsec.core import limits
from dsec.core.errors import ConflictError, DeadlineError, InvalidArgumentError, Outcome, ProtocolError
from dsec.sdk.output import Ended, Offsets, follow_output
from dsec.sdk.requests import as_bytes
from dsec.sdk.results import Chunk, Decoder, ExecResult, Tape, result_of
from dsec.sdk.transport import Transport
from dsec.wire.frames import Channel, Data
from dsec.wire.records import ExecInfo, Gap, SignalRequest, StdinAnswer, TtySize

_STDIN_PIECE_BYTES: Final = 256 << 10
_STDIN_TIMEOUT_S: Final = 86_400.0  # a process that does not read makes the writer wait


class AsyncProcess:
    """One exec of a sandbox. It goes on when this object, or the connection, is lost; `attach` finds it again.

    Iterating gives `Chunk`s of output until the end; `wait()` gives the ExecResult. Both may be done, in any order.
    """

    def __init__(
        self,
        transport: Transport,
        sandbox: str,
        exec_id: str,
        *,
        offsets: Offsets | None = None,
        record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
        stdin_offset: int | None = 0,
    ) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._id = exec_id
        self._path = f"/sandboxes/{sandbox}/execs/{exec_id}"
        self._start = offsets or Offsets()
        self._out = Tape(Channel.OUT, start=self._start.out, bytes_max=record_bytes_max)
        self._err = Tape(Channel.ERR, start=self._start.err, bytes_max=record_bytes_max)
        self._ended: ExecInfo | None = None
        self._stdin_offset = stdin_offset  # None: not known yet, the service is asked
        self._stdin_lock = asyncio.Lock()

    @property
    def id(self) -> str:
        """The exec's id: with it, any client may attach."""
        return self._id

    @property
    def sandbox_id(self) -> str:
        """Of the sandbox that it runs in."""
        return self._sandbox

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id} of {self._sandbox}>"

    # ---- output and end ----

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self.output()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def output(self, *, follow: bool = True) -> AsyncGenerator[Chunk, None]:
        """Its output from the beginning, until its end; without `follow` what is on record now."""
        decoder = Decoder()
        async with aclosing(self._follow(self._start.copy(), follow=follow)) as items:
            async for item in items:
                if isinstance(item, Data):
                    yield decoder.chunk(item.channel, item.offset, item.payload)
                elif isinstance(item, Gap) and (rest := decoder.broken(item.channel, item.start)):
                    yield rest
        for channel in (Channel.OUT, Channel.ERR):
            if rest := decoder.broken(channel, self._tape(channel).end):
                yield rest

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """The result, once the command has ended. Raises DeadlineError after `timeout_s`; the command then goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._collect()
        except TimeoutError as error:
            raise DeadlineError(
                f"exec {self._id} has not ended within {timeout_s:g} s",
                outcome=Outcome.UNCHANGED,
                sandbox=self._sandbox,
                exec=self._id,
                hint="it goes on; wait again, or kill() it",
            ) from error

    async def _collect(self) -> ExecResult:
        while not self._complete():
            async with aclosing(self._follow(Offsets(self._out.end, self._err.end))) as items:
                async for _ in items:
                    pass
            if self._ended is None:
                self._ended = await self.info()
            if not self._complete():
                # The stream is over: what it did not give is not to be had.
                self._out.skip(self._ended.out_bytes)
                self._err.skip(self._ended.err_bytes)
        return self._result()

    async def _follow(self, at: Offsets, *, follow: bool = True) -> AsyncGenerator[Data | Gap | Ended, None]:
        """Output from `at` on, kept for the result as it passes."""
        async with aclosing(follow_output(self._transport, self._path, at, follow=follow)) as items:
            async for item in items:
                if isinstance(item, Ended):
                    # Without `follow` the record may end before the exec does.
                    self._ended = item.info if item.info is not None and item.info.state == "ended" else None
                elif isinstance(item, Gap):
                    self._tape(item.channel).skip(item.end)
                else:
                    self._tape(item.channel).add(item.offset, item.payload)
                yield item

    def _complete(self) -> bool:
        ended = self._ended
        return ended is not None and self._out.end >= ended.out_bytes and self._err.end >= ended.err_bytes

    def _result(self) -> ExecResult:
        if self._ended is None:
            raise ProtocolError(f"the service does not say how exec {self._id} ended")
        gaps = self._out.all_gaps() + self._err.all_gaps()
        return result_of(self._ended, self._out.data(), self._err.data(), gaps)

    def _tape(self, channel: int) -> Tape:
        return self._out if channel == Channel.OUT else self._err

    def _take_inline(self, info: ExecInfo, out: bytes | None, err: bytes | None) -> ExecResult | None:
        """The result from an answer that carries the whole of the output, None when it does not."""
        if info.state != "ended" or len(out or b"") != info.out_bytes or len(err or b"") != info.err_bytes:
            return None
        self._ended = info
        self._out.add(0, out or b"")
        self._err.add(0, err or b"")
        return self._result()

    async def info(self) -> ExecInfo:
        """The state of the command now."""
        return await self._transport.call("GET", self._path, ExecInfo)

    # ---- stdin ----

    async def write(self, data: bytes | str) -> None:
        """Writes all of `data` to the command's stdin; waits while the command does not read.

        Needs an exec that was started with `stdin=True` or a terminal. Text is sent as UTF-8.
        """
        raw = as_bytes(data, "data")
        async with self._stdin_lock:
            position = 0
            while position < len(raw):
                position += await self._send(raw[position : position + _STDIN_PIECE_BYTES], eof=False)

    async def close_stdin(self) -> None:
        """The command reads end-of-file after what was written. Doing it twice is fine, and after its end too."""
        async with self._stdin_lock:
            try:
                await self._send(b"", eof=True)
            except ConflictError:
                if (await self.info()).state != "ended":
                    raise

    async def _send(self, data: bytes, *, eof: bool) -> int:
        """Sends a piece; gives how much of it was accepted. The offset makes a repeated one harmless."""
        if self._stdin_offset is None:
            self._stdin_offset = (await self._post_stdin({}, b"")).offset
        before = self._stdin_offset
        answer = await self._post_stdin({"offset": before, **({"eof": True} if eof else {})}, data)
        if not before <= answer.offset <= before + len(data) and not (eof and not data):
            raise ProtocolError(f"the service took {answer.offset - before} of {len(data)} bytes of stdin")
        self._stdin_offset = answer.offset
        return answer.offset - before

    async def _post_stdin(self, query: dict[str, Any], data: bytes) -> StdinAnswer:
        return await self._transport.call(
            "POST",
            f"{self._path}/stdin",
            StdinAnswer,
            query=query,
            data=data,
            repeatable=True,
            long=True,
            timeout_s=_STDIN_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )

    # ---- signals ----

    async def signal(self, signal: int | str = signals.SIGTERM, *, tree: bool = False) -> ExecInfo:
        """Sends a signal (number, or name such as "INT") to the command's process group, or to all its processes."""
        body = SignalRequest(signal=signal_number(signal), tree=tree)
        return await self._transport.call("POST", f"{self._path}/signal", ExecInfo, body=body)

    async def kill(self) -> ExecInfo:
        """Kills every process of the command at once. Ended already is fine."""
        return await self._transport.call("POST", f"{self._path}/kill", ExecInfo, repeatable=True)

    async def resize(self, cols: int, rows: int) -> ExecInfo:
        """Tells the command's terminal its new size."""
        body = TtySize(cols, rows)
        return await self._transport.call("POST", f"{self._path}/resize", ExecInfo, body=body, repeatable=True)


def signal_number(signal: int | str) -> int:
    if isinstance(signal, int) and not isinstance(signal, bool):
        return int(signal)
    name = str(signal).upper()
    found = signals.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
    if found is None:
        raise InvalidArgumentError(
            f"there is no signal {str(signal)[:40]!r}", hint='write a number, or "TERM", "INT" …'
        )
    return int(found)
