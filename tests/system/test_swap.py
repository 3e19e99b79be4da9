"""What nobody uses goes to swap, and comes back: sandboxes of both kinds on a host that has some, a file of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from bench import swapping
from dsec.core.errors import UnsupportedError
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.testing.swap import NoSwapError, own_swap
from tests.system.container_place import ENVIRONMENT, Place, private_place

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    try:
        with own_swap(tmp_path_factory.mktemp("swap"), swapping.SWAP_BYTES):
            yield
    except NoSwapError as error:
        pytest.skip(f"no swap: {error}")


@pytest.fixture
def place(swap: None, small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.mark.parametrize("backend", [Substrate.CONTAINER, Substrate.MICROVM])
async def test_what_rests_gives_the_host_its_memory_and_has_it_again_when_it_is_used(
    place: Place, backend: Substrate
) -> None:
    def run() -> dict[str, object]:
        with dsec.Client(place.url) as client:
            return swapping.measure(client, ENVIRONMENT, backend, rounds=2)

    place.more = swapping.SETTINGS
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        try:
            found = await asyncio.to_thread(run)
        except UnsupportedError as error:
            pytest.skip(f"{backend}: {error.message}")
    print(json.dumps(found))
    assert found["resident_given_back"] >= 0.95, found
    assert found["charge_given_back"] >= 0.95, found
