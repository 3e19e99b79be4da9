"""A journal that is damaged, empty or gone: the node says which file it is and what to do, and never begins anew while
there are sandboxes."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import StorageError
from dsec.core.ids import new_exec_id
from dsec.node.journal import Journal
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, make_fake_node
from dsec.wire import records
from dsec.wire.node import ExecStart, Method


async def a_node_that_was_killed(state: Path, host: FakeHost) -> str:
    """Its sandbox runs on, and has run a command."""
    node = make_fake_node(state, host=host)
    await node.start()
    client = NodeClient(node)
    sandbox = await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    request = records.ExecRequest(id=new_exec_id(), shell="true", wait_s=60.0)
    await client.call(Method.EXEC_START, ExecStart(sandbox.id, request), records.ExecAnswer)
    await crash(node)
    return sandbox.id


def fold_the_log_in(path: Path) -> None:
    """What was written last is in a file beside it until then."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def cut_in_half(path: Path) -> None:
    fold_the_log_in(path)
    os.truncate(path, path.stat().st_size // 2)


def overwrite_its_middle(path: Path) -> None:
    fold_the_log_in(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4_096)
        file.write(os.urandom(size - 4_096))


def make_it_something_else(path: Path) -> None:
    fold_the_log_in(path)
    path.write_bytes(b"not a database" * 1_000)


def spoil_a_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sandboxes SET body = x'ff00ff'")
    db.close()


def empty_it(path: Path) -> None:
    fold_the_log_in(path)
    path.write_bytes(b"")


def remove_it(path: Path) -> None:
    for name in path.parent.glob(f"{path.name}*"):
        name.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_in_half, "damaged"),
        (overwrite_its_middle, "damaged"),
        (make_it_something_else, "damaged"),
        (spoil_a_row, "damaged"),
        (empty_it, "missing or empty"),
        (remove_it, "missing or empty"),
    ],
)
async def test_a_journal_that_cannot_be_read_stops_the_start_and_says_what_to_do(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    host = FakeHost()
    await a_node_that_was_killed(tmp_path, host)
    node = make_fake_node(tmp_path, host=host)
    damage(node.config.journal_path)

    with pytest.raises(StorageError) as refused:
        await node.start()

    assert said in refused.value.message
    assert str(node.config.journal_path) in refused.value.message
    assert refused.value.hint
    assert host.leftovers() != [], "what runs is left alone"


async def test_a_journal_that_is_put_back_serves_again(tmp_path: Path) -> None:
    host = FakeHost()
    id = await a_node_that_was_killed(tmp_path, host)
    node = make_fake_node(tmp_path, host=host)
    path = node.config.journal_path
    fold_the_log_in(path)
    whole = path.read_bytes()
    cut_in_half(path)
    with pytest.raises(StorageError):
        await node.start()

    path.write_bytes(whole)
    node = make_fake_node(tmp_path, host=host)
    await node.start()

    view = await NodeClient(node).call(Method.GET, records.SandboxRef(id), records.Sandbox)
    assert view.state == "running"
    await node.close()


async def test_what_a_killed_writer_left_half_written_is_as_if_never_asked_for(tmp_path: Path) -> None:
    host = FakeHost()
    id = await a_node_that_was_killed(tmp_path, host)
    node = make_fake_node(tmp_path, host=host)
    log = Path(f"{node.config.journal_path}-wal")
    log.write_bytes((log.read_bytes() if log.exists() else b"") + b"half a frame" * 100)

    await node.start()

    view = await NodeClient(node).call(Method.GET, records.SandboxRef(id), records.Sandbox)
    assert view.state == "running"
    await node.close()


async def test_a_new_node_begins_without_a_journal(tmp_path: Path) -> None:
    (tmp_path / "state" / "layers" / "sbx_not-an-id").mkdir(parents=True)
    node = make_fake_node(tmp_path)

    await node.start()

    assert node.journal.sandboxes() == []
    await node.close()


async def test_a_journal_that_another_program_holds_is_told_and_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.journalwriter._BUSY_S", 0.05)
    journal = await Journal.open(tmp_path / "journal.db")
    holder = sqlite3.connect(journal.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")

    with pytest.raises(StorageError) as refused:
        await journal.prune(0.0)
    holder.execute("ROLLBACK")
    holder.close()
    await journal.prune(0.0)

    assert isinstance(refused.value.__cause__, sqlite3.OperationalError)
    await journal.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
async def test_a_journal_in_a_directory_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StorageError, match="cannot be used"):
        await Journal.open(tmp_path / "journal.db")
    tmp_path.chmod(stat.S_IRWXU)
