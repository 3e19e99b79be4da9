"""Every agent and every backend that this host has; what it lacks is skipped with the reason."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from dsec.backends.vm.firecracker import PROGRAM
from dsec.core.errors import HostError
from tests.contract.agents_under_test import AgentUnderTest, contained_agent, fake_agent, real_agent
from tests.contract.backends_under_test import BACKENDS, BackendUnderTest, layer_of
from tests.contract.sdk_service import CuttingProxy, RunningService, cutting_proxy, running_service
from tests.firecracker import Programs
from tests.firecracker import programs as programs_of_firecracker
from tests.system.container_images import make_root


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with a shell, tools and Python."""
    root = make_root(tmp_path_factory.mktemp("programs") / "root")
    for name, line in (("passwd", "nobody:x:65534:65534::/nonexistent:/bin/sh"), ("group", "nogroup:x:65534:")):
        with (root / "etc" / name).open("a") as file:
            file.write(line + "\n")
    return root


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """`dsec up` with the fake substrate, in a process of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory,
        running_service(Path(directory)) as found,
    ):
        yield found


@pytest.fixture
async def proxy(service: RunningService, short_tmp: Path) -> AsyncIterator[CuttingProxy]:
    """Stands before the service, and can cut connections."""
    async with cutting_proxy(short_tmp, service.socket) as found:
        yield found


@pytest.fixture(params=["fake", "real", "container"])
async def under_test(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[AgentUnderTest]:
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            yield await stack.enter_async_context(fake_agent())
        elif request.param == "real":
            yield await _real(stack, short_tmp)
        else:
            backend = await _usable(stack, BACKENDS["container"], "container", short_tmp)
            backend.layers = (layer_of(request.getfixturevalue("programs")),)
            yield await stack.enter_async_context(contained_agent(backend))


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


@pytest.fixture(scope="session")
def firecracker(request: pytest.FixtureRequest) -> Programs:
    return programs_of_firecracker(request.config.cache.mkdir("firecracker"))


@pytest.fixture(params=sorted(BACKENDS))
async def backend(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[BackendUnderTest]:
    make = BACKENDS[request.param]
    if request.param == "firecracker" and shutil.which(PROGRAM) is None:
        program = request.getfixturevalue("firecracker").firecracker
        make = partial(make, firecracker=str(program))
    async with AsyncExitStack() as stack:
        yield await _usable(stack, make, request.param, short_tmp)


async def _usable(
    stack: AsyncExitStack, make: Callable[..., BackendUnderTest], name: str, directory: Path
) -> BackendUnderTest:
    under_test = make(directory)
    stack.push_async_callback(under_test.close)
    probe = await under_test.backend.probe()
    if not probe.usable:
        pytest.skip(f"{name}: {probe.reason}")
    try:
        under_test.ready()
    except HostError as error:
        pytest.skip(f"{name}: {error.message}")
    return under_test
