"""`dsec screen`: what a full machine shows, and a hand at its keyboard and mouse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.console import Json, client, find, put_json, run_async, say, settings
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.screens import Action

app = typer.Typer(help="The screen, the keyboard and the mouse of a full machine.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="SANDBOX", help="Its id or name.", show_default=False)]
X = Annotated[int, typer.Argument(metavar="X", help="Pixels from the left.", show_default=False)]
Y = Annotated[int, typer.Argument(metavar="Y", help="Pixels from the top.", show_default=False)]
Button = Annotated[str, typer.Option(metavar="NAME", help="left, middle or right.")]


def shot(
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Of the picture, a PNG; - for standard output.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Take a picture of the screen."""

    async def work() -> None:
        import sys

        async with client() as c:
            png = await (await find(c, name)).screen.screenshot()
        if str(file) == "-":
            sys.stdout.buffer.write(png)
            return
        file.write_bytes(png)
        if settings.json:
            put_json({"file": str(file), "bytes": len(png)})
        else:
            say(f"{file}: {len(png)} bytes")

    run_async(work())


def _act(name: str, *actions: Action) -> None:
    async def work() -> None:
        async with client() as c:
            size = await (await find(c, name)).screen.act(*actions)
        if settings.json:
            put_json(size)

    run_async(work())


def move(name: Name, x: X, y: Y, json: Json = False) -> None:
    """Move the pointer."""
    from dsec.wire.screens import Move

    _act(name, Move(x=x, y=y))


def click(
    name: Name,
    x: X,
    y: Y,
    button: Button = "left",
    double: Annotated[bool, typer.Option("--double", help="Twice.")] = False,
    json: Json = False,
) -> None:
    """Move the pointer there, and press a button."""
    from dsec.wire.screens import Click

    _act(name, Click(x=x, y=y, button=button, count=2 if double else 1))


def drag(
    name: Name,
    x: X,
    y: Y,
    to_x: Annotated[int, typer.Argument(metavar="TO_X", help="Where the button is let go.", show_default=False)],
    to_y: Annotated[int, typer.Argument(metavar="TO_Y", help="Where the button is let go.", show_default=False)],
    button: Button = "left",
    json: Json = False,
) -> None:
    """Press a button at one point, and let it go at another."""
    from dsec.wire.screens import Drag

    _act(name, Drag(x=x, y=y, to_x=to_x, to_y=to_y, button=button))


def scroll(
    name: Name,
    down: Annotated[int, typer.Argument(metavar="CLICKS", help="Down; negative: up.", show_default=False)],
    right: Annotated[int, typer.Option(metavar="CLICKS", help="Right; negative: left.")] = 0,
    json: Json = False,
) -> None:
    """Turn the wheel where the pointer is."""
    from dsec.wire.screens import Scroll

    _act(name, Scroll(dx=right, dy=down))


def type_(
    name: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What a US keyboard has.", show_default=False)],
    enter: Annotated[bool, typer.Option("--enter", help="Press Enter after it.")] = False,
    json: Json = False,
) -> None:
    """Type text."""
    from dsec.wire.screens import TypeText

    _act(name, TypeText(text=text + "\n" if enter else text))


def key(
    name: Name,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Such as enter, f5, ctrl+l.", show_default=False)],
    json: Json = False,
) -> None:
    """Press keys, one after the other."""
    from dsec.wire.screens import PressKey

    _act(name, *[PressKey(key=one) for one in keys])


command(app, shot, of="screen")
command(app, move, of="screen")
command(app, click, of="screen")
command(app, drag, of="screen")
command(app, scroll, of="screen")
command(app, type_, "type", of="screen")
command(app, key, of="screen")
