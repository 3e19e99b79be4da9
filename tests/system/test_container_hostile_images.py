"""Images made to trip whoever starts them: shells that are none, preloaded libraries, deep and wide trees."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError, LaunchError
from dsec.sdk.client import AsyncClient
from dsec.wire.environments import DirectorySource
from tests.system.container_images import make_root
from tests.system.container_place import Place

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root", python=False)


async def build(client: AsyncClient, root: Path) -> str:
    name = f"hostile-{os.urandom(4).hex()}"
    await client.environments.build(name, DirectorySource(path=str(root)))
    return name


def _text(shell: Path) -> None:
    shell.write_text("no program\n")
    shell.chmod(0o755)


def _own_interpreter(shell: Path) -> None:
    shell.write_text("#!/bin/sh\n")
    shell.chmod(0o755)


def _loop(shell: Path) -> None:
    shell.symlink_to("sh")


SHELLS: dict[str, tuple[Callable[[Path], object], type[Exception] | int]] = {
    "text": (_text, InvalidArgumentError),
    "its own interpreter": (_own_interpreter, InvalidArgumentError),
    "loop": (_loop, InvalidArgumentError),
    "directory": (Path.mkdir, InvalidArgumentError),
    "fifo": (os.mkfifo, InvalidArgumentError),
    "something else": (lambda shell: shutil.copy2("/bin/false", shell), 1),
}


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_shell_that_is_none_fails_commands_and_nothing_else(
    node: tuple[Place, AsyncClient], root: Path, shell: str
) -> None:
    place, client = node
    plant, expected = SHELLS[shell]
    (root / "bin/bash").unlink()
    (root / "bin/sh").unlink()
    plant(root / "bin/sh")
    name = await build(client, root)
    await (await client.create(name)).destroy()  # its layer stays mounted
    async with place.no_leaks(), await client.create(name) as sandbox:
        if isinstance(expected, int):
            assert (await sandbox.exec("echo x")).exit_code == expected
        else:
            with pytest.raises(expected):
                await sandbox.exec("echo x")
        assert (await sandbox.exec(["cat", "/proc/self/comm"])).stdout == "cat\n"
        await sandbox.files.write("/f", b"x")


async def test_a_library_that_is_loaded_into_every_program_is_not_loaded_into_ours(
    node: tuple[Place, AsyncClient], root: Path
) -> None:
    _, client = node
    (root / "etc/ld.so.preload").write_text("/evil.so\n")
    (root / "evil.so").write_bytes(b"\x7fELF" + os.urandom(500))
    async with await client.create(await build(client, root)) as sandbox:
        result = await sandbox.exec(["cat", "/proc/self/comm"])
        await sandbox.files.write("/f", b"x")
        assert await sandbox.files.read_bytes("/f") == b"x"

    assert result.stdout == "cat\n"
    assert "evil.so" in result.stderr


async def test_a_tree_of_two_hundred_directories_is_built_used_carried_and_removed(
    node: tuple[Place, AsyncClient], root: Path, tmp_path: Path
) -> None:
    place, client = node
    deep = "/d" * 200
    (root / deep.lstrip("/")).mkdir(parents=True)
    (root / deep.lstrip("/") / "f").write_text("bottom")
    name = await build(client, root)
    await (await client.create(name)).destroy()  # its layer stays mounted
    async with place.no_leaks(), await client.create(name) as sandbox:
        assert (await sandbox.files.read(f"{deep}/f")) == "bottom"
        assert (await sandbox.exec(f"echo more > {deep}/g; ls {deep}")).stdout == "f\ng\n"
        watch = await sandbox.files.watch("/d", recursive=True)
        await watch.close()
        await sandbox.download("/d", tmp_path / "down")
        assert (tmp_path / "down" / ("d/" * 199) / "f").read_text() == "bottom"
        await sandbox.upload(tmp_path / "down", "/up")
        assert (await sandbox.files.read(f"/up{'/d' * 199}/g")) == "more\n"
        await sandbox.files.remove("/d", recursive=True)
        assert not await sandbox.files.exists("/d")


@pytest.mark.parametrize("name", ["etc", "proc", "tmp"])
async def test_what_is_refused_for_a_link_is_named(node: tuple[Place, AsyncClient], root: Path, name: str) -> None:
    """A link in place of /tmp is an image like any other; those that we mount on are told by name."""
    _, client = node
    shutil.rmtree(root / name, ignore_errors=True)
    (root / "elsewhere").mkdir(mode=0o1777)
    (root / name).symlink_to("elsewhere")
    built = await build(client, root)

    if name == "tmp":
        async with await client.create(built) as sandbox:
            assert (await sandbox.exec("echo x > /tmp/f; cat /elsewhere/f")).stdout == "x\n"
        return
    with pytest.raises(LaunchError, match=f"/{name}") as caught:
        await client.create(built)
    assert "symbolic link in their place is not followed" in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
async def test_an_image_of_a_million_files_is_built_listed_and_removed(
    node: tuple[Place, AsyncClient], root: Path
) -> None:
    _, client = node
    for number in range(1_000):
        directory = root / "many" / f"d{number:04}"
        directory.mkdir(parents=True)
        for name in range(1_000):
            os.close(os.open(directory / f"f{name:04}", os.O_CREAT | os.O_WRONLY | os.O_EXCL))
    name = await build(client, root)
    async with await client.create(name) as sandbox:
        assert len(await sandbox.files.list("/many")) == 1_000
        assert len(await sandbox.files.list("/many/d0999")) == 1_000
        await sandbox.files.remove("/many/d0000", recursive=True)
        assert len(await sandbox.files.list("/many")) == 999
    await client.environments.remove(name)
