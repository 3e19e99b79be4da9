"""A group of machines and containers: each reaches the other by name, also after a pause to the disk and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import DsecError
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from dsec.wire.groups import GroupLink
from tests.system.container_place import ENVIRONMENT, private_place, served
from tests.system.test_container_links import CLIENT, SERVER, TALKED

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1_200)]

SMALL: dict[str, Any] = {"environment": ENVIRONMENT, "memory": "64MiB"}
MACHINE: dict[str, Any] = {"environment": ENVIRONMENT, "memory": "192MiB", "backend": "microvm"}
SERVES: dict[str, Any] = {"start": True, "entrypoint": ["python3", "-c"], "command": [SERVER], "ready": {"port": 5432}}


async def talks(sandbox: AsyncSandbox, to: str) -> bool:
    try:
        talked = await sandbox.exec(["python3", "-c", CLIENT.replace('"db"', f'"{to}"')], timeout_s=240)
    except DsecError:
        return False
    return talked.stdout == TALKED


async def start(client: AsyncClient) -> Any:
    return await client.groups.create(
        {"db": {**SMALL, **SERVES}, "vm": {**MACHINE, **SERVES}, "ask": MACHINE, "web": SMALL},
        links=[
            GroupLink(name="db", port=5432, by=("ask",)),
            GroupLink(name="vm", port=5432, by=("web",)),
        ],
        name="mixed",
        timeout_s=400,
    )


async def test_a_machine_reaches_and_is_reached(small_store: Path) -> None:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            group = await start(client)
            ask, web = await group.sandbox("ask"), await group.sandbox("web")

            assert await talks(ask, "db")  # a machine, a container
            assert await talks(web, "vm")  # a container, a machine
            hosts = await ask.exec("cat /etc/hosts", timeout_s=60)
            assert "127.77.0.1\tdb" in hosts.stdout
            assert "localhost" in hosts.stdout
            taken = await ask.exec(
                ["python3", "-c", "import socket; socket.create_server(('127.77.0.1', 5432))"], timeout_s=120
            )
            assert "Address already in use" in taken.stderr

            await ask.pause(deep=True)
            await ask.resume()
            await eventually(lambda: talks(ask, "db"), deadline_s=300)
        async with served(place) as (_, client):
            ask = await (await client.groups.get("mixed")).sandbox("ask")
            await eventually(lambda: talks(ask, "db"), deadline_s=300)
            await (await client.groups.get("mixed")).down()
            assert await client.list() == []
