"""Where a machine has no agent of ours: what the node asks of every agent is answered here, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from dsec.core.errors import ProtocolError
from dsec.wire import agent
from dsec.wire.agent import Op
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import PREAMBLE_BYTES, PREAMBLE_MAGIC, Frame, FrameDecoder, FrameType, encode_frame

# Nothing of these does anything inside.
_ANSWERS: Final[dict[str, Any]] = {
    Op.USAGE: agent.UsageReply(),
    Op.EXECS: agent.ExecList([]),
    Op.SESSIONS: agent.SessionList([]),
    Op.CLOCK: agent.Empty(),
    Op.RESEED: agent.Empty(),
    Op.CLAIM: agent.Empty(),
    Op.FREEZE_PREPARE: agent.Empty(),
}
_REFUSAL: Final = "this machine has no agent: it is used by its screen (`sb.screen`, `dsec screen`)"


async def connect_absent(
    factory: Callable[[], asyncio.Protocol], *, boot_id: str, on_shutdown: Callable[[], None]
) -> asyncio.Transport:
    """A channel whose other end is in this process."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    try:
        await loop.create_unix_connection(lambda: AbsentAgent(boot_id, on_shutdown), sock=far)
        transport, _ = await loop.create_unix_connection(factory, sock=near)
    except BaseException:
        near.close()
        far.close()
        raise
    return transport


class AbsentAgent(asyncio.Protocol):
    def __init__(self, boot_id: str, on_shutdown: Callable[[], None]) -> None:
        self._boot_id = boot_id
        self._on_shutdown = on_shutdown
        self._transport: asyncio.Transport | None = None
        self._opening: bytearray | None = bytearray()
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            if self._opening is not None:
                data = self._find_preamble(self._opening, data)
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except ProtocolError:
            self._transport.abort()

    def _find_preamble(self, opening: bytearray, data: bytes) -> bytes:
        opening += data
        at = opening.find(PREAMBLE_MAGIC)
        if at < 0:
            del opening[: -len(PREAMBLE_MAGIC)]
            return b""
        if len(opening) - at < PREAMBLE_BYTES:
            return b""
        self._opening = None
        self._write(bytes(opening[at : at + PREAMBLE_BYTES]))
        return bytes(opening[at + PREAMBLE_BYTES :])

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == FrameType.HELLO:
            hello = agent.HelloReply(agent.GENERATION_MAX, "none", self._boot_id)
            self._write(encode_frame(FrameType.HELLO, 0, pack(hello)))
        elif frame.type == FrameType.REQ:
            self._on_request(frame.stream, unpack(frame.body, agent.Request).op)

    def _on_request(self, stream: int, op: str) -> None:
        if op == Op.SHUTDOWN:
            self._reply(stream, agent.Empty())
            self._on_shutdown()
        elif (answer := _ANSWERS.get(op)) is not None:
            self._reply(stream, answer)
        else:
            refused = agent.AgentError("unknown_op", _REFUSAL)
            self._write(encode_frame(FrameType.ERR, stream, pack(refused)))

    def _reply(self, stream: int, record: Any) -> None:
        self._write(encode_frame(FrameType.RES, stream, pack(record)))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)
