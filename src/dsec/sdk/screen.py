"""The screen of a full machine, with its keyboard and its mouse."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

from dsec.core.errors import ProtocolError
from dsec.core.limits import SCREEN_BYTES_MAX
from dsec.sdk.ports import AsyncConnection
from dsec.sdk.transport import Transport
from dsec.wire.screens import Action, Click, Drag, Move, PressKey, ScreenRequest, ScreenSize, Scroll, TypeText

_ACT_TIMEOUT_S: Final = 900.0


class AsyncScreen:
    """`sandbox.screen`: what a machine shows, and what a hand at it would do. Points are pixels from the top left.

    Only sandboxes of backend "fullvm" have one: the methods raise UnsupportedError for others.
    """

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox}/screen"

    async def screenshot(self) -> bytes:
        """What it shows now, as PNG."""
        async with self._transport.stream("GET", self._path) as response:
            png = await response.read(SCREEN_BYTES_MAX)
        if len(png) > SCREEN_BYTES_MAX:
            raise ProtocolError("the service sent a picture that is too large")
        return png

    async def size(self) -> ScreenSize:
        """Width and height now; a machine may change them at any time."""
        png = await self.screenshot()
        return ScreenSize(int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big"))

    async def move(self, x: int, y: int) -> None:
        """Moves the pointer."""
        await self.act(Move(x=x, y=y))

    async def click(self, x: int, y: int, *, button: str = "left") -> None:
        """Moves the pointer there, and presses a button: left, middle or right."""
        await self.act(Click(x=x, y=y, button=button))

    async def double_click(self, x: int, y: int, *, button: str = "left") -> None:
        """Clicks twice."""
        await self.act(Click(x=x, y=y, button=button, count=2))

    async def drag(self, x: int, y: int, to_x: int, to_y: int, *, button: str = "left") -> None:
        """Presses a button at the first point, and lets it go at the second."""
        await self.act(Drag(x=x, y=y, to_x=to_x, to_y=to_y, button=button))

    async def scroll(self, dx: int = 0, dy: int = 0) -> None:
        """Turns the wheel where the pointer is, by clicks: right and down are positive."""
        await self.act(Scroll(dx=dx, dy=dy))

    async def type(self, text: str) -> None:
        """Types text as a US keyboard does; newline is Enter. Raises InvalidArgumentError for what that lacks."""
        await self.act(TypeText(text=text))

    async def key(self, key: str) -> None:
        """Presses a key, or several that are held together: "enter", "f5", "ctrl+l", "ctrl+alt+delete"."""
        await self.act(PressKey(key=key))

    async def act(self, *actions: Action) -> ScreenSize:
        """Several of the above in one request, in this order. The screen's size then."""
        return await self._transport.call(
            "POST",
            f"{self._path}/actions",
            ScreenSize,
            body=ScreenRequest(list(actions)),
            long=True,
            timeout_s=_ACT_TIMEOUT_S,
        )

    async def view(self) -> AsyncConnection:
        """A connection that speaks RFB (VNC) without a password, for a viewer."""
        async with AsyncExitStack() as stack:
            socket = await stack.enter_async_context(self._transport.websocket(f"{self._path}/vnc"))
            connection = AsyncConnection(stack, socket, self._transport)
            connection._stack = stack.pop_all()
        return connection
