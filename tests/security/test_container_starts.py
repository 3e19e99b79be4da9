"""Between clone and exec a child of the agent has its memory and its descriptors, and is root inside already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(small_store: Path) -> AsyncIterator[AsyncClient]:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            yield client


# Looks at all processes, as fast as it can, until it is told to end. Whose program is that of the agent, and not what
# the child has become, was reached between clone and exec. Tracing asks for more rights than this look.
_WATCHER = """
import os, sys, threading
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
reached, seen, asked = set(), set(), 0
print("begins", flush=True)
while not end.is_set():
    for name in os.listdir("/proc"):
        if not name.isdigit() or name in ("1", str(os.getpid())): continue
        seen.add(name)
        asked += 1
        try: program = os.readlink(f"/proc/{name}/exe")
        except OSError: program = ""
        if "dsec-agent" in program: reached.add(name)
print(len(seen), asked, sorted(reached))
"""


@pytest.mark.parametrize("user", ["root", "65535:65535"])
async def test_nothing_of_the_agent_is_reached_through_its_children(
    client: AsyncClient, user: str, tmp_path: Path
) -> None:
    as_user = "" if user == "root" else "import os; os.setresgid(*[65535] * 3); os.setresuid(*[65535] * 3)\n"
    async with await client.create(ENVIRONMENT, cpu=2) as sandbox:
        await sandbox.exec("mkdir /tree; for i in $(seq 200); do echo $i > /tree/$i; done")
        watcher = await sandbox.start(["python3", "-c", as_user + _WATCHER], stdin=True)
        async for _ in watcher:
            break

        await asyncio.gather(*[_work(sandbox, tmp_path / name) for name in ("one", "other")])
        await watcher.close_stdin()
        result = await watcher.wait(60)

        assert result.ok, result.stderr
        seen, asked, reached = result.stdout.splitlines()[-1].split(" ", 2)
        assert reached == "[]"
        assert int(seen) > 10, "the children were not there to be seen"
        assert int(asked) > 100


async def _work(sandbox: AsyncSandbox, target: Path) -> None:
    """Commands, and archives, which the agent makes and unpacks in forks of itself."""
    for number in range(4):
        await sandbox.exec(["/bin/true"], timeout_s=60)
        await sandbox.download("/tree", target / str(number))
        await sandbox.upload(target / str(number), f"/copy/{target.name}/{number}")
