"""A running agent, and a connection to it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.agent_process import Agent, listening_agent
from tests.native.agent_wire import AgentWire


@pytest.fixture(scope="session")
def agent_binary(native_binaries: dict[str, Path]) -> Path:
    return native_binaries["dsec-agent"]


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
