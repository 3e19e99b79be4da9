"""A node in a network of a test's own, with an outside beyond it: see `dsec.testing.outside`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec.sdk.client import AsyncClient
from dsec.sdk.results import ExecResult
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.networks import able
from dsec.testing.outside import Outside, outside
from tests.system.container_place import ENVIRONMENT, Place, private_place

ABLE = able()
# In a sandbox: what an address says, or what became of the attempt.
FETCH = """
import http.client, sys
for url in sys.argv[1:]:
    host, _, path = url.partition("/")
    try:
        link = http.client.HTTPConnection(host, timeout=60)
        link.request("GET", "/" + path)
        body = link.getresponse().read()
        print(body.decode() if len(body) < 100 else len(body))
    except Exception as error:
        print(type(error).__name__)
"""


@dataclass
class Site:
    place: Place
    client: AsyncClient
    outside: Outside

    async def create(self, *egress: str, **options: Any) -> AsyncSandbox:
        chosen: dict[str, Any] = {"memory": "256MiB", "pids": 64, **options}
        return await self.client.create(ENVIRONMENT, network="proxied", egress=list(egress), **chosen)

    async def start_node(self) -> None:
        self.place.start_process()
        await self.place.ready(self.client)


async def fetch(sandbox: AsyncSandbox, *urls: str) -> list[str]:
    """A line for each: the text there, how long it is when it is long, or the kind of error."""
    result: ExecResult = await sandbox.exec(["python3", "-c", FETCH, *urls], timeout_s=200)
    assert result.exit_code == 0, result.stderr
    return result.stdout.split("\n")[:-1]


@asynccontextmanager
async def egress_site(store: Path, directory: Path) -> AsyncIterator[Site]:
    with outside(directory) as beyond:
        settings = {"node": {"egress": {"resolvers": [beyond.resolver]}}}
        with private_place(store, wrap=beyond.wrap, settings=settings) as place:
            async with AsyncClient(place.url) as client:
                site = Site(place, client, beyond)
                await site.start_node()
                yield site
