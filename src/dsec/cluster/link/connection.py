"""One connection, whichever side: packets in, packets out in fair turns, signs of life, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from dsec.core.errors import DsecError, ProtocolError
from dsec.core.limits import LINK_PING_S, LINK_SILENCE_S, LINK_WRITE_BYTES_HIGH
from dsec.observe.logs import get_logger
from dsec.wire.link import Kind, Packet, PacketDecoder, packet

log = get_logger(__name__)

_FLUSH_BYTES: Final = 256 << 10  # gathered before it is written in this turn of the loop


class Connection(asyncio.Protocol):
    """`made` is called once TLS has been agreed on, `received` for each packet but signs of life; what it raises ends
    the connection. `lost` is called once, at the end of what was made."""

    def __init__(
        self,
        received: Callable[[Packet], None],
        lost: Callable[[str], None],
        made: Callable[[], None] = lambda: None,
    ) -> None:
        self._received = received
        self._lost = lost
        self._made = made
        self._decoder = PacketDecoder()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._flushing = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._turn = asyncio.Lock()
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False

    # -- out ---------------------------------------------------------------------------------------

    def send(self, kind: Kind, id: int, *parts: bytes | memoryview) -> None:
        """At once, however much waits: for what is small, or what somebody waits for to go on."""
        if self.closed:
            return
        pieces = packet(kind, id, *parts)
        self._out += pieces
        self._out_bytes += sum(map(len, pieces))
        if self._out_bytes >= _FLUSH_BYTES:
            self._flush()
        elif not self._flushing:
            # What else is sent in this turn of the loop goes out in the same write.
            self._flushing = True
            self._loop.call_soon(self._flush)

    @property
    def behind(self) -> bool:
        """The other side has not taken what was sent to it."""
        return not self._writable.is_set()

    async def send_in_turn(self, kind: Kind, id: int, *parts: bytes | memoryview) -> None:
        """Waits while the other side is behind; those who wait get their turns in order."""
        if self._writable.is_set() and not self._turn.locked():
            self.send(kind, id, *parts)
            return
        async with self._turn:
            await self._writable.wait()
            self.send(kind, id, *parts)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self._transport is not None:
            out, self._out, self._out_bytes = self._out, [], 0
            self._transport.write(b"".join(out))

    # -- life --------------------------------------------------------------------------------------

    def peer_names(self) -> frozenset[str]:
        """DNS names of the certificate that the other side has shown and that was checked."""
        secured: Any = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        shown: Any = secured.getpeercert() if secured is not None else None
        return frozenset(value for kind, value in (shown or {}).get("subjectAltName", ()) if kind == "DNS")

    def peer(self) -> str:
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{found[0]}:{found[1]}" if found else "?"

    def close(self, why: str) -> None:
        """What was sent goes out first; nothing more comes in."""
        if not self.closed and self._transport is not None:
            self._flush()
            self._transport.close()
            self._end(why)

    def abort(self, why: str) -> None:
        if not self.closed and self._transport is not None:
            self._transport.abort()
            self._end(why)

    # -- of the loop -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=LINK_WRITE_BYTES_HIGH)  # type: ignore[union-attr]
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(LINK_PING_S, self._live)
        self._made()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for found in self._decoder.feed(data):
                if self.closed:
                    return
                if found.kind != Kind.PING:
                    self._received(found)
        except ProtocolError as error:
            log.warning("a connection between API and node broke its rules", peer=self.peer(), error=error.message)
            self.abort(error.message)
        except DsecError as error:
            self.close(error.message)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error is not None and str(error) else "the other side has closed it")

    def _end(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
        self._writable.set()
        self._lost(why)

    def _live(self) -> None:
        if self._loop.time() - self._heard_at > LINK_SILENCE_S:
            self.abort(f"nothing was heard for {LINK_SILENCE_S:g} s")
            return
        self.send(Kind.PING, 0)
        self._timer = self._loop.call_later(LINK_PING_S, self._live)
