"""Microvms whose layers are memory to them: the same machine, which keeps no copy of what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.spec import Substrate
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

_CACHED = "grep ^Cached: /proc/meminfo"


async def test_what_is_read_of_layers_is_in_no_guest_s_memory(small_store: Path) -> None:
    cached = {}
    for device in ("blk", "pmem"):
        with private_place(small_store, settings={"microvm": {"layer_device": device, "monitor": "qemu"}}) as place:
            async with served(place) as (service, client):
                probe = await service.node.backends[Substrate.MICROVM].probe()
                if not probe.usable:
                    pytest.skip(f"microvm: {probe.reason}")
                async with place.no_leaks():
                    async with await client.create(
                        ENVIRONMENT, backend="microvm", memory="192MiB", timeout_s=600
                    ) as sb:
                        said = await sb.exec(["python3", "-c", "import json; print(json.dumps([6 * 7]))"], check=True)
                        assert said.stdout == "[42]\n"
                        cached[device] = int((await sb.exec(_CACHED, check=True)).stdout.split()[1])
                        await sb.exec("echo written > /root/x && rm /bin/yes", check=True)
                        assert (await sb.exec("cat /root/x; ls /bin/yes")).stdout == "written\n"
                        await sb.pause(deep=True)
                        await sb.resume()
                        assert (await sb.exec("cat /root/x; ls /bin/yes")).stdout == "written\n"

    assert cached["pmem"] * 2 < cached["blk"], cached
