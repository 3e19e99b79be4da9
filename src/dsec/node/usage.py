"""What sandboxes have used: a record of each that has ended, kept for a while, and sums by day, kept for longer.

Both are written with the tombstone, in one transaction: what has ended is counted once.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.core.errors import InvalidArgumentError, NotFoundError
from dsec.core.limits import USAGE_DAYS_KEEP_S, USAGE_DAYS_MAX, USAGE_JOBS_MAX, USAGE_RECORDS_KEEP_S, USAGE_RECORDS_MAX
from dsec.node.rights import project_seen, reaches
from dsec.node.rows import Tombstone
from dsec.wire.codec import pack, unpack
from dsec.wire.node import Caller
from dsec.wire.records import Sandbox, Usage
from dsec.wire.usage import UsageBy, UsagePage, UsageQuery, UsageRecord, UsageTotal, added

if TYPE_CHECKING:
    from dsec.node.journal import Journal
    from dsec.node.registry import Registry

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS usage (
    id TEXT PRIMARY KEY, project TEXT NOT NULL, ended_at REAL NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_ended ON usage (ended_at, id);
CREATE TABLE IF NOT EXISTS usage_days (
    project TEXT NOT NULL, day INTEGER NOT NULL, sandboxes INTEGER NOT NULL, cpu_s REAL NOT NULL,
    memory_gib_s REAL NOT NULL, frozen_s REAL NOT NULL, lived_s REAL NOT NULL, output_bytes INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL DEFAULT 0, received_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (project, day)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_days_day ON usage_days (day);
CREATE TABLE IF NOT EXISTS usage_jobs (
    project TEXT NOT NULL, job TEXT NOT NULL, ended_at REAL NOT NULL, sandboxes INTEGER NOT NULL, cpu_s REAL NOT NULL,
    memory_gib_s REAL NOT NULL, frozen_s REAL NOT NULL, lived_s REAL NOT NULL, output_bytes INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL DEFAULT 0, received_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (project, job)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_jobs_ended ON usage_jobs (ended_at);
"""
_DAY_S: Final = 86_400
_SUMS: Final = "sandboxes, cpu_s, memory_gib_s, frozen_s, lived_s, output_bytes, sent_bytes, received_bytes"
_LATER: Final = ("sent_bytes", "received_bytes")  # columns that the tables of earlier versions lack
_ADDED: Final = (
    "sandboxes = sandboxes + 1, cpu_s = cpu_s + excluded.cpu_s, memory_gib_s = memory_gib_s + excluded.memory_gib_s, "
    "frozen_s = frozen_s + excluded.frozen_s, lived_s = lived_s + excluded.lived_s, "
    "output_bytes = output_bytes + excluded.output_bytes, sent_bytes = sent_bytes + excluded.sent_bytes, "
    "received_bytes = received_bytes + excluded.received_bytes"
)
_END: Final = 1e18
_SCANNED_MAX: Final = 5_000  # records that are looked at for a page of one job; it may come short, with a cursor


def widen_usage(db: sqlite3.Connection) -> None:
    """Of a journal that an earlier version has made; that one can go on with it, too."""
    for table in ("usage_days", "usage_jobs"):
        known = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
        for column in _LATER:
            if column not in known:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


