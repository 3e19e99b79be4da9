"""The screen, the keyboard and the mouse of one machine, by its monitor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from dsec.backends.fullvm.keys import keys_of, keys_of_text
from dsec.backends.fullvm.machine import VNC
from dsec.backends.vm.qmp import Monitor, MonitorError, connect_socket
from dsec.core.errors import DsecError, HostError, InvalidArgumentError, LimitError, SandboxFaultError
from dsec.core.limits import SCREEN_BYTES_MAX, SCREEN_STEPS_MAX
from dsec.wire.screens import (
    SIDE_MAX,
    Action,
    Click,
    Drag,
    Move,
    Picture,
    PressKey,
    ScreenRequest,
    ScreenSize,
    Scroll,
    TypeText,
)

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_AXIS_MAX: Final = 0x7FFF
# A guest reads one report of a device at a time, and an emulated one slowly: what comes faster is lost.
_BETWEEN_S: Final = 0.03
_DRAG_STEPS: Final = 8
_PICTURE_S: Final = 30.0
_CONNECT_S: Final = 10.0

Step = list[dict[str, Any]]
"""Events of one moment."""


class MachineScreen:
    """`control` gives the monitor's connection."""

    def __init__(self, control: Callable[[], Awaitable[Monitor]], sockets: Path, *, owner: int, sandbox: str) -> None:
        self._control = control
        self._sockets = sockets
        self._owner = owner
        self._sandbox = sandbox
        self._turn = asyncio.Lock()  # one hand at the keyboard

    async def picture(self) -> Picture:
        monitor = await self._control()
        # The monitor is given a file that has no name and is counted as its own memory; it opens none.
        memory = os.memfd_create("picture", os.MFD_CLOEXEC)
        try:
            writable = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                await monitor.write_to(writable, "screendump", {"format": "png"}, timeout_s=_PICTURE_S)
            finally:
                os.close(writable)
            size = os.fstat(memory).st_size
            if size > SCREEN_BYTES_MAX:
                raise HostError("the monitor gave a picture that is too large")
            png = os.pread(memory, size, 0)
        finally:
            os.close(memory)
        return Picture(png, size_of(png))

    async def act(self, request: ScreenRequest) -> ScreenSize:
        async with self._turn:
            size = (await self.picture()).size
            for action in request.actions:
                check_inside(action, size)
            steps = [step for action in request.actions for step in steps_of(action, size)]
            if len(steps) > SCREEN_STEPS_MAX:
                raise LimitError(f"the actions of one request take at most {SCREEN_STEPS_MAX} presses and moves")
            await self._do(steps)
            return size

    async def view(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        try:
            connection = await connect_socket(self._sockets / VNC, timeout_s=_CONNECT_S, owner=self._owner)
        except MonitorError as error:
            raise SandboxFaultError(
                f"the screen of {self._sandbox} cannot be reached: {error}", sandbox=self._sandbox
            ) from error
        transport, _ = await asyncio.get_running_loop().create_unix_connection(factory, sock=connection)
        return transport

    async def _do(self, steps: Sequence[Step]) -> None:
        held: dict[str, dict[str, Any]] = {}
        try:
            monitor = await self._control()
            for events in steps:
                await monitor.execute("input-send-event", {"events": events})
                _note(held, events)
                await asyncio.sleep(_BETWEEN_S)
        except BaseException:
            # Whoever gives up halfway leaves no key down.
            if held:
                with contextlib.suppress(DsecError):
                    await asyncio.shield(self._let_go(list(held.values())))
            raise

    async def _let_go(self, events: Step) -> None:
        await (await self._control()).execute("input-send-event", {"events": events})


def _note(held: dict[str, dict[str, Any]], events: Step) -> None:
    """What is down, as the events that let it go."""
    for event in events:
        if event["type"] == "abs":
            continue
        name = repr(event["data"].get("key") or event["data"].get("button"))
        if event["data"]["down"]:
            held[name] = {"type": event["type"], "data": {**event["data"], "down": False}}
        else:
            held.pop(name, None)


def size_of(png: bytes) -> ScreenSize:
    """As its header says. Raises HostError: it comes from a process that runs a hostile guest."""
    if len(png) < 24 or len(png) > SCREEN_BYTES_MAX or not png.startswith(_PNG) or png[12:16] != b"IHDR":
        raise HostError("the monitor gave what is no picture")
    width, height = struct.unpack_from(">II", png, 16)
    if not (0 < width <= SIDE_MAX and 0 < height <= SIDE_MAX):
        raise HostError("the monitor gave a picture of a strange size")
    return ScreenSize(width, height)


def check_inside(action: Action, size: ScreenSize) -> None:
    """Raises InvalidArgumentError."""
    points: list[tuple[int, int]] = []
    if isinstance(action, Move | Click | Drag):
        points.append((action.x, action.y))
    if isinstance(action, Drag):
        points.append((action.to_x, action.to_y))
    for x, y in points:
        if x >= size.width or y >= size.height:
            raise InvalidArgumentError(f"({x}, {y}) is outside of the screen, which is {size.width}x{size.height}")


def steps_of(action: Action, size: ScreenSize) -> Iterator[Step]:
    """What is sent to the monitor, moment by moment."""
    match action:
        case Move(x=x, y=y):
            return iter([_at(x, y, size)])
        case Click(x=x, y=y, button=button, count=count):
            return iter([_at(x, y, size), *[[_button(button, down)] for _ in range(count) for down in (True, False)]])
        case Drag():
            return iter(_drag(action, size))
        case Scroll(dx=dx, dy=dy):
            return iter([*_wheel(dy, "wheel-down", "wheel-up"), *_wheel(dx, "wheel-right", "wheel-left")])
        case TypeText(text=text):
            return iter([step for keys in keys_of_text(text) for step in _pressed(keys)])
        case PressKey(key=key):
            return iter(_pressed(keys_of(key)))


def _drag(drag: Drag, size: ScreenSize) -> list[Step]:
    """With some places in between: what is dragged in one leap is not seen to move."""
    steps = [_at(drag.x, drag.y, size), [_button(drag.button, True)]]
    for number in range(1, _DRAG_STEPS + 1):
        x = drag.x + (drag.to_x - drag.x) * number // _DRAG_STEPS
        y = drag.y + (drag.to_y - drag.y) * number // _DRAG_STEPS
        steps.append(_at(x, y, size))
    return [*steps, [_button(drag.button, False)]]


def _wheel(count: int, forward: str, back: str) -> list[Step]:
    name = forward if count > 0 else back
    return [[_button(name, down)] for _ in range(abs(count)) for down in (True, False)]


def _pressed(keys: Sequence[str]) -> list[Step]:
    """Held one after the other, let go in reverse."""
    return [*[[_key(key, True)] for key in keys], *[[_key(key, False)] for key in reversed(keys)]]


def _at(x: int, y: int, size: ScreenSize) -> Step:
    """The middle of a pixel, on the tablet's own scale."""
    return [_axis("x", x, size.width), _axis("y", y, size.height)]


def _axis(axis: str, at: int, of: int) -> dict[str, Any]:
    return {"type": "abs", "data": {"axis": axis, "value": min(_AXIS_MAX, (2 * at + 1) * (_AXIS_MAX + 1) // (2 * of))}}


def _button(button: str, down: bool) -> dict[str, Any]:
    return {"type": "btn", "data": {"button": button, "down": down}}


def _key(key: str, down: bool) -> dict[str, Any]:
    return {"type": "key", "data": {"key": {"type": "qcode", "data": key}, "down": down}}
