"""The small environment that tests of real containers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.container_place import container_store


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory, native_binaries: dict[str, Path]) -> Path:
    """A state directory with the environment "small": see `container_place`."""
    return container_store(tmp_path_factory.getbasetemp())
