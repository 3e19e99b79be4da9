"""From a registry to a sandbox and back, by the whole service and its command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.image.environments import EnvironmentStore
from dsec.image.export.run import export_now
from dsec.image.registry.client import DEFAULT_SETTINGS
from dsec.wire.environments import BuildEvent, RegistrySource
from dsec.wire.images import ExportRequest, RegistryTarget
from tests.registries import PASSWORD, registry, write_login
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    with registry(tmp_path / "registry", accounts=True) as found:
        yield found


@pytest.fixture
def place() -> Iterator[Place]:
    with private_place(None) as found:
        yield found


async def dsec(place: Place, *arguments: str) -> str:
    """stdout of a command that must succeed."""
    command = [sys.executable, "-m", "dsec", "--url", place.url, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


async def test_an_image_is_pulled_used_and_pushed_by_commands(
    place: Place, host: str, small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the service, which runs in this process; the worker gets it from there.
    monkeypatch.setenv("DOCKER_CONFIG", str(write_login(tmp_path / "docker", host)))
    image = f"{host}/team/small:1"
    export_now(
        EnvironmentStore(small_store), ExportRequest(name=ENVIRONMENT, target=RegistryTarget(image)), lambda _: None,
        settings=DEFAULT_SETTINGS, environ={"DOCKER_CONFIG": str(tmp_path / "docker")}, data={},
    )  # fmt: skip

    async with served(place) as (_, client):
        assert await dsec(place, "image", "pull", image) == "small:1"
        async with await client.create("small:1") as sb:
            said = await sb.exec(["/usr/bin/python3", "-c", "print(6 * 7)"], check=True)
        pushed = json.loads(await dsec(place, "image", "push", "small:1", f"{host}/team/copy:2", "--json"))
        archive = await dsec(place, "image", "export", "small:1", "--docker-archive", str(tmp_path / "small.tar"))
        events: list[BuildEvent] = []
        back = await client.environments.build("back", RegistrySource(pushed["reference"]), on_event=events.append)
        first = await client.environments.get("small:1")
        await dsec(place, "env", "build", "loaded", "--docker-archive", archive)
        loaded = await client.environments.get("loaded")
        with pytest.raises(Exception, match="there is no image"):
            await client.environments.build("none", RegistrySource(f"{host}/team/none:1"))

    assert said.stdout == "42\n"
    assert back.digest == first.digest == loaded.digest
    assert pushed["reference"] == f"{host}/team/copy@{pushed['digest']}"
    assert not list((place.state / "staging").iterdir())
    assert PASSWORD not in repr(events)
