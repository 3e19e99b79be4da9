"""Blocks of the guides that need a real node run on one: environments put together, pushed and started, volumes.

What a block names is there, in small; where it names the network, a directory stands for it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from dsec.image.environments import EnvironmentStore
from dsec.image.records import EnvironmentRecord, config_of, record_digest
from dsec.sdk.client import AsyncClient
from dsec.wire.environments import DirectorySource
from tests.style.tree import ROOT
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

_BLOCK: Final = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SERVER: Final = "import socket; server = socket.create_server(('127.0.0.1', 5432))\nwhile True: server.accept()"


def block(page: str, of: str) -> str:
    """The one that has these words."""
    (found,) = [text for text in _BLOCK.findall((ROOT / page).read_text()) if of in text]
    return str(found)


@pytest.fixture
def place(small_store: Path, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "one.jpeg").touch()
    settings = {
        "node": {"datasets": {"imagenet": str(tmp_path / "imagenet")}},
        "container": {"disk": "tmpfs"},
    }
    with private_place(small_store, settings=settings) as place:
        for name in ("base", "debian:12"):
            rename(place, name)
        rename(place, "postgres", ("/usr/bin/python3", "-c"), (_SERVER,))
        yield place


def rename(place: Place, name: str, entrypoint: tuple[str, ...] = (), command: tuple[str, ...] = ()) -> None:
    """The small environment by the name that a block has for one."""
    store = EnvironmentStore(place.state)
    info = msgspec.structs.replace(store.get(ENVIRONMENT), name=name, entrypoint=entrypoint, command=command)
    info = msgspec.structs.replace(info, digest=record_digest(info.layers, config_of(info)))
    store.put(EnvironmentRecord(build_key="", info=info))


def run(place: Place, text: str) -> list[str]:
    command = [sys.executable, "-W", "error", "-c", text]
    environment = {**os.environ, "DSEC_URL": place.url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


async def part(client: AsyncClient, directory: Path, name: str, files: dict[str, str]) -> None:
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(0o755)
    await client.environments.build(name, DirectorySource(str(directory)))


async def test_an_environment_is_built_put_together_and_used(place: Place, tmp_path: Path) -> None:
    build = block("docs/guides/environments.md", "DebianSource").replace(
        'dsec.DebianSource(packages=("bash", "git"))', f"dsec.DirectorySource({str(tmp_path / 'tools')!r})"
    )
    (tmp_path / "tools").mkdir()
    async with served(place) as (_, client):
        said = await asyncio.to_thread(run, place, build)
        again = await asyncio.to_thread(run, place, build)
        await part(client, tmp_path / "repo", "repo:task-1", {"workspace/main.c": "/* TODO */\n"})
        await part(client, tmp_path / "rg", "ripgrep:14", {"usr/bin/rg": '#!/bin/sh\nexec grep -r "$1" "$2"\n'})
        found = await asyncio.to_thread(run, place, block("docs/guides/environments.md", 'workspace="repo:task-1"'))
        left = await client.list()

    assert any(line.startswith("publish") or line.startswith("digest") for line in said)
    assert again == []
    assert found[0].count("digest") == 2  # a layer of the workspace, and one of the toolkit
    assert found[1:] == ["/workspace/main.c:/* TODO */", ""]
    assert left == []


async def test_an_environment_goes_to_a_store_and_comes_from_there(place: Place, tmp_path: Path) -> None:
    rename(place, "tools")
    text = block("docs/guides/environments.md", "StoreSource").replace(
        "s3://bucket/layers", f"file://{tmp_path / 'store'}"
    )
    async with served(place) as (_, client):
        layers = await client.layers.list()
        if not Path("/dev/fuse").exists() or any(layer.kind != "erofs" for layer in layers):
            pytest.skip("this host has no FUSE, or makes no EROFS images")
        fetched = await asyncio.to_thread(run, place, text)
        async with await client.create("tools-there") as sandbox:
            assert (await sandbox.exec("echo $((6 * 7))")).stdout == "42\n"

    assert fetched == ["[0]"]


async def test_the_programs_and_volumes_of_the_guides_run(place: Place) -> None:
    started = block("docs/guides/environments.md", '"postgres"').replace("psql -U postgres -c 'select 1'", "true")
    async with served(place) as (_, client):
        said = await asyncio.to_thread(run, place, f"import dsec\n{started}")
        kept = await asyncio.to_thread(run, place, block("docs/guides/volumes.md", 'size="1GiB"'))
        volumes = await client.volumes.list()

    assert said == ["running"]
    assert kept == ["42", ""]
    assert [volume.name for volume in volumes] == ["imagenet"]


async def test_the_first_block_of_all_runs(place: Place) -> None:
    async with served(place):
        said = await asyncio.to_thread(run, place, block("README.md", "dsec.Sandbox.create"))

    assert said == ["0 hello from /tmp/hello.py", "", "hi from /tmp", ""]


async def test_servers_are_reached_from_outside_and_from_beside(place: Place) -> None:
    waiting = block("docs/guides/ports.md", "/dev/tcp").strip()
    start, _, use = block("docs/guides/ports.md", "http.client").partition("    connection =")
    async with served(place):
        outside = await asyncio.to_thread(run, place, f"{start}    {waiting}\n    connection ={use}")
        beside = await asyncio.to_thread(run, place, block("docs/guides/groups.md", "files:8000"))

    assert outside == ["200"]
    assert beside == ["200", ""]


async def test_what_limits_a_disk_what_datasets_hold_and_what_is_published(place: Place) -> None:
    full = block("docs/guides/volumes.md", "No space left").replace("2GiB", "32MiB").replace("3G", "64M")
    published = f"""
import dsec
with dsec.Sandbox.create("base") as sb:
    sb.files.write("/opt/made", b"here", parents=True)
    snapshot = sb.snapshot()
{block("docs/guides/snapshots.md", "snapshot.publish")}
(made,) = dsec.Client().list()
print(made.exec("cat /opt/made").stdout)
made.destroy()
"""
    async with served(place):
        used = await asyncio.to_thread(run, place, full)
        data = await asyncio.to_thread(run, place, block("docs/guides/volumes.md", "dataset=True"))
        made = await asyncio.to_thread(run, place, published)

    assert 24 << 20 <= int(used[0]) <= 32 << 20
    assert data == ["one.jpeg", ""]
    assert made == ["here"]
