"""The output and input of one exec, as one stream of the channel."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dsec.agent.streams import AgentStream
from dsec.core.errors import ProtocolError
from dsec.wire import agent
from dsec.wire.frames import Channel, Data
from dsec.wire.records import Gap


class ExecStream:
    """An exec that was started or attached to. One task reads it, one may write stdin.

        stream = await client.exec(agent.Exec(id=new_exec_id(), shell=b"make"))
        async for data in stream:          # channel 1 stdout (or terminal), 2 stderr; offsets follow without holes
            record.append(data)
        print(stream.end)

    Taking a chunk is what lets the agent send more; a reader that stops lets the command wait.
    """

    def __init__(self, stream: AgentStream, started: agent.ExecStarted, *, out: int, err: int) -> None:
        self.started = started
        asked = ((Channel.OUT, out, started.out), (Channel.ERR, err, started.err))
        self.gaps: tuple[Gap, ...] = tuple(Gap(int(c), a, s) for c, a, s in asked if s > a)
        """What was asked for and is no longer to be had: acknowledged before."""
        self._stream = stream
        stream.start_sending_at(started.stdin)

    def __aiter__(self) -> AsyncIterator[Data]:
        return self._read()

    async def _read(self) -> AsyncIterator[Data]:
        while (data := await self._stream.receive()) is not None:
            yield data

    async def receive(self) -> Data | None:
        """The next chunk; None after the last, and then `end` is known.

        Raises ConflictError (`detail["code"]` is `superseded`, `detached` or `cancelled`) when the stream went
        elsewhere, UnavailableError or ProtocolError when the channel is lost. The exec goes on in each case.
        """
        return await self._stream.receive()

    @property
    def end(self) -> agent.ExecEnd:
        """How the exec ended. Raises ProtocolError before the stream has ended."""
        ended: agent.ExecEnded | None = self._stream.end
        if ended is None:
            raise ProtocolError("the exec has not ended")
        return ended.end

    @property
    def ended(self) -> bool:
        return self._stream.end is not None

    @property
    def stdin_offset(self) -> int:
        """Bytes of stdin sent in all, by this stream and those of before."""
        return self._stream.sent

    async def send_stdin(self, data: bytes) -> None:
        """Waits until the process has room for all of it. Raises ConflictError when the exec takes no more."""
        await self._stream.send(data, channel=Channel.IN)

    def close_stdin(self) -> None:
        """End-of-file for the process. Idempotent."""
        self._stream.send_end()

    def cancel(self) -> None:
        """Stop reading; the exec goes on. Idempotent."""
        self._stream.cancel()
