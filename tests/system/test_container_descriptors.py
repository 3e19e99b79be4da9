"""A node that has no file descriptors left: what it refuses says why, what runs goes on, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, HostError, StorageError
from dsec.sdk.client import AsyncClient
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_container_kills import COUNT, lines_of

pytestmark = pytest.mark.root

LINES = 100


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@contextmanager
def descriptors(pid: int, more: int) -> Iterator[None]:
    """Only so many more for this process; the numbers that others have given up meanwhile are among them."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208
    free = [number for number in range(len(taken) + more + 1) if number not in taken]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[more] if more else 3, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_has_no_descriptor_is_refused_with_the_cause_and_nothing_is_left(place: Place) -> None:
    node = place.start_process().pid
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        async with await client.create(ENVIRONMENT) as new, await client.create(ENVIRONMENT) as box:
            counting = await box.start(COUNT.format(lines=LINES, code=3))

            async def is_recorded() -> bool:
                return (await counting.info()).out_bytes > 0

            await eventually(is_recorded)
            await box.exec("true")  # with a connection that is used again
            with descriptors(node, 0):
                with pytest.raises(HostError) as uncounted:
                    await client.create(ENVIRONMENT)
                with pytest.raises(StorageError) as unlogged:
                    await new.exec("true")
            for error in (uncounted.value, unlogged.value):
                assert "no file descriptors left" in str(error.hint), error
            for more in range(1, 5):
                with descriptors(node, more):
                    (made,) = await asyncio.gather(client.create(ENVIRONMENT), return_exceptions=True)
                if isinstance(made, BaseException):
                    assert isinstance(made, DsecError), made
                    assert "Too many open files" in str(made)
                else:
                    await made.destroy()

            result = await (await box.attach(counting.id)).wait(60)
            assert (result.exit_code, lines_of(result.stdout)) == (3, list(range(1, LINES + 1)))
            assert (await new.exec("echo works")).stdout == "works\n"

        async with await client.create(ENVIRONMENT) as another:
            assert (await another.exec("echo works")).stdout == "works\n"
        assert await client.list() == []
    await eventually(lambda: not list((place.state / "sandboxes").glob("sbx_*")))
    assert "Traceback" not in place.log.read_text()
