"""Every agent and every backend that this host has; what it lacks is skipped with the reason."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.contract.backends_under_test import BACKENDS, BackendUnderTest

from dsec.core.errors import HostError
from tests.contract.agents_under_test import AgentUnderTest, fake_agent, real_agent

AgentFactory = Callable[[], AgentUnderTest]


@pytest.fixture(params=["fake", "real"])
async def under_test(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[AgentUnderTest]:
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            yield await stack.enter_async_context(fake_agent())
        else:
            yield await _real(stack, short_tmp)


@pytest.fixture
async def real_only(short_tmp: Path) -> AsyncIterator[AgentUnderTest]:
    """For what needs a kernel."""
    async with AsyncExitStack() as stack:
        yield await _real(stack, short_tmp)


async def _real(stack: AsyncExitStack, directory: Path) -> AgentUnderTest:
    try:
        return await stack.enter_async_context(real_agent(directory))
    except HostError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)


@pytest.fixture(params=sorted(BACKENDS))
async def backend(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[BackendUnderTest]:
    under_test = BACKENDS[request.param](short_tmp)
    try:
        probe = await under_test.backend.probe()
        if not probe.usable:
            pytest.skip(f"{request.param}: {probe.reason}")
        yield under_test
    finally:
        await under_test.close()
