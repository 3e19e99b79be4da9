"""A terminal in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self

from dsec.sdk.output import Ended, Offsets
from dsec.sdk.process import AsyncProcess
from dsec.sdk.results import ExecResult
from dsec.wire.records import Gap


class AsyncPty:
    """An interactive command on a terminal. Leaving the `with` block hangs it up (kills what runs on it)."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._at = Offsets()
        self._buffer = bytearray()
        self._output: AsyncGenerator[bytes, None] | None = None
        self._reading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._process.sandbox_id}>"

    @property
    def id(self) -> str:
        """The exec's id: with it, any client may attach."""
        return self._process.id

    async def read(self, max_bytes: int = 65_536) -> bytes:
        """What the terminal shows next, at least one byte; empty once the command has ended."""
        async with self._reading:
            while not self._buffer:
                if self._output is None:
                    self._output = self._pieces()
                try:
                    self._buffer += await anext(self._output)
                except StopAsyncIteration:
                    return b""
                except BaseException:
                    # A cancelled read ends the generator; the next one goes on at the offset reached.
                    self._output = None
                    raise
            piece = bytes(self._buffer[:max_bytes])
            del self._buffer[: len(piece)]
            return piece

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._process._follow(self._at)) as items:
            async for item in items:
                if isinstance(item, Ended):
                    return
                if not isinstance(item, Gap):
                    yield item.payload

    async def write(self, data: bytes | str) -> None:
        """Types `data`. Text is sent as UTF-8; a return key is "\\r" or "\\n"."""
        await self._process.write(data)

    async def resize(self, cols: int, rows: int) -> None:
        """Tells the terminal its new size; what runs on it gets SIGWINCH."""
        await self._process.resize(cols, rows)

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """The result, once the command has ended; all that the terminal showed is in its `stdout`."""
        return await self._process.wait(timeout_s)

    async def kill(self) -> None:
        """Kills what runs on the terminal. Ended already is fine."""
        await self._process.kill()

    async def close(self) -> None:
        """Hangs up: kills what runs on the terminal and stops reading it. Doing it twice is fine."""
        async with self._reading:
            if self._output is not None:
                await self._output.aclose()
        await self._process.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
