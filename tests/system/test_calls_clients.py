"""Calls as others make them: the pages of the guide, the command line, and the published client of SandboxFusion."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.sdk.client import AsyncClient
from dsec.wire.environments import DirectorySource
from tests.system.container_images import make_root
from tests.system.container_place import Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/calls.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
SAID = ["finished 6\n", "finished\nfinished\nerror\n", "True [<CallStatus.FINISHED: 'finished'>"]
# There is no compiler in what the tests run in: one of these lines stands for it.
ADDING = "printf '#!/bin/sh\\nread a b; echo $((a + b))\\n' > main && chmod 755 main"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(
    small_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Place, AsyncClient, int]]:
    with private_place(small_store) as place:
        cpp = {"source": "main.cpp", "compile": ["sh", "-c", ADDING], "run": ["./main"]}
        place.settings["calls"] = {"places_max": 2, "place_memory_bytes": "128MiB", "types": {"cpp": cpp}}
        place.settings["api"] = {"listen": "127.0.0.1:0"}
        async with served(place) as (service, client):
            root = make_root(tmp_path_factory.mktemp("base") / "root")
            await client.environments.build("base", DirectorySource(path=str(root)))
            yield place, client, service.addresses[0].port


async def run(place: Place, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DSEC_URL": place.url}
    return await asyncio.to_thread(
        subprocess.run, [sys.executable, *words], env=env, input=stdin, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(("block", "said"), list(zip(BLOCKS, SAID, strict=True)))
async def test_a_block_of_the_guide_does_what_the_page_says(
    place: tuple[Place, AsyncClient, int], block: str, said: str
) -> None:
    done = await run(place[0], "-W", "error", "-c", block)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)


async def test_the_command_line_is_the_twin_of_the_client(
    place: tuple[Place, AsyncClient, int], tmp_path: Path
) -> None:
    """The commands of the guide, what else `dsec call` takes, and how it ends."""
    source, data = tmp_path / "main.cpp", tmp_path / "in.csv"
    source.write_text("any")
    data.write_text("content")
    dsec = ["-c", "import sys; sys.argv[0] = 'dsec'; from dsec.cli.entry import main; main()"]

    simple = await run(place[0], *dsec, "call", "python", "-c", "print(1 + 1)")
    compiled = await run(place[0], *dsec, "call", "cpp", str(source), "-i", stdin="20 22")
    code = "import sys; print(open('d/x').read(), sys.argv[1:], sys.stdin.read()); sys.exit(3)"
    full = await run(
        place[0], *dsec, "call", "python", "--file", f"d/x={data}", "-i", "-c", code, "a", "b", stdin="given"
    )
    slow = await run(place[0], *dsec, "call", "python", "--timeout", "0.2", "-c", "while True: pass")
    wrong = await run(place[0], *dsec, "call", "python", "--timeout", "0", "-c", "")
    types = await run(place[0], *dsec, "calls", "types")
    pools = await run(place[0], *dsec, "calls", "pools")

    assert (simple.stdout, simple.stderr, simple.returncode) == ("2\n", "", 0)
    assert (compiled.stdout, compiled.returncode) == ("42\n", 0), compiled
    assert (full.stdout, full.returncode) == ("content ['a', 'b'] given\n", 3), full
    assert (slow.returncode, "time limit" in slow.stderr) == (124, True)
    assert wrong.returncode != 0
    assert "--timeout" in wrong.stderr
    assert "python" in types.stdout
    assert "base" in pools.stdout


async def test_the_published_client_of_sandbox_fusion_is_served(place: tuple[Place, AsyncClient, int]) -> None:
    """It can be told a URL and nothing else: the token is in that."""
    fusion: Any = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion (PyPI) is not installed")
    _, client, port = place
    token = (await client.tokens.create("trainer")).token
    address = f"http://trainer:{token}@127.0.0.1:{port}"

    def ask(code: str, language: str = "python", **more: Any) -> Any:
        request = fusion.RunCodeRequest(code=code, language=language, **more)
        return fusion.run_code(request, endpoint=address, max_attempts=1, client_timeout=120)

    good = await asyncio.to_thread(ask, "print(int(input()) + 1)", stdin="41", run_timeout=60)
    bad = await asyncio.to_thread(ask, "1/0", run_timeout=60)
    slow = await asyncio.to_thread(ask, "while True: pass", run_timeout=0.3)
    compiled = await asyncio.to_thread(ask, "any", "cpp", stdin="1 2", fetch_files=["main"])
    every = await fusion.run_code_async(
        fusion.RunCodeRequest(code="print(1)", language="python"), endpoint=address, max_attempts=1
    )
    mapping = fusion.SummaryMapping(RunTimeout="timeout")
    with pytest.raises(Exception, match="csharp"):
        await asyncio.to_thread(ask, "", "csharp")
    with pytest.raises(Exception, match="401"):
        await asyncio.to_thread(
            fusion.run_code,
            fusion.RunCodeRequest(code="", language="python"),
            endpoint=f"http://127.0.0.1:{port}",
            max_attempts=1,
        )

    assert (good.status, good.run_result.stdout, good.run_result.return_code) == ("Success", "42\n", 0)
    assert good.run_result.cpu_time > 0
    assert (bad.status, bad.run_result.return_code) == ("Failed", 1)
    assert fusion.summary_run_code_result(slow, mapping) == "timeout"
    assert (compiled.status, compiled.run_result.stdout, list(compiled.files)) == ("Success", "3\n", ["main"])
    assert every.run_result.stdout == "1\n"
