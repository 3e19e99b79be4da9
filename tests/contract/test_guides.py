"""The Python and shell blocks of tutorial and guides run. A block marked `py` is only read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from tests.contract.sdk_service import RunningService, running_service

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/tutorial.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
BLOCK = re.compile(r"^```(python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(found[2], id=f"{page.stem}-{number}")
    for page in PAGES
    for number, found in enumerate(BLOCK.finditer(page.read_text()), 1)
    if found[1] == "python"
]
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPTS = [
    pytest.param(found[1], id=f"{page.stem}-{number}")
    for page in PAGES
    for number, found in enumerate(SHELL.finditer(page.read_text()), 1)
]
# The pages speak of containers; here the same calls go to the fake substrate.
FAKE = """
from dsec.sdk import requests, sandbox, sync
requests.make_spec.__kwdefaults__["backend"] = "fake"
sandbox.AsyncSandbox.create.__func__.__kwdefaults__["backend"] = "fake"
sync.Sandbox.create.__func__.__kwdefaults__["backend"] = "fake"
"""


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with (
        tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory,
        running_service(Path(directory)) as found,
    ):
        yield found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_and_leaves_no_sandbox(service: RunningService, block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FAKE + block],
        env=service.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    with dsec.Client(service.url) as client:
        assert client.list() == []


# The same for the command line: a `dsec` whose default is the fake substrate.
COMMAND = """#!{python}
import sys
from dsec.cli import lists, main, processes
for function in (lists.create, processes.run):
    function.__defaults__ = tuple("fake" if value == "container" else value for value in function.__defaults__)
main.main()
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_and_leaves_no_sandbox(service: RunningService, tmp_path: Path, script: str) -> None:
    program = tmp_path / "bin/dsec"
    program.parent.mkdir()
    program.write_text(COMMAND.format(python=sys.executable))
    program.chmod(0o755)
    environment = {**service.environment, "PATH": f"{program.parent}:{service.environment['PATH']}"}

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    with dsec.Client(service.url) as client:
        assert client.list() == []


def test_all_blocks_are_python() -> None:
    blocks = [found[2] for page in PAGES for found in BLOCK.finditer(page.read_text())]

    assert len(blocks) >= 8
    for block in blocks:
        ast.parse(block)
