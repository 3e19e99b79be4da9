"""A node that is not root makes no sandboxes of ours. It says so in words, also where an environment is there already,
and nothing is begun that it could not remove."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core.errors import UnsupportedError
from dsec.sdk.client import AsyncClient
from tests.system.container_place import ENVIRONMENT, Place, private_place

pytestmark = pytest.mark.root

# The files of this checkout may be for root alone, so it is somebody else by a user namespace.
_AS_ANOTHER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store, wrap=_AS_ANOTHER) as place:
        yield place


async def test_a_create_says_that_it_needs_root_and_leaves_nothing(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        for substrate, who in (("container", "containers"), ("microvm", "microvms")):
            with pytest.raises(UnsupportedError, match=f"{who} need root on the node") as refused:
                await client.create(ENVIRONMENT, backend=substrate)
            assert refused.value.hint == "start `dsec up` as root"

        assert await client.list() == []
        assert not list((place.state / "sandboxes").glob("sbx_*"))
        report = await client.doctor()

    said = {finding.what: finding for finding in report.findings}
    assert said["root"].status == said["substrate container"].status == "missing"
    assert said["substrate container"].hint == "start `dsec up` as root"
