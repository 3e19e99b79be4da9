"""Each step of a launch fails once, and each step of the node: a typed error, and nothing is left on the host."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, GoneError, HostError, LaunchError, NotFoundError, Outcome
from dsec.core.ids import new_exec_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.sdk.client import AsyncClient
from dsec.serve.service import LocalService
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import NodeClient
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import ExecStart, Method
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

_STEPS_SOURCE = Path(__file__).parents[2] / "native" / "launch" / "src" / "steps" / "mod.rs"
STEPS = re.findall(r'\(Step::\w+, "(\w+)"\)', _STEPS_SOURCE.read_text())
SPEC = SandboxSpec(environment=Environment(ENVIRONMENT), substrate=Substrate.CONTAINER, memory_bytes=64 << 20)


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.fixture
async def running(place: Place) -> AsyncIterator[tuple[LocalService, AsyncClient]]:
    """With a launcher whose steps can be made to fail, and everything that a first sandbox leaves for the next ones."""
    place.start_launcher("--test-hooks")
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        yield service, client


async def test_there_are_steps_to_fail() -> None:
    assert len(STEPS) >= 20


async def test_a_launch_that_fails_at_any_step_names_it_and_leaves_nothing(
    place: Place, running: tuple[LocalService, AsyncClient]
) -> None:
    _, client = running
    for step in STEPS:
        (place.run / "fail_step").write_text(step)
        async with place.no_leaks():
            with pytest.raises(LaunchError) as caught:
                await client.create(ENVIRONMENT, memory="64MiB")
            (place.run / "fail_step").unlink()

        assert caught.value.step == step
        assert caught.value.outcome is Outcome.GONE
        assert caught.value.sandbox is not None
        with pytest.raises((GoneError, NotFoundError)):
            await client.connect(caught.value.sandbox)
    async with await client.create(ENVIRONMENT) as sandbox:
        assert (await sandbox.exec("echo works")).stdout == "works\n"


async def test_many_launches_that_fail_at_once_leave_nothing(
    place: Place, running: tuple[LocalService, AsyncClient]
) -> None:
    _, client = running
    for step in ("overlay", "mounts", "agent"):
        async with place.no_leaks():
            (place.run / "fail_step").write_text(step)
            results = await client.create_many(16, ENVIRONMENT, memory="64MiB")
            (place.run / "fail_step").unlink()

        assert [type(result) for result in results] == [LaunchError] * 16


async def test_a_fault_of_the_node_at_any_point_of_a_sandbox_s_life_leaves_nothing(place: Place) -> None:
    hits: list[str] = []
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        ours = NodeClient(service.node)
        async for faults in each_nth_failure("node."):
            async with place.no_leaks(descriptors=True):
                with faults:
                    await _live_and_die(ours)
                await _end_everything(ours, service)
            hits.append(faults.hit or "none")
            assert _sandboxes(service) == []

        assert len(hits) > 5
        async with await client.create(ENVIRONMENT) as sandbox:
            assert (await sandbox.exec("echo works")).stdout == "works\n"


async def test_a_pause_or_resume_that_fails_at_any_step_says_so_and_can_be_asked_for_again(place: Place) -> None:
    async with served(place) as (_, client):
        async with await client.create(ENVIRONMENT) as sandbox:
            hits: list[str] = []
            async for faults in each_nth_failure("container."):
                told: list[HostError] = []
                with faults:
                    for step in (sandbox.pause, sandbox.resume):
                        try:
                            await step()
                        except HostError as error:
                            told.append(error)
                hits.append(faults.hit or "none")
                assert [error.outcome for error in told] == [Outcome.UNCHANGED] * (faults.hit is not None)
                await sandbox.resume()
                assert (await sandbox.exec("echo works", timeout_s=60)).stdout == "works\n"
            assert hits == ["container.freeze", "container.freeze", "container.thaw", "container.thaw", "none"]


async def _live_and_die(client: NodeClient) -> None:
    with contextlib.suppress(DsecError):
        sandbox = await client.call(Method.CREATE, records.CreateRequest(spec=SPEC), records.Sandbox)
        request = records.ExecRequest(id=new_exec_id(), shell="seq 1 20000; exit 3", wait_s=20.0)
        with contextlib.suppress(DsecError):
            await client.call(Method.EXEC_START, ExecStart(sandbox.id, request), records.ExecAnswer)
        await client.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)


async def _end_everything(client: NodeClient, service: LocalService) -> None:
    """What a failing disk did not let end is ended now that the disk works again."""
    for id in _sandboxes(service):
        with contextlib.suppress(GoneError, NotFoundError):  # one whose create failed meanwhile was never there
            await client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)
    await eventually(lambda: not _sandboxes(service))


def _sandboxes(service: LocalService) -> list[str]:
    return [str(sandbox.id) for sandbox in service.node.registry]


async def test_a_create_whose_caller_goes_away_at_any_moment_leaves_nothing(place: Place) -> None:
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        ours = NodeClient(service.node)
        async with place.no_leaks(descriptors=True):
            for milliseconds in range(0, 40, 2):
                create = ours.call(Method.CREATE, records.CreateRequest(spec=SPEC), records.Sandbox)
                with contextlib.suppress(TimeoutError, DsecError):
                    async with asyncio.timeout(milliseconds / 1000):
                        made = await create
                        await ours.call(Method.DESTROY, records.SandboxRef(made.id), records.Sandbox)
            await _end_everything(ours, service)
