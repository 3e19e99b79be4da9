"""Screens of full machines, and the images that these begin as: shared by node, API, SDK and CLI."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError

BUTTONS = ("left", "middle", "right")
SIDE_MAX = 16_384  # of a screen, in pixels
WHEEL_MAX = 100  # clicks of a wheel by one action


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    POINTS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.POINTS:
            if not 0 <= getattr(self, name) < SIDE_MAX:
                raise InvalidArgumentError(f"{name} must be between 0 and {SIDE_MAX - 1}, in pixels")
        if (button := getattr(self, "button", None)) is not None and button not in BUTTONS:
            raise InvalidArgumentError(f"there is no button {button[:20]!r}", hint=", ".join(BUTTONS))


class Move(_Action, frozen=True, tag="move"):
    POINTS = ("x", "y")
    x: int
    y: int


class Click(_Action, frozen=True, tag="click"):
    POINTS = ("x", "y")
    x: int
    y: int
    button: str = "left"  # left | middle | right
    count: int = 1  # 2: a double click

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.count <= 3:
            raise InvalidArgumentError("count must be between 1 and 3")


class Drag(_Action, frozen=True, tag="drag"):
    POINTS = ("x", "y", "to_x", "to_y")
    x: int
    y: int
    to_x: int
    to_y: int
    button: str = "left"  # left | middle | right


class Scroll(_Action, frozen=True, tag="scroll"):
    """Clicks of the wheel, where the pointer is: down and right are positive."""

    dx: int = 0
    dy: int = 0

    def __post_init__(self) -> None:
        if not max(abs(self.dx), abs(self.dy)) <= WHEEL_MAX:
            raise LimitError(f"a wheel is turned by at most {WHEEL_MAX} clicks at once")


class TypeText(_Action, frozen=True, tag="type"):
    text: str  # what a US keyboard has, with tabs and newlines

    def __post_init__(self) -> None:
        if len(self.text.encode("utf-8", "surrogatepass")) > limits.SCREEN_TEXT_BYTES_MAX:
            raise LimitError(f"at most {limits.SCREEN_TEXT_BYTES_MAX} bytes are typed at once")


class PressKey(_Action, frozen=True, tag="key"):
    key: str  # such as "enter", "f5", "ctrl+alt+t"

    def __post_init__(self) -> None:
        if not 1 <= len(self.key) <= 100:
            raise InvalidArgumentError("a key has a name, such as 'enter' or 'ctrl+l'")


Action = Move | Click | Drag | Scroll | TypeText | PressKey


class ScreenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Done in this order; what is wrong with any of them is told before the first."""

    actions: list[Action]

    def __post_init__(self) -> None:
        if not 1 <= len(self.actions) <= limits.SCREEN_ACTIONS_MAX:
            raise LimitError(f"a request has between 1 and {limits.SCREEN_ACTIONS_MAX} actions")
        if sum(len(a.text) for a in self.actions if isinstance(a, TypeText)) > limits.SCREEN_TEXT_BYTES_MAX:
            raise LimitError(f"at most {limits.SCREEN_TEXT_BYTES_MAX} bytes are typed by one request")


class ScreenInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    request: ScreenRequest


class ScreenSize(msgspec.Struct, frozen=True):
    """In pixels."""

    width: int
    height: int


class Picture(msgspec.Struct, frozen=True):
    png: bytes
    size: ScreenSize
