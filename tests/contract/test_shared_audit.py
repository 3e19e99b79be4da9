"""The audit log of several replicas: in this process and on NATS the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.api.sharedaudit import SharedAudit
from dsec.cluster.log import Log, LogStream
from dsec.core.errors import InvalidArgumentError, UnavailableError
from dsec.iam.audit import Audit
from dsec.testing.nats_servers import NatsServers
from dsec.testing.shared_state import FORMS, state_of
from dsec.testing.waiting import eventually
from dsec.wire.iam import AuditEntry

_NOW = time.time()  # older ones than ninety days go


@pytest.fixture(params=FORMS)
async def log(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[Log]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state.log


@contextlib.asynccontextmanager
async def replica(log: Log, path: Path) -> AsyncIterator[SharedAudit]:
    audit = SharedAudit(Audit.open(path), log)
    try:
        yield audit
    finally:
        await audit.close()


def entry(number: int, project: str = "/team") -> AuditEntry:
    return AuditEntry(at=_NOW + number, principal=f"p{number % 2}@/team", project=project, action="create_sandbox")


async def pages(audit: SharedAudit, project: str = "/team", **more: Any) -> list[float]:
    found: list[float] = []
    cursor = None
    while True:
        page = await audit.page(lambda of: of == project, after=cursor, limit=7, **more)
        found += [round(entry.at - _NOW) for entry in page.entries]
        if page.next is None:
            return found
        cursor = page.next


async def test_any_replica_tells_what_was_asked_of_all_newest_first(log: Log, tmp_path: Path) -> None:
    async with replica(log, tmp_path / "1.db") as one, replica(log, tmp_path / "2.db") as two:
        for number in range(150):
            one.note(entry(number))
        await pages(one)
        two.note(entry(200))
        two.note(entry(201, "/other"))
        await pages(two)
        one.note(entry(300))

        assert await pages(one) == [300, 200, *range(149, -1, -1)]
        assert await pages(two) == [300, 200, *range(149, -1, -1)]
        assert await pages(two, "/other") == [201]
        assert await pages(one, principal="p1@/team") == list(range(149, 0, -2))
        assert await pages(one, "/nobody") == []
        with pytest.raises(InvalidArgumentError):
            await one.page(lambda _: True, after="x", limit=1)


async def test_what_could_not_be_told_is_told_after_a_restart(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = log.append

    async def away(*_: Any, **__: Any) -> int:
        raise UnavailableError("away")

    async with replica(log, tmp_path / "1.db") as one:
        monkeypatch.setattr(log, "append", away)
        one.note(entry(1))
        with pytest.raises(UnavailableError):
            await one.page(lambda _: True, after=None, limit=1)
    monkeypatch.setattr(log, "append", append)
    async with replica(log, tmp_path / "1.db") as again:
        again.note(entry(2))
        assert await pages(again) == [2, 1]
        await eventually(lambda: again.lost == 0)
    assert (await log.bounds(LogStream.AUDIT))[1] == len(await log.read(LogStream.AUDIT, ""))
