"""What several of these modules use; modules with a `client` of another kind have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registries import Client, Front


@pytest.fixture
def front() -> Iterator[Front]:
    """A registry in this process that can be told to fail."""
    with Front() as found:
        yield found


@pytest.fixture
def client(front: Front, tmp_path: Path) -> Client:
    """A client of it."""
    return Client(front, tmp_path)
