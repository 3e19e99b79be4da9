"""A limit on the disk of real containers, by each mechanism that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import FileError, UnsupportedError
from dsec.storage.quota.choose import Mechanism, find_mechanism
from dsec.testing.waiting import eventually
from tests.system.container_place import private_place, served

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.mark.parametrize("mechanism", ["project", "image", "tmpfs"])
async def test_a_sandbox_is_full_at_its_limit_and_says_how_full_it_is(
    small_store: Path, short_tmp: Path, mechanism: str
) -> None:
    with private_place(small_store, settings={"container": {"disk": mechanism}}) as place:
        if mechanism != "tmpfs":
            found = find_mechanism(place.state, only=Mechanism(mechanism))
            if found.mechanism is None:
                pytest.skip(found.reason)
        async with served(place) as (_, client):
            await (await client.create("small", disk="32MiB", memory="256MiB", pids=64)).destroy()
            async with place.no_leaks():
                sandbox = await client.create("small", disk="32MiB", memory="256MiB", pids=64)
                other = await client.create("small", disk="32MiB", memory="256MiB", pids=64)
                before = await sandbox.metrics()

                result = await sandbox.exec("head -c 100000000 /dev/zero > /big; echo $?")

                assert result.stdout == "1\n"
                assert "No space left" in result.stderr or "quota" in result.stderr
                failed = await sandbox.exec("head -c 1000000 /dev/zero > /more")
                assert (failed.exit_code, failed.cause) == (1, "disk_full")
                assert (await sandbox.exec("true")).cause is None
                assert (await other.exec("false")).cause is None
                full = await sandbox.metrics()
                assert full.disk_limit_bytes == 32 * MIB
                assert (before.disk_used_bytes or 0) < 4 * MIB
                assert 30 * MIB <= (full.disk_used_bytes or 0) <= 36 * MIB
                with pytest.raises(FileError) as told:
                    await sandbox.files.write("/more", bytes(4 * MIB))
                assert told.value.detail["errno"] in ("ENOSPC", "EDQUOT")
                await other.exec("head -c 8000000 /dev/zero > /mine", check=True)
                await sandbox.exec("rm /big && head -c 8000000 /dev/zero > /again", check=True)

                many = await other.exec(
                    "i=0; while : > /tmp/$i; do i=$((i+1)); done 2>/dev/null; echo $i", timeout_s=60
                )
                assert 100 < int(many.stdout) <= 8_192
                await sandbox.destroy()
                await other.destroy()


async def test_where_nothing_keeps_a_limit_it_is_refused(small_store: Path) -> None:
    with private_place(small_store, settings={"container": {"disk": "directory"}}) as place:
        async with served(place) as (_, client):
            with pytest.raises(UnsupportedError, match="disk limit"):
                await client.create("small", disk="32MiB", memory="64MiB", pids=64)
            async with await client.create("small", memory="64MiB", pids=64) as sandbox:
                assert (await sandbox.metrics()).disk_used_bytes is None


async def test_a_limited_sandbox_survives_its_node_and_leaves_nothing(small_store: Path) -> None:
    from dsec.sdk.client import AsyncClient

    with private_place(small_store) as place:
        if find_mechanism(place.state).mechanism is None:
            pytest.skip(find_mechanism(place.state).reason)
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            sandbox = await client.create("small", disk="32MiB", memory="64MiB", pids=64)
            await sandbox.exec("head -c 20000000 /dev/zero > /big", check=True)

            place.kill_node()
            place.start_process()
            await place.ready(client)

            assert 19 * MIB <= ((await sandbox.metrics()).disk_used_bytes or 0) <= 32 * MIB
            assert (await sandbox.exec("head -c 20000000 /dev/zero > /more")).exit_code != 0
            await sandbox.destroy()

        def left() -> list[str]:
            loops = Path("/sys/block").glob("loop*/loop/backing_file")
            return [path.read_text() for path in loops if str(place.state) in path.read_text()] + [
                str(path) for path in (place.state / "sandboxes").glob("*") if path.name != ".trash"
            ]

        await eventually(lambda: not left())
