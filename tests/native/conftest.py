"""A running agent, and a connection to it; a launcher, and what it launches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.wire.launch import LayerMount
from tests.native.agent_process import Agent, listening_agent
from tests.native.agent_wire import AgentWire
from tests.native.launch_wire import Host, make_image, running_host


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


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What sandboxes of a launcher have as their layer `image`."""
    return make_image(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, image: Path) -> Iterator[Host]:
    """A launcher that has it."""
    with running_host(tmp_path_factory.mktemp("host") / "host") as host:
        client = host.start()
        client.call("layer_mount", LayerMount(digest="image", kind="directory", meta=str(image)))
        yield host
