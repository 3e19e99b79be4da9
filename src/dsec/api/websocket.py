"""One WebSocket as the routes see it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from dsec.api.errors import WEBSOCKET_ERROR, error_line
from dsec.api.request import ClientGoneError, Receive, Send
from dsec.core.limits import WRITE_STALL_S


class Socket:
    """`accept` comes first. Every method raises ClientGoneError once the client has gone."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self.accepted = False

    async def accept(self) -> None:
        if (await self._receive())["type"] != "websocket.connect":
            raise ClientGoneError
        self.accepted = True
        headers = [(b"x-request-id", self._request_id.encode())]
        await self._emit({"type": "websocket.accept", "headers": headers})

    async def recv(self) -> bytes | str:
        message = await self._receive()
        if message["type"] != "websocket.receive":
            raise ClientGoneError
        data: bytes | None = message.get("bytes")
        return data if data is not None else str(message.get("text", ""))

    async def send_bytes(self, data: bytes) -> None:
        await self._emit({"type": "websocket.send", "bytes": data})

    async def send_text(self, text: bytes) -> None:
        await self._emit({"type": "websocket.send", "text": text.decode()})

    async def close(self) -> None:
        await self._emit({"type": "websocket.close", "code": 1000})

    async def fail(self, error: BaseException) -> None:
        """The error as a text message, then close code 4000."""
        await self.send_text(error_line(error))
        await self._emit({"type": "websocket.close", "code": WEBSOCKET_ERROR})

    async def _emit(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await self._send(message)
        except (OSError, TimeoutError, RuntimeError) as error:
            # uvicorn: ClientDisconnected, or a RuntimeError for what is sent after the close.
            raise ClientGoneError from error


async def bridge(inward: Coroutine[Any, Any, None], outward: Coroutine[Any, Any, None]) -> None:
    """Runs both until `outward` is over; a failure of either ends both. `inward` may be over before."""
    tasks = [asyncio.create_task(inward), asyncio.create_task(outward)]
    try:
        pending: set[asyncio.Task[None]] = set(tasks)
        while tasks[1] in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
