"""Each step of a launch fails once, and each step of the node: a typed error, and nothing is left on the host."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import (
    DsecError,
    GoneError,
    HostError,
    LaunchError,
    NotFoundError,
    Outcome,
    StorageError,
    UnavailableError,
)
from dsec.core.ids import new_exec_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.serve.service import LocalService
from dsec.testing.faults import each_nth_failure, injected_error
from dsec.testing.nodes import NodeClient
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import ExecStart, Method
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

_STEPS_SOURCE = Path(__file__).parents[2] / "native" / "launch" / "src" / "steps" / "mod.rs"
# Volumes have their own tests: a sandbox without any does not come by that step.
STEPS = [step for step in re.findall(r'\(Step::\w+, "(\w+)"\)', _STEPS_SOURCE.read_text()) if step != "volumes"]
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


def _as_where_it_happens(name: str) -> BaseException:
    """An agent that cannot be asked is an error of ours, a file that cannot be written one of the kernel's."""
    return UnavailableError(f"injected at {name}") if name.startswith("agent.") else injected_error(name)


async def test_a_pause_or_resume_that_fails_at_any_step_says_so_and_can_be_asked_for_again(place: Place) -> None:
    """The journal, the agent, both cgroups; a command goes on over all of it."""
    async with served(place) as (service, client):
        async with await client.create(ENVIRONMENT) as sandbox:
            process = await sandbox.start("while :; do sleep 0.05; echo on; done")
            found = service.node.registry.find(sandbox.id)
            assert found is not None
            hits: list[str] = []
            # Neither what is recorded of the command, which goes on meanwhile, nor of other sandboxes.
            for prefix in ("container.", "agent.", "node.journal."):
                async for faults in each_nth_failure(prefix, error=_as_where_it_happens):
                    told: list[HostError | StorageError] = []
                    with faults:
                        for step, state in ((sandbox.pause, "paused"), (sandbox.resume, "running")):
                            before = found.state
                            if (error := await _error_of(step())) is None:
                                assert found.state == state
                            else:
                                told.append(error)
                                assert (error.outcome, found.state) == (Outcome.UNCHANGED, before)
                    hits.append(faults.hit or "none")
                    # Without the agent, or a disk that takes what was done, it is done all the same.
                    assert len(told) == (prefix == "container." and faults.hit is not None) or prefix == "node.journal."
                    assert len(told) <= 1
                    await sandbox.resume()
                    assert (await sandbox.refresh()).state == "running"
                    assert (await sandbox.exec("echo works", timeout_s=60)).stdout == "works\n"
            of_container = ["container.freeze", "container.freeze", "container.thaw", "container.thaw", "none"]
            assert hits[:8] == [*of_container, "agent.freeze_prepare", "agent.clock", "none"]
            assert hits[8:] == ["node.journal.write"] * 4 + ["none"]
            before_end = (await process.info()).out_bytes
            await eventually(lambda: _grew(process, before_end))


async def _error_of(step: Awaitable[None]) -> HostError | StorageError | None:
    try:
        await step
    except (HostError, StorageError) as error:
        return error
    return None


async def _grew(process: AsyncProcess, beyond: int) -> bool:
    return (await process.info()).out_bytes > beyond


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
