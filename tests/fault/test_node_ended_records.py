"""Records of ended sandboxes when the node is killed or restarted: whole or gone, and never more than there may be."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import GoneError
from dsec.core.ids import new_sandbox_id
from dsec.node.endedrecords import EndedRecords
from dsec.testing.nodes import NodeClient, crash, make_fake_node
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.frames import Frame
from dsec.wire.node import Method, OutputQuery
from tests.node_calls import create, destroy, output_of, start


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@asynccontextmanager
async def running(state: Path, host: FakeHost, **settings: object) -> AsyncIterator[NodeClient]:
    node = make_fake_node(state, host=host, **settings)  # type: ignore[arg-type]
    await node.start()
    try:
        yield NodeClient(node)
    finally:
        await node.close()


async def frames_of(client: NodeClient, sandbox: str, exec: str) -> list[Frame]:
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox, exec=exec)) as stream:
        return await stream.all()


async def lived(client: NodeClient, shell: str) -> tuple[str, str]:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, shell=shell)
    await destroy(client, sandbox.id)
    return sandbox.id, answer.exec.id


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_the_next_node_has_them(tmp_path: Path, host: FakeHost, how: str) -> None:
    async with running(tmp_path, host) as client:
        small, large = await lived(client, "echo said; exit 3"), await lived(client, "seq 1 40000")
        if how == "killed":
            await crash(client.node)

    async with running(tmp_path, host) as client:
        frames = await frames_of(client, *small)
        assert output_of(frames)[1] == b"said\n"
        assert unpack(frames[-1].body, records.ExecInfo).exit_code == 3
        assert output_of(await frames_of(client, *large))[1].endswith(b"\n40000\n")
        assert client.node.ended.bytes > 200_000


async def test_a_kill_between_tombstone_and_move_loses_nothing(
    tmp_path: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(EndedRecords, "keep", lambda *_: None)
        async with running(tmp_path, host) as client:
            sandbox, exec = await lived(client, "echo said")
            assert names(client.node.config.records_dir) == {sandbox}
            await crash(client.node)

    async with running(tmp_path, host) as client:
        assert names(client.node.config.records_dir) == set()
        assert output_of(await frames_of(client, sandbox, exec))[1] == b"said\n"


async def test_commands_of_before_a_reboot_have_ended_with_it(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        done = await start(client, sandbox.id, "echo", "done")
        large = await start(client, sandbox.id, shell="head -c 3000000 /dev/zero; sleep 600", wait_s=0.5)
        quiet = await start(client, sandbox.id, "sleep", "600", wait_s=None)
        await crash(client.node)
    await host.reboot()

    async with running(tmp_path, host, boot_id="another") as client:
        page = await client.call(Method.EXEC_LIST, records.SandboxRef(sandbox.id), records.ExecPage)
        ends = {info.id: (info.state, info.status, info.cause) for info in page.execs}
        assert ends == {
            done.exec.id: ("ended", "exited", None),
            large.exec.id: ("ended", "unknown", "agent_lost"),
            quiet.exec.id: ("ended", "unknown", "agent_lost"),
        }
        assert output_of(await frames_of(client, sandbox.id, done.exec.id))[1] == b"done\n"
        told = page.execs[1]
        assert told.out_bytes > 0, "what was acknowledged was on record"
        for _ in range(2):  # it is read in and let go each time
            assert len(output_of(await frames_of(client, sandbox.id, large.exec.id))[1]) == told.out_bytes
        assert output_of(await frames_of(client, sandbox.id, quiet.exec.id))[1] == b""


async def test_what_has_no_tombstone_and_what_is_half_removed_goes(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox, _ = await lived(client, "echo said")
        ended = client.node.config.ended_dir
        for name in (new_sandbox_id(client.node.id), ".removed-sbx", "what"):
            (ended / name).mkdir()
            (ended / name / "execs.log").write_bytes(b"x")
        (ended / "file").write_bytes(b"x")

    async with running(tmp_path, host) as client:
        assert names(ended) == {sandbox}
        assert len(client.node.ended) == 1


async def test_a_tombstone_that_cannot_be_read_keeps_no_node_from_starting(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox, _ = await lived(client, "echo said")
        ended = client.node.config.ended_dir
    with closing(sqlite3.connect(tmp_path / "state" / "journal.db", isolation_level=None)) as db:
        db.execute("UPDATE tombstones SET body = x'00' WHERE id = ?", (sandbox,))

    async with running(tmp_path, host):
        assert names(ended) == set()


async def test_the_next_node_may_keep_less(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        made = [await lived(client, "head -c 400000 /dev/zero") for _ in range(4)]

    async with running(tmp_path, host, ended_records_bytes_max=1_000_000) as client:
        for sandbox, exec in made[2:]:
            assert len(output_of(await frames_of(client, sandbox, exec))[1]) == 400_000
        with pytest.raises(GoneError):
            await frames_of(client, *made[0])
        ended = client.node.config.ended_dir
    assert names(ended) == {sandbox for sandbox, _ in made[2:]}, "closing waits for what is being removed"


async def test_a_create_that_failed_keeps_nothing(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        sandbox = await create(client)
        await start(client, sandbox.id, "echo", "said")
        found = client.node.registry.find(sandbox.id)
        assert found is not None
        assert await found.abandon("a test")

        assert names(client.node.config.records_dir) == names(client.node.config.ended_dir) == set()


async def test_they_are_no_reason_to_want_a_lost_journal_back(tmp_path: Path, host: FakeHost) -> None:
    async with running(tmp_path, host) as client:
        await lived(client, "echo said")
        ended = client.node.config.ended_dir
    for path in (tmp_path / "state").glob("journal.db*"):
        path.unlink()

    async with running(tmp_path, host):
        assert names(ended) == set()
