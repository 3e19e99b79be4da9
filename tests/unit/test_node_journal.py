"""The journal: what it keeps, in which order, what it refuses, and what a broken one does."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from dsec.core import limits
from dsec.core.errors import HostError, StorageError
from dsec.node import journalwriter
from dsec.node.journal import Journal
from dsec.node.rows import KeyRow, SandboxRow, Tombstone
from dsec.testing.nodes import FAKE_SPEC
from dsec.wire.codec import pack
from dsec.wire.records import Sandbox


def row_of(id: str, **changes: object) -> SandboxRow:
    fields = {
        "id": id,
        "project": "/p",
        "principal": "me",
        "spec": FAKE_SPEC,
        "state": "creating",
        "boot_id": "b",
        "created_at": 1.0,
    }
    return SandboxRow(**{**fields, **changes})  # type: ignore[arg-type]


def key_of(key: str, sandbox: str, at: float = 1.0) -> KeyRow:
    return KeyRow(project="/p", key=key, request_hash=b"h", sandbox=sandbox, at=at)


def tombstone_of(id: str, *, created_at: float = 1.0, ended_at: float = 2.0) -> Tombstone:
    return Tombstone(
        sandbox=Sandbox(
            id=id,
            state="gone",
            node="n",
            substrate="fake",
            environment="base",
            project="/p",
            created_at=created_at,
            ended_at=ended_at,
            cpu=1.0,
            memory_bytes=1,
            disk_bytes=1,
            pids_max=1,
            network="none",
        )
    )


async def test_rows_and_keys_are_there_again_after_opening(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    await journal.intend(row_of("a"), key_of("k", "a"))
    await journal.put(row_of("a", state="running", record=b"xyz"))
    await journal.close()

    again = await Journal.open(tmp_path / "j.db")

    assert again.sandboxes() == [row_of("a", state="running", record=b"xyz")]
    assert again.key("/p", "k") == key_of("k", "a")
    assert again.key("/other", "k") is None
    await again.close()


async def test_the_node_keeps_the_id_that_was_minted_once(tmp_path: Path) -> None:
    first = await Journal.open(tmp_path / "j.db")
    await first.close()
    again = await Journal.open(tmp_path / "j.db")
    other = await Journal.open(tmp_path / "other.db")

    assert first.node_id == again.node_id
    assert other.node_id != again.node_id
    await again.close()
    await other.close()


async def test_what_was_written_is_on_the_disk_when_the_write_returns(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")

    await journal.put(row_of("a"))

    with sqlite3.connect(tmp_path / "j.db") as other:
        assert other.execute("SELECT id FROM sandboxes").fetchall() == [("a",)]
    other.close()
    await journal.close()


async def test_a_burst_shares_its_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    batches: list[int] = []
    transact = journalwriter._transact
    monkeypatch.setattr(journalwriter, "_transact", lambda db, batch: (batches.append(len(batch)), transact(db, batch)))

    await asyncio.gather(*(journal.intend(row_of(f"s{i}"), None) for i in range(200)))

    assert sum(batches) == 200
    assert len(batches) < 100
    assert len(journal.sandboxes()) == 200
    await journal.close()


async def test_a_write_that_fails_harms_none_of_its_batch(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")

    results = await asyncio.gather(
        journal.put(row_of("a")),
        journal._submit(lambda db: db.execute("INSERT INTO nothing VALUES (1)")),
        journal.put(row_of("b")),
        return_exceptions=True,
    )

    assert [type(result) for result in results] == [type(None), StorageError, type(None)]
    assert {row.id for row in journal.sandboxes()} == {"a", "b"}
    await journal.close()


async def test_whoever_copies_the_journal_holds_up_writes_and_nothing_else(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    other = sqlite3.connect(tmp_path / "j.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    writing = [asyncio.create_task(journal.put(row_of(id))) for id in "ab"]
    await asyncio.wait(writing, timeout=0.05)
    writing.append(asyncio.create_task(journal.put(row_of("a", state="running"))))
    await asyncio.wait(writing, timeout=0.05)
    assert not any(task.done() for task in writing)

    other.execute("ROLLBACK")
    other.close()
    await asyncio.gather(*writing)
    assert {(row.id, row.state) for row in journal.sandboxes()} == {("a", "running"), ("b", "creating")}
    await journal.close()


async def test_what_is_asked_for_until_the_end_is_written(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    writing = [asyncio.create_task(journal.put(row_of(f"s{i}"))) for i in range(1_000)]
    writing.append(asyncio.create_task(journal.prune(0.0)))
    await asyncio.sleep(0)

    await journal.close()
    await asyncio.gather(*writing)

    with pytest.raises(StorageError, match="closed"):
        await journal.put(row_of("late"))
    again = await Journal.open(tmp_path / "j.db")
    assert len(again.sandboxes()) == 1_000
    await again.close()


async def test_the_log_does_not_grow_with_the_number_of_writes(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    sizes = []
    for _ in range(4):
        for i in range(500):
            await journal.put(row_of(f"s{i % 50}", record=b"x" * 3_000))
        sizes.append((tmp_path / "j.db-wal").stat().st_size)

    assert sizes[-1] <= 2 * sizes[0] < 32 << 20
    await journal.close()


async def test_a_failed_create_frees_its_key(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    await journal.intend(row_of("a"), key_of("k", "a"))

    await journal.forget(row_of("a", key="k"))

    assert journal.sandboxes() == []
    assert journal.key("/p", "k") is None
    await journal.close()


async def test_a_buried_sandbox_is_a_tombstone_and_no_row(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    await journal.intend(row_of("a"), None)

    await journal.bury(tombstone_of("a"))

    assert journal.sandboxes() == []
    assert journal.tombstone("a") == tombstone_of("a")
    assert journal.tombstone("b") is None
    await journal.close()


async def test_tombstones_come_in_order_of_creation_and_by_pages(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    for id, created_at in (("c", 1.0), ("a", 2.0), ("b", 2.0), ("d", 0.5)):
        await journal.bury(tombstone_of(id, created_at=created_at))

    first = journal.tombstones((0.0, ""), 3)
    rest = journal.tombstones((2.0, "a"), 3)

    assert [t.sandbox.id for t in first] == ["d", "c", "a"]
    assert [t.sandbox.id for t in rest] == ["b"]
    await journal.close()


async def test_pruning_drops_what_is_over_and_the_oldest_above_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    now = 10 * limits.TOMBSTONE_TTL_S
    monkeypatch.setattr(limits, "TOMBSTONES_MAX", 3)
    monkeypatch.setattr(limits, "IDEMPOTENCY_KEYS_MAX", 2)
    for i, ended_at in enumerate((1.0, now - 9, now - 8, now - 7, now - 6)):
        await journal.bury(tombstone_of(f"t{i}", ended_at=ended_at))
        await journal.intend(row_of(f"s{i}"), key_of(f"k{i}", f"s{i}", at=ended_at))

    await journal.prune(now)

    assert [t.sandbox.id for t in journal.tombstones((0.0, ""), 10)] == ["t2", "t3", "t4"]
    assert [journal.key("/p", f"k{i}") is not None for i in range(5)] == [False, False, False, True, True]
    await journal.close()


async def test_a_journal_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE future (x)")
        db.execute("PRAGMA user_version = 99")
    db.close()

    with pytest.raises(HostError, match="newer version"):
        await Journal.open(path)

    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("future",)]
    db.close()


async def test_a_file_that_is_no_journal_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "j.db").write_bytes(b"this is not a database, whatever its name" * 100)

    with pytest.raises(StorageError):
        await Journal.open(tmp_path / "j.db")


async def test_rows_with_fields_of_a_newer_version_are_read(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    import msgspec

    fields = {**msgspec.to_builtins(row_of("a"), builtin_types=(bytes,)), "invented_later": 1, "version": 2}
    await journal._submit(lambda db: db.execute("INSERT INTO sandboxes (id, body) VALUES ('a', ?)", (pack(fields),)))

    assert journal.sandboxes()[0].version == 2
    await journal.close()


async def test_closing_twice_is_fine_and_writes_afterwards_are_refused(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j.db")
    await journal.close()
    await journal.close()

    with pytest.raises(StorageError):
        await journal.put(row_of("a"))
