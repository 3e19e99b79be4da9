"""Microvms of an environment in a store that goes away: reads fail inside, with a cause outside; nothing hangs."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from random import Random

import pytest

import dsec
from dsec.core.errors import UnsupportedError
from dsec.core.spec import Substrate
from dsec.testing.waiting import eventually
from tests.system.container_images import make_root
from tests.system.container_place import private_place, served
from tests.system.store_servers import FaultyFront, python_server

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

_FILES = 6
_FILE_BYTES = 6 << 20  # more than is read ahead


async def test_a_store_that_is_gone_is_an_error_to_the_guest_with_a_cause_outside_and_hangs_no_machine(
    tmp_path: Path, rng: Random
) -> None:
    root = make_root(tmp_path / "root", python=False)
    for number in range(_FILES):
        (root / f"far{number}").write_bytes(rng.randbytes(_FILE_BYTES))
    with private_place(None) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            store = place.directory / "store"
            await client.environments.build("near", dsec.DirectorySource(str(root)))
            try:
                await client.environments.push("near", f"file://{store}")
            except UnsupportedError as error:
                pytest.skip(error.message)
            await client.environments.build("far", dsec.StoreSource(f"file://{store}", "near"))
            async with await client.create("far", backend="microvm", memory="192MiB", timeout_s=300) as sb:
                assert (await sb.exec("cat /far0 | wc -c")).stdout == f"{_FILE_BYTES}\n"
                shutil.move(store, place.directory / "gone")

                failed = await sb.exec("cat /far2 > /dev/null", timeout_s=300)
                assert (failed.exit_code != 0, failed.cause) == (True, "layer_unavailable")
                assert "Input/output error" in failed.stderr
                assert (await sb.exec("echo on")).stdout == "on\n"

                shutil.move(place.directory / "gone", store)
                again = await sb.exec("cat /far2 | wc -c", timeout_s=300)
                assert again.stdout == f"{_FILE_BYTES}\n"

                shutil.move(store, place.directory / "gone")
                await sb.start("cat /far4")
                await asyncio.sleep(1.0)
                began = time.monotonic()
            print("destroyed after", time.monotonic() - began)
            assert await client.list() == []


async def test_bytes_that_come_slowly_are_waited_for_and_wrong_ones_are_errors_to_the_guest_with_their_cause(
    tmp_path: Path, rng: Random
) -> None:
    root = make_root(tmp_path / "root", python=False)
    for number in range(_FILES):
        (root / f"far{number}").write_bytes(rng.randbytes(_FILE_BYTES))
    with private_place(None) as place, python_server(place.directory / "store") as upstream:
        front = FaultyFront(upstream)
        try:
            async with served(place) as (service, client):
                probe = await service.node.backends[Substrate.MICROVM].probe()
                if not probe.usable:
                    pytest.skip(f"microvm: {probe.reason}")
                await client.environments.build("near", dsec.DirectorySource(str(root)))
                try:
                    await client.environments.push("near", f"file://{place.directory}/store")
                except UnsupportedError as error:
                    pytest.skip(error.message)
                await client.environments.build("far", dsec.StoreSource(f"http://127.0.0.1:{front.port}", "near"))
                async with await client.create("far", backend="microvm", memory="192MiB", timeout_s=300) as sb:
                    front.set("slow")
                    assert (await sb.exec("cat /far0 | wc -c", timeout_s=300)).stdout == f"{_FILE_BYTES}\n"

                    front.set("corrupt")
                    failed = await sb.exec("cat /far2 > /dev/null", timeout_s=300)
                    assert (failed.exit_code != 0, failed.cause) == (True, "layer_corrupt")
                    assert "Input/output error" in failed.stderr
                    assert (await sb.exec("echo on")).stdout == "on\n", "what it has read already it still has"

                    front.set("hang")
                    silent = await sb.exec("cat /far4 > /dev/null", timeout_s=600)
                    assert (silent.exit_code != 0, silent.cause) == (True, "layer_unavailable")

                    front.set("good")
                    for name in ("far2", "far4"):

                        async def reads(name: str = name) -> bool:
                            again = await sb.exec(f"cat /{name} | wc -c", timeout_s=300)
                            return again.stdout == f"{_FILE_BYTES}\n"

                        await eventually(reads, deadline_s=400)  # each try may wait for a minute
                        assert await sb.files.read_bytes(f"/{name}") == (root / name).read_bytes()
                assert await client.list() == []
        finally:
            front.close()
