"""A Debian with a desktop, from packages to a click: minutes, so it is for a soak."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from dsec.wire.environments import BuildEvent
from tests.system.container_place import private_place, served

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(3_600)]
in_module = pytest.mark.asyncio(loop_scope="module")

IMAGE = "desk"
BOOT_S = 1_500.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("there is no mmdebstrap")
    with private_place(None, settings={"fullvm": {"boot_s": BOOT_S}}) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.FULLVM].probe()
            if not probe.usable:
                pytest.skip(f"fullvm: {probe.reason}")
            told: list[BuildEvent] = []
            image = await client.machines.build(IMAGE, ["xdotool"], desktop=True, on_event=told.append)
            assert (image.firmware, image.agent) == ("kernel", "dsec")
            assert {"fetch", "pack"} <= {event.stage for event in told}
            yield client


async def create(client: AsyncClient) -> AsyncSandbox:
    return await client.create(IMAGE, backend="fullvm", memory="768MiB", timeout_s=BOOT_S)


@in_module
async def test_a_desktop_is_built_booted_once_cloned_and_used(client: AsyncClient) -> None:
    begun = time.monotonic()
    first = await create(client)
    booted_s = time.monotonic() - begun

    begun = time.monotonic()
    async with await create(client) as pc:
        cloned_s = time.monotonic() - begun
        assert cloned_s * 3 < booted_s, "a clone does not boot"
        await it_is_a_system(pc, first)
        await a_hand_can_use_it(pc)
    await first.destroy()


async def it_is_a_system(pc: AsyncSandbox, other: AsyncSandbox) -> None:
    state = (await pc.exec("systemctl is-system-running --wait; cat /proc/self/cgroup")).stdout
    assert state.startswith("running\n"), (await pc.exec("systemctl --failed")).stdout
    assert "/dsec-agent.service/work/" in state
    user = await pc.exec("id -un; cat /etc/debian_version; touch ~/x; pwd", user="user", cwd="/home/user")
    assert user.exit_code == 0, user.stderr
    assert user.stdout.split()[0] == "user"
    size = int((await pc.exec("df --output=size -B1 / | tail -1")).stdout)
    assert size > 8 << 30, "the file system has grown to the disk"
    ids = {(await machine.exec("cat /etc/machine-id; hostname")).stdout for machine in (pc, other)}
    assert len(ids) == 2
    assert abs(int((await pc.exec("date +%s")).stdout) - time.time()) < 60


async def a_hand_can_use_it(pc: AsyncSandbox) -> None:
    size = await pc.screen.size()
    for x, y in ((10, 20), (size.width - 1, size.height - 1), (300, 200)):
        await pc.screen.move(x, y)

        async def there(x: int = x, y: int = y) -> bool:
            found = re.search(r"x:(\d+) y:(\d+)", (await pc.exec("xdotool getmouselocation")).stdout)
            assert found is not None
            return abs(int(found[1]) - x) <= 1 and abs(int(found[2]) - y) <= 1

        await eventually(there)
    # The terminal is where the pointer is.
    window = (await pc.exec("xdotool search --sync --onlyvisible --class xterm getwindowgeometry")).stdout
    found = re.search(r"Position: (\d+),(\d+)", window)
    assert found is not None, window
    await pc.screen.click(int(found[1]) + 50, int(found[2]) + 50)
    before = await pc.screen.screenshot()
    await pc.screen.type("echo Hi > /tmp/typed\n")

    async def typed() -> bool:
        return (await pc.exec("cat /tmp/typed")).stdout == "Hi\n"

    await eventually(typed)
    assert await pc.screen.screenshot() != before
