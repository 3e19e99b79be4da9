"""What a hand at a machine does, as the monitor is told; and what a monitor shows, which is not believed."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fullvm.screen import MachineScreen, check_inside, size_of, steps_of
from dsec.core.errors import HostError, InvalidArgumentError, LimitError, SandboxFaultError
from dsec.core.limits import SCREEN_BYTES_MAX
from dsec.testing.waiting import eventually
from dsec.wire.screens import (
    SIDE_MAX,
    Action,
    Click,
    Drag,
    Move,
    PressKey,
    ScreenRequest,
    ScreenSize,
    Scroll,
    TypeText,
)

SIZE = ScreenSize(800, 600)


def png(width: int = 800, height: int = 600) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(20)


def flat(action: Action, size: ScreenSize = SIZE) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for step in steps_of(action, size):
        for event in step:
            data = event["data"]
            match event["type"]:
                case "abs":
                    found.append((data["axis"], data["value"]))
                case "btn":
                    found.append((data["button"], data["down"]))
                case "key":
                    found.append((data["key"]["data"], data["down"]))
    return found


def test_text_is_pressed_and_let_go_key_by_key() -> None:
    assert flat(TypeText(text="aB")) == [
        ("a", True),
        ("a", False),
        ("shift", True),
        ("b", True),
        ("b", False),
        ("shift", False),
    ]


def test_keys_that_are_held_are_let_go_in_reverse() -> None:
    assert flat(PressKey(key="ctrl+alt+t")) == [
        ("ctrl", True),
        ("alt", True),
        ("t", True),
        ("t", False),
        ("alt", False),
        ("ctrl", False),
    ]


@pytest.mark.parametrize("side", [1, 2, 3, 799, 800, 1280, 16_384])
def test_every_pixel_can_be_pointed_at(side: int) -> None:
    """As a guest computes it: the value on the tablet's scale of 32768, times the side."""
    for at in {0, side // 3, side // 2, side - 1}:
        values = dict(flat(Move(x=at, y=0), ScreenSize(side, side)))
        assert 0 <= values["x"] <= 0x7FFF
        assert values["x"] * side // 0x8000 == at


def test_a_double_click_is_two_at_one_place() -> None:
    events = flat(Click(x=1, y=2, button="right", count=2))

    assert [event[0] for event in events] == ["x", "y", "right", "right", "right", "right"]
    assert [event[1] for event in events[2:]] == [True, False, True, False]


def test_what_is_dragged_moves_while_the_button_is_down() -> None:
    events = flat(Drag(x=0, y=0, to_x=799, to_y=0))

    down, up = events.index(("left", True)), events.index(("left", False))
    places = [value for axis, value in events[down:up] if axis == "x"]
    assert places == sorted(places)
    assert len(set(places)) > 3
    assert flat(Move(x=799, y=0))[0] == ("x", places[-1])


def test_a_wheel_turns_both_ways() -> None:
    assert flat(Scroll(dy=1)) == [("wheel-down", True), ("wheel-down", False)]
    assert flat(Scroll(dy=-2, dx=1)) == [
        *[("wheel-up", True), ("wheel-up", False)] * 2,
        ("wheel-right", True),
        ("wheel-right", False),
    ]


@pytest.mark.parametrize("action", [Move(x=800, y=0), Click(x=0, y=600), Drag(x=0, y=0, to_x=0, to_y=9_999)])
def test_what_lies_outside_of_the_screen_is_refused(action: Action) -> None:
    with pytest.raises(InvalidArgumentError, match="800x600"):
        check_inside(action, SIZE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Move(x=-1, y=0),
        lambda: Move(x=0, y=SIDE_MAX),
        lambda: Click(x=0, y=0, button="fourth"),
        lambda: Click(x=0, y=0, count=0),
        lambda: Scroll(dy=10_000),
        lambda: TypeText(text="x" * 5_000),
        lambda: PressKey(key=""),
        lambda: ScreenRequest([]),
        lambda: ScreenRequest([TypeText(text="x" * 3_000)] * 2),
        lambda: ScreenRequest([Move(x=0, y=0)] * 2_000),
    ],
)
def test_what_is_out_of_bounds_is_no_action(make: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


@pytest.mark.parametrize(
    "picture",
    [
        b"",
        b"GIF89a" + bytes(100),
        png()[:20],
        png(0, 600),
        png(SIDE_MAX + 1, 1),
        png().replace(b"IHDR", b"IDAT"),
        png() + bytes(SCREEN_BYTES_MAX),
    ],
)
def test_what_is_no_picture_is_not_handed_on(picture: bytes) -> None:
    with pytest.raises(HostError):
        size_of(picture)


class MonitorWithScreen:
    """Writes a picture where it is told to, and notes what is pressed."""

    def __init__(self, picture: bytes) -> None:
        self.picture = picture
        self.events: list[Any] = []

    async def write_to(self, descriptor: int, command: str, arguments: dict[str, Any], *, timeout_s: float) -> None:
        assert (command, arguments) == ("screendump", {"format": "png"})
        os.write(descriptor, self.picture)

    async def execute(self, command: str, arguments: dict[str, Any]) -> None:
        assert command == "input-send-event"
        self.events += arguments["events"]


def screen_of(monitor: MonitorWithScreen, sockets: Path) -> MachineScreen:
    async def control() -> Any:
        return monitor

    return MachineScreen(control, sockets, owner=0, sandbox="sbx_n_1")


async def test_a_picture_is_what_the_monitor_wrote(tmp_path: Path) -> None:
    monitor = MonitorWithScreen(png(1280, 800))

    picture = await screen_of(monitor, tmp_path).picture()

    assert picture.png == monitor.picture
    assert picture.size == ScreenSize(1280, 800)


@pytest.mark.parametrize(
    "wrong", [Click(x=5_000, y=0), TypeText(text="schön"), PressKey(key="hyper+a")], ids=["place", "text", "key"]
)
async def test_nothing_is_done_when_one_action_cannot_be(tmp_path: Path, wrong: Action) -> None:
    monitor = MonitorWithScreen(png())

    with pytest.raises(InvalidArgumentError):
        await screen_of(monitor, tmp_path).act(ScreenRequest([PressKey(key="a"), wrong]))

    assert monitor.events == []


async def test_a_request_takes_minutes_at_most(tmp_path: Path) -> None:
    monitor = MonitorWithScreen(png())

    with pytest.raises(LimitError):
        await screen_of(monitor, tmp_path).act(ScreenRequest([Scroll(dx=100, dy=100)] * 200))

    assert monitor.events == []


async def test_who_gives_up_halfway_leaves_no_key_down(tmp_path: Path) -> None:
    monitor = MonitorWithScreen(png())
    task = asyncio.create_task(screen_of(monitor, tmp_path).act(ScreenRequest([PressKey(key="ctrl+alt+t")])))
    await eventually(lambda: len(monitor.events) >= 2)

    task.cancel()
    await asyncio.wait([task])

    last = {event["data"]["key"]["data"]: event["data"]["down"] for event in monitor.events}
    assert {"ctrl", "alt"} <= set(last)
    assert not any(last.values())


async def test_two_that_type_at_once_do_not_mix(tmp_path: Path) -> None:
    monitor = MonitorWithScreen(png())
    screen = screen_of(monitor, tmp_path)

    await asyncio.gather(*(screen.act(ScreenRequest([TypeText(text=letter * 3)])) for letter in "ab"))

    typed = "".join(event["data"]["key"]["data"] for event in monitor.events if event["data"]["down"])
    assert typed in ("aaabbb", "bbbaaa")


async def test_a_screen_that_cannot_be_reached_is_the_sandbox_s_fault(tmp_path: Path) -> None:
    with pytest.raises(SandboxFaultError):
        await screen_of(MonitorWithScreen(png()), tmp_path).view(asyncio.Protocol)
