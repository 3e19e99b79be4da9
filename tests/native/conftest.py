"""A running agent, and a connection to it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.agent_process import Agent, listening_agent
from tests.native.agent_wire import AgentWire

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def agent_binary() -> Path:
    """Built by itself: its tests run whatever state the other programs are in."""
    options = ["--quiet", "--release", "--locked", "--target-dir", "target", "--package", "dsec-agent"]
    command = [str(ROOT / "tools" / "cargo"), "build", *options]
    subprocess.run(command, cwd=ROOT / "native", check=True, timeout=1_200, stdin=subprocess.DEVNULL)
    return ROOT / "native" / "target" / "x86_64-unknown-linux-gnu" / "release" / "dsec-agent"


@pytest.fixture
def agent_directory() -> Iterator[Path]:
    """A short path: it holds a socket."""
    with tempfile.TemporaryDirectory(prefix="agt-") as name:
        yield Path(name)


@pytest.fixture
def agent(agent_binary: Path, agent_directory: Path) -> Iterator[Agent]:
    with listening_agent(agent_binary, agent_directory) as agent:
        yield agent


@pytest.fixture
def wire(agent: Agent) -> AgentWire:
    return agent.connect()
