"""Groups of real containers: names that are reached over loopback, and nothing else of a network."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dsec.sdk.client import AsyncClient
from dsec.sdk.groups import AsyncGroup
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SERVER = """
import socketserver
class Upper(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line.upper())
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("0.0.0.0", 5432), Upper).serve_forever()
"""
CLIENT = """
import socket
with socket.create_connection(("db", 5432), timeout=30) as to:
    to.sendall(b"hello\\n" * 10_000)
    to.shutdown(socket.SHUT_WR)
    got = b""
    while piece := to.recv(65536):
        got += piece
print(got == b"HELLO\\n" * 10_000, socket.gethostbyname("db"))
"""
TALKED = "True 127.77.0.1\n"
COMPOSE = f"""
name: shop-compose
x-anything: {{is: passed over}}
services:
  db:
    image: {ENVIRONMENT}
    entrypoint: [python3, -c]
    command: [{json.dumps(SERVER)}]
    expose: ["5432"]
    healthcheck:
      test: [CMD, python3, -c, 'import socket; socket.create_connection(("localhost", 5432), 5)']
      interval: 100ms
      start_period: 30s
    mem_limit: 64m
  web:
    image: {ENVIRONMENT}
    command: python3 -c "import time; time.sleep(1000)"
    entrypoint: []
    environment: {{GREETING: "$${{HOME}} is no variable", WHO: "${{WHO:-nobody}}"}}
    depends_on: {{db: {{condition: service_healthy}}}}
    deploy: {{resources: {{limits: {{cpus: "0.5", memory: 64M, pids: 50}}}}}}
"""


async def started(client: AsyncClient, name: str) -> AsyncGroup:
    small = {"environment": ENVIRONMENT, "memory": "64MiB"}
    server = {"start": True, "entrypoint": ["python3", "-c"], "command": [SERVER], "ready": {"port": 5432}}
    return await client.groups.create(
        {"db": {**small, **server}, "web": {**small, "after": ["db"]}, "other": small},
        links=["db:5432"],
        name=name,
    )


async def test_a_name_reaches_the_other_and_there_is_no_other_network(client: AsyncClient) -> None:
    async with await started(client, "shop") as group:
        web = await group.sandbox("web")

        talked = await web.exec(["python3", "-c", CLIENT], timeout_s=120)
        assert (talked.stdout, talked.stderr) == (TALKED, "")
        named = await web.exec(["python3", "-c", "import socket; print(socket.if_nameindex())"], timeout_s=60)
        assert named.stdout == "[(1, 'lo')]\n"
        assert "127.77.0.1\tdb\n" in (await web.files.read("/etc/hosts"))
        assert "web" not in (await (await group.sandbox("db")).files.read("/etc/hosts"))
        taken = await web.exec(
            ["python3", "-c", "import socket; socket.create_server(('127.77.0.1', 5432))"], timeout_s=60
        )
        assert "Address already in use" in taken.stderr  # the link is there, and nobody inside can take its place


async def test_a_compose_file_runs(client: AsyncClient, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)

    async with await client.groups.from_compose(file, variables={}) as group:
        web = await group.sandbox("web")
        assert group.name == "shop-compose"
        assert (web.info.cpu, web.info.memory_bytes, web.info.pids_max) == (0.5, 64 << 20, 50)
        talked = await web.exec(["python3", "-c", CLIENT], timeout_s=120)
        assert (talked.stdout, talked.stderr) == (TALKED, "")
        told = await web.exec('echo "$GREETING, $WHO"', timeout_s=60)
        assert told.stdout == "${HOME} is no variable, nobody\n"


async def test_links_are_there_again_after_a_restart_of_the_node(small_store: Path) -> None:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            group = await started(client, "shop")
        async with served(place) as (_, client):
            web = await (await client.groups.get("shop")).sandbox("web")

            async with asyncio.timeout(60):
                while (await web.exec(["python3", "-c", CLIENT], timeout_s=60)).stdout != TALKED:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            assert (await client.groups.get("shop")).members == group.members
            await (await client.groups.get("shop")).down()
