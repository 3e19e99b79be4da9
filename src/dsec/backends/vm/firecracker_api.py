"""Firecracker's control socket: HTTP/1.1 with JSON (its src/firecracker/swagger/firecracker.yaml). What answers there
runs a hostile guest, so nothing of it is believed beyond its form, and everything is bounded."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

from dsec.backends.vm.qmp import MonitorError, connect_socket
from dsec.core.errors import DeadlineError, InvalidArgumentError
from dsec.core.faults import fault_point
from dsec.wire.codec import from_json, to_json

_HEAD_BYTES_MAX: Final = 16 << 10
_BODY_BYTES_MAX: Final = 1 << 20
_FAULT_SHOWN: Final = 300
_TIMEOUT_S: Final = 30.0


class FaultError(MonitorError):
    """Firecracker refused a request, in words of its own."""

    def __init__(self, request: str, status: int, fault_message: str) -> None:
        super().__init__(f"the monitor refused {request}: {fault_message}")
        self.status = status
        self.fault_message = fault_message


class FirecrackerApi:
    """One connection for each request: there are few, and a monitor that has ended is noticed at once."""

    def __init__(self, path: Path, *, owner: int) -> None:
        self._path = path
        self._owner = owner

    async def get(self, path: str, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """Raises FaultError, MonitorError, or DeadlineError."""
        return await self._request("GET", path, None, timeout_s)

    async def put(self, path: str, body: dict[str, Any], *, timeout_s: float = _TIMEOUT_S) -> None:
        """As `get`; after a DeadlineError it may still be done."""
        await self._request("PUT", path, body, timeout_s)

    async def patch(self, path: str, body: dict[str, Any], *, timeout_s: float = _TIMEOUT_S) -> None:
        """As `put`."""
        await self._request("PATCH", path, body, timeout_s)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        request = f"{method} {path}"
        fault_point(f"vm.firecracker.{request}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(request, body, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the monitor did not answer {request} within {timeout_s:g} s") from error
        except OSError as error:
            raise MonitorError(f"the monitor is gone: {error}") from error

    async def _exchange(self, request: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        connection = await connect_socket(self._path, timeout_s=timeout_s, owner=self._owner)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_HEAD_BYTES_MAX)
        try:
            content = b"" if body is None else to_json(body)
            head = f"{request} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            if body is not None:
                head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            writer.write(f"{head}\r\n".encode() + content)
            await writer.drain()
            return await _answer(request, reader)
        finally:
            writer.transport.abort()


async def _answer(request: str, reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = re.match(r"HTTP/1\.[01] (\d{3})[ \r]", head)
        length = re.search(r"^content-length: *(\d{1,9})\r$", head, re.MULTILINE | re.IGNORECASE)
        count = int(length[1]) if length is not None else 0
        if status is None or count > _BODY_BYTES_MAX:
            raise MonitorError(f"the monitor's answer to {request} is strange")
        content = await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise MonitorError(f"the monitor has ended, and did not answer {request}") from error
    except asyncio.LimitOverrunError as error:
        raise MonitorError(f"the monitor's answer to {request} is too long") from error
    try:
        answer: dict[str, Any] = from_json(content, dict) if content else {}
    except InvalidArgumentError as error:
        raise MonitorError(f"the monitor's answer to {request} is no JSON object") from error
    if not 200 <= int(status[1]) < 300:
        raise FaultError(request, int(status[1]), str(answer.get("fault_message", ""))[:_FAULT_SHOWN])
    return answer
