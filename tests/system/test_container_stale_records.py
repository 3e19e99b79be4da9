"""What a journal says of processes of before: a pid may be anybody's by now, and after a reboot a start time, too."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dsec.backends.container.record import ContainerRecord, parse_record
from dsec.node.rows import SandboxRow
from dsec.testing.processes import read_process
from dsec.testing.waiting import eventually
from dsec.wire.codec import pack, unpack
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def forge(place: Place, change: Callable[[SandboxRow, ContainerRecord], SandboxRow]) -> None:
    """Rewrites the one row of the journal of a node that does not run."""
    with sqlite3.connect(place.state / "journal.db") as db:
        ((body,),) = db.execute("SELECT body FROM sandboxes")
        row = unpack(body, SandboxRow)
        db.execute("UPDATE sandboxes SET body = ?", (pack(change(row, parse_record(row.record))),))
    db.close()


async def a_sandbox_that_runs_on(place: Place) -> str:
    async with served(place) as (_, client):
        sandbox = await client.create(ENVIRONMENT)
        await sandbox.start("sleep 1000")
        return sandbox.id


async def end_of(place: Place, id: str) -> tuple[str, str | None]:
    async with served(place) as (_, client):
        info = (await client.get(id)).info
        assert await client.list() == []
        async with await client.create(ENVIRONMENT) as another:
            assert (await another.exec("echo works")).stdout == "works\n"
        return info.state, info.cause


def left_of(place: Place, id: str) -> list[Path]:
    """On the host; what is removed beside other work is no longer under its name."""
    found = [*place.cgroup_files(id), place.state / "sandboxes" / id, place.run / "sb" / f"{id}.sock"]
    return [path for path in found if path.exists()]


async def test_a_pid_that_is_another_process_by_now_is_not_killed(
    place: Place, innocent: subprocess.Popen[bytes]
) -> None:
    id = await a_sandbox_that_runs_on(place)
    forge(
        place,
        lambda row, record: msgspec.structs.replace(
            row, record=msgspec.structs.replace(record, pid=innocent.pid).to_bytes()
        ),
    )

    assert await end_of(place, id) == ("failed", "sandbox_fault")

    assert innocent.poll() is None
    await eventually(lambda: left_of(place, id) == [])


async def test_after_a_reboot_all_are_gone_and_nobody_is_killed_for_a_pid_and_a_start_time_of_before(
    place: Place, innocent: subprocess.Popen[bytes]
) -> None:
    id = await a_sandbox_that_runs_on(place)
    seen = read_process(innocent.pid)
    assert seen is not None
    forge(
        place,
        lambda row, record: msgspec.structs.replace(
            row,
            boot_id="another boot",
            record=msgspec.structs.replace(
                record, boot_id="another boot", pid=innocent.pid, start_ticks=seen.start_ticks
            ).to_bytes(),
        ),
    )
    place.kill_launcher()  # as a reboot does, it forgets what it has started

    assert await end_of(place, id) == ("failed", "node_rebooted")

    assert innocent.poll() is None
    await eventually(lambda: left_of(place, id) == [])
