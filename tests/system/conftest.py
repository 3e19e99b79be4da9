"""What tests of real containers share: the small environment, and a node that has it for the time of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.sdk.client import AsyncClient
from tests.system.container_place import Place, container_store, private_place, served


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory, native_binaries: dict[str, Path]) -> Path:
    """A state directory with the environment "small": see `container_place`."""
    return container_store(tmp_path_factory.getbasetemp())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(small_store: Path) -> AsyncIterator[tuple[Place, AsyncClient]]:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            yield place, client


@pytest.fixture(scope="module")
def client(node: tuple[Place, AsyncClient]) -> AsyncClient:
    return node[1]
