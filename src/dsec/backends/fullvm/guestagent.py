"""qemu-guest-agent, as far as it is used: whether the system is up, and its time (QEMU's qga/qapi-schema)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from dsec.backends.vm.qmp import MonitorError, connect_socket
from dsec.core.errors import InvalidArgumentError
from dsec.wire.codec import from_json, to_json

_LINE_BYTES_MAX: Final = 64 * 1024
_LINES_PASSED_MAX: Final = 64  # half an answer may have waited there since the template was saved
_CONNECT_S: Final = 10.0
_AGAIN_S: Final = 1.0


class GuestAgent:
    """What answers is a guest: nothing of it is believed beyond its form."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def wait_until_up(self, *, timeout_s: float) -> None:
        """Raises TimeoutError, MonitorError."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self.sync(timeout_s=_AGAIN_S)
                except TimeoutError:
                    continue
                return

    async def sync(self, *, timeout_s: float) -> None:
        """What is read next is the answer to what is asked next."""
        token = secrets.randbits(31)
        async with asyncio.timeout(timeout_s):
            # The byte ends whatever it has half read.
            self._writer.write(b"\xff" + to_json({"execute": "guest-sync", "arguments": {"id": token}}) + b"\n")
            await self._writer.drain()
            for _ in range(_LINES_PASSED_MAX):
                if (await self._answer()).get("return") == token:
                    return
        raise MonitorError("the guest agent says much, and not what it is asked for")

    async def set_time(self, wall_s: float, *, timeout_s: float) -> None:
        """Raises TimeoutError, MonitorError."""
        await self.sync(timeout_s=timeout_s)
        command = {"execute": "guest-set-time", "arguments": {"time": int(wall_s * 1e9)}}
        async with asyncio.timeout(timeout_s):
            self._writer.write(to_json(command) + b"\n")
            await self._writer.drain()
            if "return" not in await self._answer():
                raise MonitorError("the guest agent does not set the time")

    async def _answer(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except (ValueError, OSError) as error:
            raise MonitorError(f"the guest agent's port fails: {error}") from error
        if not line:
            raise MonitorError("the machine has ended")
        try:
            return from_json(line.lstrip(b"\xff"), dict)
        except InvalidArgumentError:
            return {}


@asynccontextmanager
async def guest_agent(path: Path, *, owner: int) -> AsyncIterator[GuestAgent]:
    """Raises MonitorError."""
    connection = await connect_socket(path, timeout_s=_CONNECT_S, owner=owner)
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_BYTES_MAX)
    try:
        yield GuestAgent(reader, writer)
    finally:
        writer.transport.abort()
