"""What a machine says while it boots takes no room, however much it is, and its end is kept."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from dsec.backends.vm.console import BootConsole


async def say(path: Path, text: str) -> None:
    saying = await asyncio.create_subprocess_exec("sh", "-c", f"{{ {text}; }} > {path}")
    assert await saying.wait() == 0


async def test_it_may_say_as_much_as_it_likes(tmp_path: Path) -> None:
    with BootConsole(tmp_path / "console", owner=os.getuid()) as console:
        await say(console.path, "head -c 20000000 /dev/zero | tr '\\0' x; echo; echo the end")

        found = console.path.stat()
        assert (stat.S_ISFIFO(found.st_mode), found.st_blocks) == (True, 0)
        said = console.last_words()
        assert said.startswith("; console: xxx")
        assert said.endswith("\nthe end")
        assert len(said) < 3_000

    assert list(tmp_path.iterdir()) == []


async def test_nothing_said_is_nothing_told(tmp_path: Path) -> None:
    with BootConsole(tmp_path / "console", owner=os.getuid()) as console:
        assert console.last_words() == ""


async def test_one_that_has_ended_is_not_looked_at_again(tmp_path: Path) -> None:
    with BootConsole(tmp_path / "console", owner=os.getuid()) as console:
        await say(console.path, "echo once")
        looked = 0
        read = console._read

        def count() -> bool:
            nonlocal looked
            looked += 1
            return read()

        console._read = count  # type: ignore[method-assign]
        for _ in range(20):
            await asyncio.sleep(0)

        assert looked == 0
        assert console.last_words() == "; console: once"
