"""Containers that run what their image says: a server that is waited for, and programs that fail to become one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec import errors
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.records import EnvironmentRecord
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

_SERVER = """
import socket, sys, time
time.sleep(0.5)
server = socket.create_server(("127.0.0.1", 8000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"hello")
    connection.close()
"""


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        _name_program(place, "server", ("/usr/bin/python3", "-c"), (_SERVER,))
        _name_program(place, "broken", ("/bin/sh",), ("-c", "echo no config >&2; exit 3"))
        _name_program(place, "missing", (), ("/no/such/program",))
        yield place


def _name_program(place: Place, name: str, entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
    """The small environment by another name, as an image that says what to run."""
    store = EnvironmentStore(place.state)
    info = msgspec.structs.replace(store.get(ENVIRONMENT), name=name, entrypoint=entrypoint, command=command)
    store.put(EnvironmentRecord(build_key="0" * 64, info=info))
    assert store.resolve(Environment(name)).entrypoint == entrypoint


async def test_a_server_is_reachable_when_the_create_returns_and_gone_with_its_sandbox(place: Place) -> None:
    async with served(place) as (_, client):
        await (await client.create(ENVIRONMENT, memory="256MiB")).destroy()  # what is kept for all is there now
        async with place.no_leaks():
            ready = {"port": 8000, "interval_s": 0.05}
            async with await client.create("server", memory="256MiB", start=True, ready=ready) as sandbox:
                async with await sandbox.connect_port(8000) as connection:
                    said = await connection.read()
                told = await sandbox.main.info()
                shown = [chunk.text async for chunk in sandbox.main.output(follow=False)]
                await sandbox.main.signal("TERM")
                result = await sandbox.main.wait(60)
                after = await sandbox.exec("echo goes on")

    assert said == b"hello"
    assert (told.name, told.state) == ("main", "running")
    assert shown == ["listening\n"]
    assert result.signal == 15
    assert after.stdout == "goes on\n"


async def test_a_server_is_there_again_when_a_rollback_returns(place: Place) -> None:
    async with served(place) as (_, client):
        ready = {"port": 8000, "interval_s": 0.05}
        async with await client.create("server", memory="256MiB", start=True, ready=ready) as sandbox:
            await sandbox.exec("echo kept > /kept; mkdir -p /run; echo 1 > /run/pid", check=True)
            snapshot = await sandbox.snapshot()
            await sandbox.exec("rm /kept", check=True)
            before = await sandbox.main.info()

            await sandbox.rollback(snapshot)

            async with await sandbox.connect_port(8000) as connection:
                said = await connection.read()
            found = await sandbox.exec("cat /kept; ls /run")
            after = await sandbox.main.info()
        await snapshot.remove()

    assert (said, found.stdout) == (b"hello", "kept\n")
    assert after.state == "running"
    assert after.started_at > before.started_at


@pytest.mark.parametrize(
    ("environment", "ready", "step", "why"),
    [
        ("broken", {"port": 8000}, "ready", "exit code 3"),
        ("server", {"shell": "exit 5", "timeout_s": 3.0}, "ready", "exit code 5"),
        ("server", {"port": 8001, "timeout_s": 3.0}, "ready", "ECONNREFUSED"),
        ("missing", None, "start", "/no/such/program"),
    ],
)
async def test_what_does_not_become_ready_says_why_and_leaves_nothing(
    place: Place, environment: str, ready: dict[str, object] | None, step: str, why: str
) -> None:
    async with served(place) as (_, client):
        await (await client.create(ENVIRONMENT, memory="256MiB")).destroy()  # what is kept for all is there now
        async with place.no_leaks():
            with pytest.raises(errors.LaunchError, match=why) as failed:
                await client.create(environment, memory="256MiB", start=True, ready=ready)
            assert await client.list() == []

    assert failed.value.step == step
