"""Templates of machines: made once, found by all, and dropped without harm to clones that are being started."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from dsec.backends.vm import templates
from dsec.backends.vm.templates import DISK, RAM, STATE, Template, Templates
from dsec.core.errors import LaunchError
from dsec.testing.waiting import eventually

MADE_OF = {"shape": "small"}


class Builder:
    """Makes templates whose state says which one it is."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self, directory: Path) -> None:
        self.made += 1
        (directory / RAM).write_bytes(b"memory" * 1000)
        (directory / DISK).touch()
        (directory / STATE).write_bytes(b"state %d" % self.made)


@pytest.fixture
def build() -> Builder:
    return Builder()


def of(directory: Path, *, kept_max: int = 4) -> Templates:
    return Templates(directory / "templates", kept_max=kept_max)


async def get(made: Templates, build: Builder, key: str = "key") -> Template:
    return await made.get(key, MADE_OF, build)


def state_of(template: Template) -> bytes:
    return (template.directory / STATE).read_bytes()


async def test_many_who_ask_at_once_get_one_template(tmp_path: Path, build: Builder) -> None:
    made = of(tmp_path)

    found = await asyncio.gather(*(get(made, build) for _ in range(40)))

    assert build.made == 1
    assert {state_of(template) for template in found} == {b"state 1"}


async def test_a_clone_that_fails_takes_its_template_from_nobody_who_starts_from_it(
    tmp_path: Path, build: Builder
) -> None:
    made = of(tmp_path)
    async with made.held(lambda: get(made, build)) as held:
        async with made.held(lambda: get(made, build)):
            made.drop("key")
        assert state_of(held) == b"state 1"
        assert made.keys() == []

        later = asyncio.create_task(get(made, build))
        await eventually(lambda: build.made == 2)
        assert state_of(held) == b"state 1"

    assert state_of(await later) == b"state 2"
    assert [path.name for path in (tmp_path / "templates").iterdir()] == ["key"]


async def test_a_dropped_template_goes_with_the_last_that_started_from_it(tmp_path: Path, build: Builder) -> None:
    made = of(tmp_path)
    async with made.held(lambda: get(made, build)) as held:
        made.drop("key")
        assert held.directory.is_dir()

    assert not held.directory.exists()


async def test_another_node_on_the_same_directory_is_not_disturbed_either(tmp_path: Path, build: Builder) -> None:
    one, other = of(tmp_path), of(tmp_path)
    async with one.held(lambda: get(one, build)) as held:
        await get(other, build)
        other.drop("key")
        other.sweep()
        assert state_of(held) == b"state 1"

    assert not held.directory.exists()
    assert state_of(await get(other, build)) == b"state 2"


async def test_one_that_is_dropped_before_it_is_held_is_made_anew(tmp_path: Path, build: Builder) -> None:
    made = of(tmp_path)

    async def find() -> Template:
        template = await get(made, build)
        if build.made == 1:
            made.drop("key")
        return template

    async with made.held(find) as held:
        assert state_of(held) == b"state 2"


async def test_clones_that_hang_at_their_start_do_not_keep_others_waiting_for_ever(
    tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_LET_GO_S", 0.05)
    made = of(tmp_path)
    async with made.held(lambda: get(made, build)):
        made.drop("key")
        with pytest.raises(LaunchError, match="do not come up"):
            await get(made, build)

    assert state_of(await get(made, build)) == f"state {build.made}".encode()
    assert [path.name for path in (tmp_path / "templates").iterdir()] == ["key"]


async def test_those_that_were_not_used_for_longest_go_first_but_not_from_under_a_start(
    tmp_path: Path, build: Builder
) -> None:
    made = of(tmp_path, kept_max=2)
    async with made.held(lambda: get(made, build, "a")) as oldest:
        os.utime(oldest.directory, (1, 1))
        for key in ("b", "c"):
            await get(made, build, key)
        assert set(made.keys()) == {"b", "c"}
        assert oldest.directory.is_dir()

    assert not oldest.directory.exists()


@pytest.mark.parametrize("name", [RAM, STATE, DISK])
async def test_a_damaged_template_is_noticed_by_the_next_node_and_made_anew(
    tmp_path: Path, build: Builder, name: str
) -> None:
    template = await get(of(tmp_path), build)
    if name == DISK:
        (template.directory / DISK).unlink()
    else:
        with (template.directory / name).open("r+b") as file:
            file.write(b"x")
        os.utime(template.directory / name, (time.time(), time.time() + 5))

    assert state_of(await get(of(tmp_path), build)) == b"state 2"


async def test_what_a_killed_node_was_making_is_removed_and_what_another_makes_is_not(
    tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_BEGUN_S", -1.0)
    made = of(tmp_path)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(directory: Path) -> None:
        begun.set()
        await go_on.wait()
        await build(directory)

    making = asyncio.create_task(made.get("key", MADE_OF, slowly))
    await begun.wait()
    (tmp_path / "templates" / "new-left").mkdir()

    of(tmp_path).sweep()

    assert not (tmp_path / "templates" / "new-left").exists()
    go_on.set()
    assert state_of(await making) == b"state 1"
