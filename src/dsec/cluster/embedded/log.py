"""The Log of one machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from typing import Final

from dsec.cluster.embedded.database import Database
from dsec.cluster.log import LogStream, Record, check_record, check_subject
from dsec.core.errors import ConflictError
from dsec.core.limits import LOG_READ_MAX

_PAGE: Final = 256


class EmbeddedLog:
    """Ids are remembered as long as their records."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._news = asyncio.Condition()

    async def append(self, stream: LogStream, subject: str, body: bytes, *, id: str, after: int | None = None) -> int:
        check_subject(subject)
        check_record(body, id)

        def work(db: sqlite3.Connection) -> int:
            known = db.execute("SELECT sequence FROM log WHERE stream = ? AND id = ?", (stream, id)).fetchone()
            if known:
                return int(known[0])
            last = _last(db, stream, subject)
            if after is not None and after != (last.sequence if last else 0):
                raise ConflictError(f"the last record of {subject} is not {after} any more")
            insert = "INSERT INTO log (stream, subject, id, body) VALUES (?, ?, ?, ?)"
            return int(db.execute(insert, (stream, subject, id, body)).lastrowid or 0)

        sequence = await self._database.run(work)
        async with self._news:
            self._news.notify_all()
        return sequence

    async def read(self, stream: LogStream, subject: str, *, after: int = 0, limit: int = _PAGE) -> list[Record]:
        if subject:
            check_subject(subject)
        limit = min(limit, LOG_READ_MAX)
        return await self._database.run(lambda db: _read(db, stream, subject, after, limit))

    async def bounds(self, stream: LogStream) -> tuple[int, int]:
        def work(db: sqlite3.Connection) -> tuple[int, int]:
            bounds = "SELECT MIN(sequence), MAX(sequence) FROM log WHERE stream = ?"
            first, last = db.execute(bounds, (stream,)).fetchone()
            if first is None:  # others of its streams count with it
                last = db.execute("SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()[0]
                first = last + 1
            return int(first), int(last)

        return await self._database.run(work)

    async def last(self, stream: LogStream, subject: str) -> Record | None:
        check_subject(subject)
        return await self._database.run(lambda db: _last(db, stream, subject))

    async def follow(self, stream: LogStream, subject: str = "", *, after: int = 0) -> AsyncGenerator[Record, None]:
        while True:
            async with self._news:
                # Read with the lock held: what is appended meanwhile is told after the wait has begun.
                found = await self.read(stream, subject, after=after)
                if not found:
                    await self._news.wait()
            for record in found:
                after = record.sequence
                yield record

    async def purge(self, stream: LogStream, subject: str) -> None:
        check_subject(subject)
        where, values = _below(subject)
        await self._database.run(lambda db: db.execute(f"DELETE FROM log WHERE stream = ?{where}", (stream, *values)))


def _below(subject: str) -> tuple[str, tuple[str, ...]]:
    if not subject:
        return "", ()
    # "/" follows "." in ASCII: all that begins with the subject and a dot, and nothing else.
    return " AND (subject = ? OR (subject > ? AND subject < ?))", (subject, subject + ".", subject + "/")


def _read(db: sqlite3.Connection, stream: str, subject: str, after: int, limit: int) -> list[Record]:
    where, values = _below(subject)
    select = (
        f"SELECT sequence, subject, body FROM log WHERE stream = ? AND sequence > ?{where} ORDER BY sequence LIMIT ?"
    )
    return [Record(*row) for row in db.execute(select, (stream, after, *values, limit)).fetchall()]


def _last(db: sqlite3.Connection, stream: str, subject: str) -> Record | None:
    select = "SELECT sequence, subject, body FROM log WHERE stream = ? AND subject = ? ORDER BY sequence DESC LIMIT 1"
    found = db.execute(select, (stream, subject)).fetchone()
    return Record(*found) if found else None
