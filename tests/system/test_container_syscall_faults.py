"""Each system call of the launcher, its workers, and the agent as it starts fails once, then the next.

A create then works or fails with a typed error; what works is confined as ever; nothing is left; the next one works.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, Outcome
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.leaks import leaks_between, take_snapshot
from dsec.testing.strace import Fault, strace, traced
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(strace() is None, reason="needs strace (tools/setup --dev installs it)"),
]

SAMPLES = 6
# A descriptor is gone whatever close(2) says; strace, which does not make the call, would leave it open.
UNFAILING = {"close"}
CONFINEMENT = """
for of in self 1; do grep -E '^(Uid|Gid|Groups|Cap.*|NoNewPrivs|Seccomp.*):' /proc/$of/status; done
cat /proc/self/mountinfo /proc/self/setgroups /proc/self/uid_map /proc/self/cgroup /etc/hosts
ls /dev /proc/self/fd; ulimit -a; cat /proc/sys/net/ipv4/ip_unprivileged_port_start
"""


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.fixture
async def running(place: Place) -> AsyncIterator[tuple[LocalService, AsyncClient]]:
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        yield service, client


async def confinement(sandbox: AsyncSandbox) -> list[str]:
    """What holds it, without what is another for each sandbox."""
    found = await sandbox.exec(CONFINEMENT)
    assert found.ok, found.summary()
    lines = []
    for line in found.stdout.replace(sandbox.id, "SANDBOX").splitlines():
        if " - " in line:  # of mountinfo: without the numbers, and the places of layers
            line = re.sub(r"(lowerdir|upperdir|workdir)[^, ]*|[ug]id=\d+", r"\1", " ".join(line.split(" ")[3:]))
        lines.append(re.sub(r"exe_[a-z0-9]+|sbx-[a-z0-9-]+|^ +0 +\d+ +", "", line))
    return lines


async def seen(place: Place, client: AsyncClient) -> list[Fault]:
    """One fault for each call from the request to create to the end of destroy."""
    launcher = place.launcher_pid()
    assert launcher is not None
    with traced(launcher) as found:
        await (await client.create(ENVIRONMENT)).destroy()
    return [fault for fault in found.faults() if fault.call not in UNFAILING]


async def try_all(place: Place, service: LocalService, client: AsyncClient, faults: Sequence[Fault]) -> list[str]:
    async with await client.create(ENVIRONMENT) as sandbox:
        usual = await confinement(sandbox)
    wrong: list[str] = []
    for fault in faults:
        words = await try_one(place, service, client, fault, usual)
        wrong += [f"{fault}: {word}" for word in words]
    return wrong


async def try_one(
    place: Place, service: LocalService, client: AsyncClient, fault: Fault, usual: list[str]
) -> list[str]:
    wrong: list[str] = []
    launcher = place.launcher_pid()
    assert launcher is not None
    watched = place.watched()
    before = take_snapshot(watched)
    sandbox = None
    outcome = Outcome.GONE
    with traced(launcher, fault) as found:
        try:
            sandbox = await client.create(ENVIRONMENT)
        except DsecError as error:
            outcome = error.outcome
    # The call may fail in the process that cleans up, too: then the node knows no better, and goes on trying.
    if outcome is not Outcome.GONE and len(found.hits) < 2:
        wrong.append(f"the create ended with outcome {outcome}; {found.hits}")
    if sandbox is not None:
        # An agent that lost what it needs has failed its sandbox, and said so.
        with contextlib.suppress(DsecError):
            if (now := await confinement(sandbox)) != usual:
                wrong.append(f"it is confined otherwise: {set(now) ^ set(usual)}")
        launcher = place.launcher_pid() or await another(place, client)
        with traced(launcher, fault), contextlib.suppress(DsecError):
            await sandbox.destroy()
    await eventually(lambda: not list(service.node.registry))  # what resisted is tried again

    def left() -> list[str]:
        found = leaks_between(before, take_snapshot(watched))
        return [leak for leak in found if not of_launcher(place, leak)]

    with contextlib.suppress(AssertionError):
        await eventually(lambda: not left(), deadline_s=20)
    wrong += [f"left behind: {leak}" for leak in left()]
    async with await client.create(ENVIRONMENT) as following:
        if (await following.exec("echo works")).stdout != "works\n":
            wrong.append("the next one does not work")
    return wrong


async def another(place: Place, client: AsyncClient) -> int:
    """A launcher that the fault has ended is followed by the next at the first request."""
    await (await client.create(ENVIRONMENT)).destroy()
    found = place.launcher_pid()
    assert found is not None
    return found


def of_launcher(place: Place, leak: str) -> bool:
    """A launcher that came after: it, and the namespace that it makes for itself."""
    pid = place.launcher_pid()
    kind, _, thing = leak.partition(": ")
    if kind == "processes":
        return thing.startswith(f"process {pid} (dsec-launch,")
    return kind in ("namespaces", "descriptors")


async def test_a_system_call_that_fails_at_create_or_destroy_leaves_nothing(
    place: Place, running: tuple[LocalService, AsyncClient], rng: random.Random
) -> None:
    service, client = running
    faults = await seen(place, client)
    assert len(faults) > 200
    assert await try_all(place, service, client, rng.sample(faults, SAMPLES)) == []


@pytest.mark.slow
@pytest.mark.timeout(7_200)
async def test_every_system_call_that_fails_at_create_or_destroy_leaves_nothing(
    place: Place, running: tuple[LocalService, AsyncClient]
) -> None:
    service, client = running
    assert await try_all(place, service, client, await seen(place, client)) == []
