"""Who did what in a cluster: each replica writes down what was asked of it, and tells the log, which all read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

import msgspec

from dsec.cluster.log import Log, LogStream
from dsec.core.errors import DsecError, InvalidArgumentError, ProtocolError
from dsec.core.limits import LIST_PAGE_MAX
from dsec.iam.audit import Audit
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.iam import AuditEntry, AuditPage

log = get_logger(__name__)

_TELL_S: Final = 0.5
_RETRY_S: Final = 2.0
_BATCH: Final = 100  # entries of one record: some 60 KiB at most
_WINDOW: Final = 64  # records that are looked at together, from the end
_SCAN_MAX: Final = 20_000  # entries that one page looks at: most may be other projects'
_CURSOR: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,9})\Z")


class AuditBatch(msgspec.Struct, frozen=True):
    entries: tuple[AuditEntry, ...] = ()


class SharedAudit:
    """`iam.audit.AuditLog`. While the log is away entries wait in the replica's own file, and are told then."""

    def __init__(self, own: Audit, events: Log) -> None:
        self._own = own
        self._log = events
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._tell(), name="tell the audit log")

    @property
    def lost(self) -> int:
        return self._own.lost

    def note(self, entry: AuditEntry) -> None:
        self._own.note(entry)
        self._news.set()

    async def page(
        self, sees: Callable[[str], bool], *, after: str | None, limit: int, principal: str | None = None
    ) -> AuditPage:
        """As `Audit.page`, of all replicas; what was done a moment ago may come a moment later."""
        await self._tell_now()
        oldest, last = await self._log.bounds(LogStream.AUDIT)
        upper = (last + 1, 0) if after is None else _parse(after)
        limit = min(limit, LIST_PAGE_MAX)
        found: list[AuditEntry] = []
        scanned = 0
        while (below := upper[0] - 1 if upper[1] == 0 else upper[0]) >= oldest:
            first = max(below - _WINDOW, 0)
            records = await self._log.read(LogStream.AUDIT, "", after=first, limit=_WINDOW)
            for record in reversed([one for one in records if one.sequence <= below]):
                entries = _entries(record.body)
                if record.sequence == upper[0] and upper[1]:
                    entries = entries[: upper[1] - 1]
                for index in range(len(entries), 0, -1):
                    upper, entry = (record.sequence, index), entries[index - 1]
                    scanned += 1
                    if sees(entry.project) and principal in (None, entry.principal):
                        found.append(entry)
                    if len(found) == limit or scanned >= _SCAN_MAX:
                        return AuditPage(found, next=f"{upper[0]}.{upper[1]}", lost=self.lost)
            upper = (first + 1, 0)
        return AuditPage(found, next=None, lost=self.lost)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(_RETRY_S):
                await self._tell_now()
        except (DsecError, TimeoutError) as error:
            log.warning("entries of the audit log wait for the next start", error=str(error))
        await self._own.close()

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(_TELL_S)
            try:
                await self._tell_now()
            except DsecError as error:
                log.info("the audit log cannot be told now", why=error.message)
                await asyncio.sleep(_RETRY_S)
                self._news.set()

    async def _tell_now(self) -> None:
        """Raises UnavailableError, StorageError."""
        async with self._own.telling:
            while entries := await self._own.untold(_BATCH):
                id = f"audit-{self._own.id}-{entries[0].seq}-{entries[-1].seq}"
                subject = f"api.{self._own.id}"
                await self._log.append(LogStream.AUDIT, subject, pack(AuditBatch(tuple(entries))), id=id)
                await self._own.keep_told(entries[-1].seq)


def _entries(body: bytes) -> tuple[AuditEntry, ...]:
    try:
        return unpack(body, AuditBatch).entries
    except ProtocolError:
        log.warning("a record of the audit log cannot be read")
        return ()


def _parse(cursor: str) -> tuple[int, int]:
    found = _CURSOR.match(cursor)
    if found is None:
        raise InvalidArgumentError(f"{cursor[:40]!r} is not a cursor of the audit log")
    return int(found[1]), int(found[2])