def put_usage(db: sqlite3.Connection, tombstone: Tombstone) -> None:
    record = record_of(tombstone.sandbox, tombstone.principal)
    ended_at = record.ended_at or 0.0
    done = db.execute(
        "INSERT OR IGNORE INTO usage (id, project, ended_at, body) VALUES (?, ?, ?, ?)",
        (record.sandbox, record.project, ended_at, pack(record)),
    )
    if done.rowcount != 1:
        return
    sums = (
        *(record.cpu_s, record.memory_gib_s, record.frozen_s, record.lived_s),
        *(record.output_bytes, record.sent_bytes, record.received_bytes),
    )
    db.execute(
        f"INSERT INTO usage_days (project, day, {_SUMS}) VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (project, day) DO UPDATE SET {_ADDED}",
        (record.project, int(ended_at // _DAY_S), *sums),
    )
    if record.job is not None:
        db.execute(
            f"INSERT INTO usage_jobs (project, job, ended_at, {_SUMS}) VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?) "
            f"ON CONFLICT (project, job) DO UPDATE SET ended_at = excluded.ended_at, {_ADDED}",
            (record.project, record.job, ended_at, *sums),
        )


def prune_usage(db: sqlite3.Connection, now: float) -> None:
    db.execute("DELETE FROM usage WHERE ended_at < ?", (now - USAGE_RECORDS_KEEP_S,))
    db.execute("DELETE FROM usage_days WHERE day < ?", (int((now - USAGE_DAYS_KEEP_S) // _DAY_S),))
    db.execute("DELETE FROM usage_jobs WHERE ended_at < ?", (now - USAGE_DAYS_KEEP_S,))
    for table, key, order, most in (
        ("usage", "id", "ended_at, id", USAGE_RECORDS_MAX),
        ("usage_days", "project, day", "day, project", USAGE_DAYS_MAX),
        ("usage_jobs", "project, job", "ended_at, project, job", USAGE_JOBS_MAX),
    ):
        (count,) = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
        if count > most:
            db.execute(
                f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} ORDER BY {order} LIMIT ?)",
                (count - most,),
            )


def record_of(sandbox: Sandbox, principal: str) -> UsageRecord:
    used = sandbox.usage or Usage()
    return UsageRecord(
        sandbox=sandbox.id,
        project=sandbox.project,
        principal=principal,
        job=sandbox.job,
        substrate=sandbox.substrate,
        environment=sandbox.environment,
        created_at=sandbox.created_at,
        ended_at=sandbox.ended_at,
        cause=sandbox.cause,
        cpu=sandbox.cpu,
        memory_bytes=sandbox.memory_bytes,
        cpu_s=used.cpu_s,
        memory_gib_s=used.memory_gib_s,
        frozen_s=used.frozen_s,
        lived_s=used.lived_s,
        output_bytes=used.output_bytes,
        sent_bytes=used.sent_bytes,
        received_bytes=used.received_bytes,
    )


def total_of(record: UsageRecord, day: int | None) -> UsageTotal:
    return UsageTotal(
        project=record.project,
        day=None if day is None else _shown(day),
        sandboxes=1,
        cpu_s=record.cpu_s,
        memory_gib_s=record.memory_gib_s,
        frozen_s=record.frozen_s,
        lived_s=record.lived_s,
        output_bytes=record.output_bytes,
        sent_bytes=record.sent_bytes,
        received_bytes=record.received_bytes,
    )


async def usage_page(query: UsageQuery, caller: Caller, registry: Registry, journal: Journal, now: float) -> UsagePage:
    """Raises NotFoundError for a project that the caller does not reach, InvalidArgumentError for a bad cursor."""
    seen = project_seen(caller)
    project = query.project if query.project is not None else caller.project
    if not reaches(seen, project):
        raise NotFoundError(f"there is no project {project[:80]!r}")
    until = _END if query.until is None else query.until
    living = []
    if until > now:
        for sandbox in registry:
            if reaches(project, sandbox.row.project) and query.job in (None, sandbox.row.spec.job):
                await sandbox.sample()
                living.append(record_of(sandbox.view(), sandbox.row.principal))
    if query.by is UsageBy.SANDBOX:
        return _records(query, project, until, living, journal)
    if query.by is UsageBy.JOB:
        return UsagePage(totals=_jobs(query, project, until, living, journal))
    return UsagePage(totals=_totals(query, project, until, living, journal, now))


def _totals(
    query: UsageQuery, project: str, until: float, living: Iterable[UsageRecord], journal: Journal, now: float
) -> list[UsageTotal]:
    by_day = query.by is UsageBy.DAY
    below, values = _below(project)
    days = (int(query.since // _DAY_S), int(min(until, _END) // _DAY_S) + (until % _DAY_S > 0))
    rows = journal.read(
        f"SELECT project, day, {_SUMS} FROM usage_days WHERE day >= ? AND day < ? AND {below}", (*days, *values)
    )
    found: dict[tuple[str, int | None], UsageTotal] = {}
    for path, day, *sums in rows:
        total = UsageTotal(
            project=path,
            day=_shown(day) if by_day else None,
            sandboxes=sums[0],
            cpu_s=sums[1],
            memory_gib_s=sums[2],
            frozen_s=sums[3],
            lived_s=sums[4],
            output_bytes=sums[5],
            sent_bytes=sums[6],
            received_bytes=sums[7],
        )
        _add(found, (path, day if by_day else None), total)
    today = int(now // _DAY_S)
    for record in living:
        day = today if by_day else None
        _add(found, (record.project, day), total_of(record, day))
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or 0))]


def _jobs(
    query: UsageQuery, project: str, until: float, living: Iterable[UsageRecord], journal: Journal
) -> list[UsageTotal]:
    below, values = _below(project)
    rows = journal.read(
        f"SELECT project, job, {_SUMS} FROM usage_jobs WHERE ended_at >= ? AND ended_at < ? AND {below}",
        (query.since, until, *values),
    )
    found: dict[tuple[str, str], UsageTotal] = {}
    for path, job, *sums in rows:
        if query.job in (None, job):
            found[path, job] = UsageTotal(
                project=path,
                job=job,
                sandboxes=sums[0],
                cpu_s=sums[1],
                memory_gib_s=sums[2],
                frozen_s=sums[3],
                lived_s=sums[4],
                output_bytes=sums[5],
                sent_bytes=sums[6],
                received_bytes=sums[7],
            )
    for record in living:
        if record.job is not None:
            total = msgspec.structs.replace(total_of(record, None), job=record.job)
            known = found.get((record.project, record.job))
            found[record.project, record.job] = total if known is None else added(known, total)
    return [found[key] for key in sorted(found)]


def _records(query: UsageQuery, project: str, until: float, living: list[UsageRecord], journal: Journal) -> UsagePage:
    """Those that live, oldest first, then those that have ended, newest first."""
    kind, at, id = _parse_cursor(query.cursor)
    living.sort(key=lambda record: (record.created_at, record.sandbox))
    found = [record for record in living if kind == "l" and (record.created_at, record.sandbox) > (at, id)]
    found = found[: query.limit]
    if len(found) == query.limit:
        last = found[-1]
        return UsagePage(records=found, next=f"l:{last.created_at!r}:{last.sandbox}")
    below, values = _below(project)
    before = (at, id) if kind == "e" else (until, "")
    rows = journal.read(
        f"SELECT body FROM usage WHERE (ended_at, id) < (?, ?) AND ended_at >= ? AND ended_at < ? AND {below} "
        "ORDER BY ended_at DESC, id DESC LIMIT ?",
        (*before, query.since, until, *values, (query.limit - len(found) if query.job is None else _SCANNED_MAX) + 1),
    )
    seen: UsageRecord | None = None
    for scanned, (body,) in enumerate(rows):
        if len(found) == query.limit or scanned == _SCANNED_MAX:
            assert seen is not None  # a page that is full of those that live has been answered above
            return UsagePage(records=found, next=f"e:{seen.ended_at!r}:{seen.sandbox}")
        seen = unpack(body, UsageRecord)
        if query.job in (None, seen.job):
            found.append(seen)
    return UsagePage(records=found)


def _parse_cursor(cursor: str | None) -> tuple[str, float, str]:
    if cursor is None:
        return "l", -1.0, ""
    kind, _, rest = cursor[:128].partition(":")
    moment, _, id = rest.partition(":")
    try:
        at = float(moment)
    except ValueError as error:
        raise InvalidArgumentError(f"{cursor[:80]!r} is not a cursor of usage") from error
    if kind not in ("l", "e"):
        raise InvalidArgumentError(f"{cursor[:80]!r} is not a cursor of usage")
    return kind, at, id


def _below(project: str) -> tuple[str, tuple[str, ...]]:
    """SQL for the project and those below it. "0" is what comes after "/"."""
    if project == "/":
        return "1", ()
    return "(project = ? OR (project > ? AND project < ?))", (project, f"{project}/", f"{project}0")


def _add(found: dict[tuple[str, int | None], UsageTotal], key: tuple[str, int | None], total: UsageTotal) -> None:
    known = found.get(key)
    found[key] = total if known is None else added(known, total)


def _shown(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * _DAY_S))
