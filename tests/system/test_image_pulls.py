"""From a registry to a sandbox and back, by the whole service and its command line."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core.errors import EnvironmentNotFoundError, NotFoundError
from dsec.image.environments import EnvironmentStore
from dsec.image.export.run import export_now
from dsec.image.published import push_now
from dsec.image.registry.client import DEFAULT_SETTINGS
from dsec.storage.layers import LayerKind
from dsec.testing.waiting import eventually
from dsec.wire.environments import BuildEvent, PushRequest, RegistrySource, StoreSource
from dsec.wire.images import ExportRequest, RegistryTarget
from tests.registries import PASSWORD, registry, write_login
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root
GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/images.md"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    with registry(tmp_path / "registry", accounts=True) as found:
        yield found


@pytest.fixture
def place() -> Iterator[Place]:
    with private_place(None) as found:
        yield found


@pytest.fixture
def image(host: str, small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """team/small:1 of the registry, and an account for it: the service runs in this process, and its worker below."""
    monkeypatch.setenv("DOCKER_CONFIG", str(write_login(tmp_path / "docker", host)))
    name = f"{host}/team/small:1"
    export_now(
        EnvironmentStore(small_store), ExportRequest(name=ENVIRONMENT, target=RegistryTarget(name)), lambda _: None,
        settings=DEFAULT_SETTINGS, environ={"DOCKER_CONFIG": str(tmp_path / "docker")}, data={},
    )  # fmt: skip
    return name


async def test_the_commands_of_the_guide_work(place: Place, host: str, image: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```sh registry\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    environment = {
        **os.environ,
        "DSEC_URL": place.url,
        "REGISTRY": host,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    async with served(place) as (_, client):
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-euc", script], capture_output=True, timeout=200, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr.decode()
        digests = {info.name: info.digest for info in await client.environments.list()}

    assert sorted(digests) == ["again", "loaded", "pinned", "small:1"]
    assert len(set(digests.values())) == 1
    assert b"\n42\n" in done.stdout


async def test_errors_pushes_and_events_of_the_service(place: Place, host: str, image: str) -> None:
    events: list[BuildEvent] = []
    async with served(place) as (_, client):
        first = await client.environments.build("one", RegistrySource(image), on_event=events.append)
        pushed = await client.environments.export("one", RegistryTarget(f"{host}/team/x"), on_event=events.append)
        again = await client.environments.export("one", RegistryTarget(f"{host}/team/x"))
        with pytest.raises(NotFoundError, match="there is no image"):
            await client.environments.build("none", RegistrySource(f"{host}/team/none:1"))
        with pytest.raises(EnvironmentNotFoundError):
            await client.environments.export("none", RegistryTarget(f"{host}/team/x"))

    assert pushed.reference == f"{host}/team/x@{pushed.digest}"
    assert (again.digest, again.sent_bytes) == (pushed.digest, 0)
    assert {event.stage for event in events} >= {"fetch", "stage", "pack", "push", "publish"}
    await eventually(lambda: not list((place.state / "staging").iterdir()))
    assert PASSWORD not in repr((events, first))


@pytest.mark.slow
async def test_an_environment_whose_content_is_in_a_store_is_pushed_to_a_registry(
    place: Place, host: str, image: str, small_store: Path, tmp_path: Path
) -> None:
    store = EnvironmentStore(small_store)
    if any(store.layers.get(digest).kind is not LayerKind.EROFS for digest in store.layers.digests()):
        pytest.skip("this host makes no EROFS images")
    url = f"file://{tmp_path / 'store'}"
    push_now(store, PushRequest(name=ENVIRONMENT, store=url), lambda _: None)

    async with served(place) as (_, client):
        await client.environments.build("remote", StoreSource(url=url, environment=ENVIRONMENT))
        before = (await client.environments.stats("remote")).layers[0]
        await client.environments.export("remote", RegistryTarget(f"{host}/team/remote"))
        back = await client.environments.build("back", RegistrySource(f"{host}/team/remote"))

    assert (before.store, before.loaded) == (url, False)
    assert back.layers == store.get(ENVIRONMENT).layers
