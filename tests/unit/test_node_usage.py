"""What ended sandboxes have used is counted once, kept for a while, and told to who may know."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, NotFoundError
from dsec.core.ids import new_exec_id, new_sandbox_id
from dsec.node import usage as usage_module
from dsec.node.journal import Journal
from dsec.node.rows import Tombstone
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.wire.node import ExecStart, Method, Right
from dsec.wire.records import CreateRequest, ExecAnswer, ExecRequest, Sandbox, SandboxRef, Usage
from dsec.wire.usage import UsageBy, UsagePage, UsageQuery

DAY = 86_400.0


@pytest.fixture
async def team(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client.of(caller_of("/team"))


async def made(client: NodeClient) -> Sandbox:
    return await client.call(Method.CREATE, CreateRequest(spec=FAKE_SPEC), Sandbox)


async def ended(client: NodeClient) -> Sandbox:
    sandbox = await made(client)
    exec = ExecRequest(id=new_exec_id(), shell="echo hello", wait_s=20)
    await client.call(Method.EXEC_START, ExecStart(sandbox.id, exec), ExecAnswer)
    return await client.call(Method.DESTROY, SandboxRef(sandbox.id), Sandbox)


async def used(client: NodeClient, **query: object) -> UsagePage:
    return await client.call(Method.USAGE, UsageQuery(**query), UsagePage)  # type: ignore[arg-type]


async def test_a_sandbox_counts_for_its_project_while_it_lives_and_when_it_has_ended(team: NodeClient) -> None:
    below = team.of(caller_of("/team/run"))
    gone = await ended(below)
    alive = await made(team)

    by_project = (await used(team)).totals
    records = (await used(team, by=UsageBy.SANDBOX)).records

    assert {total.project: total.sandboxes for total in by_project} == {"/team": 1, "/team/run": 1}
    assert [(record.sandbox, record.ended_at is None) for record in records] == [(alive.id, True), (gone.id, False)]
    assert records[1].principal == below.caller.principal
    assert records[1].output_bytes == len("hello\n") == by_project[1].output_bytes
    assert records[1].lived_s > 0
    assert records[1].cause == "destroyed"


async def test_other_projects_see_none_of_it(team: NodeClient) -> None:
    await ended(team)
    await made(team)

    for project in ("/other", "/tea", "/teams", "/team/run"):
        other = team.of(caller_of(project))
        assert await used(other, by=UsageBy.SANDBOX) == await used(other) == UsagePage()
        for asked in ("/team", "/nowhere", "/"):
            with pytest.raises(NotFoundError):
                await used(other, project=asked)
    admin = team.of(caller_of("/", rights=frozenset({Right.ADMIN, Right.READ})))
    assert len((await used(admin)).totals) == 1
    assert (await used(admin, project="/team/run")).totals == []


async def test_records_come_in_pages_each_once(team: NodeClient) -> None:
    ids = [(await ended(team)).id for _ in range(5)] + [(await made(team)).id for _ in range(3)]
    found: list[str] = []
    cursor, pages = None, 0

    while pages == 0 or cursor is not None:
        page = await used(team, by=UsageBy.SANDBOX, limit=2, cursor=cursor)
        found += [record.sandbox for record in page.records]
        cursor, pages = page.next, pages + 1

    assert sorted(found) == sorted(ids)
    assert found == ids[5:] + list(reversed(ids[:5]))
    for bad in ("x", "l:y:z", "q:1.0:z"):
        with pytest.raises(InvalidArgumentError):
            await used(team, by=UsageBy.SANDBOX, cursor=bad)


async def test_a_restart_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as first:
        await ended(first)
        before = await used(first, by=UsageBy.SANDBOX)
    async with fake_node(tmp_path) as second:
        after = await used(second, by=UsageBy.SANDBOX)
        totals = (await used(second, by=UsageBy.DAY)).totals

    assert after.records == before.records
    assert [(total.sandboxes, total.cpu_s) for total in totals] == [(1, before.records[0].cpu_s)]


async def test_sums_of_before_there_were_networks_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = await Journal.open(path)
    await journal.bury(_tombstone(journal, "/a", 5 * DAY))
    await journal.close()
    with closing(sqlite3.connect(path)) as db:
        for table in ("usage_days", "usage_jobs"):
            for column in ("sent_bytes", "received_bytes"):
                db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.commit()

    journal = await Journal.open(path)
    later = _tombstone(journal, "/a", 5 * DAY + 1)
    used_now = msgspec.structs.replace(later.sandbox.usage or Usage(), sent_bytes=7, received_bytes=9)
    await journal.bury(msgspec.structs.replace(later, sandbox=msgspec.structs.replace(later.sandbox, usage=used_now)))

    found = journal.read("SELECT sandboxes, cpu_s, sent_bytes, received_bytes FROM usage_days", ())
    assert found == [(2, 4.0, 7, 9)]
    await journal.close()


async def test_a_sandbox_whose_tombstone_is_written_again_counts_once(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "journal.db")
    tombstone = _tombstone(journal, "/a", 5 * DAY)
    for _ in range(2):
        await journal.bury(tombstone)

    assert journal.read("SELECT sandboxes, cpu_s FROM usage_days", ()) == [(1, 2.0)]
    await journal.close()


async def test_what_is_too_old_or_too_much_goes_and_sums_stay_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await Journal.open(tmp_path / "journal.db")
    now = 1_000 * DAY
    for ago in (0, 1, 2, limits.USAGE_RECORDS_KEEP_S / DAY + 1, limits.USAGE_DAYS_KEEP_S / DAY + 2):
        await journal.bury(_tombstone(journal, "/a", now - ago * DAY))

    await journal.prune(now)
    assert journal.read("SELECT COUNT(*) FROM usage", ()) == [(3,)]
    assert journal.read("SELECT COUNT(*) FROM usage_days", ()) == [(4,)]
    monkeypatch.setattr(usage_module, "USAGE_RECORDS_MAX", 1)
    monkeypatch.setattr(usage_module, "USAGE_DAYS_MAX", 2)
    await journal.prune(now)

    assert journal.read("SELECT ended_at FROM usage", ()) == [(now,)]
    assert journal.read("SELECT day FROM usage_days ORDER BY day", ()) == [(999,), (1_000,)]
    await journal.close()


async def test_totals_are_of_the_days_asked_for(tmp_path: Path) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock) as client:
        journal = client.service._node.journal
        today = clock.wall_s() // DAY
        for ago in (0, 0, 1, 3):
            await journal.bury(_tombstone(journal, "/test", (today - ago) * DAY + 10))

        days = (await used(client, by=UsageBy.DAY)).totals
        some = (await used(client, since=(today - 1) * DAY, until=today * DAY)).totals

        assert [total.sandboxes for total in days] == [1, 1, 2]
        assert [total.day for total in days] == sorted(total.day or "" for total in days)
        assert [(total.sandboxes, total.cpu_s, total.day) for total in some] == [(1, 2.0, None)]


def _tombstone(journal: Journal, project: str, ended_at: float) -> Tombstone:
    sandbox = Sandbox(
        id=new_sandbox_id(journal.node_id),
        state="gone",
        node=journal.node_id,
        substrate="fake",
        environment="base",
        project=project,
        created_at=ended_at - 10,
        cpu=1.0,
        memory_bytes=1,
        pids_max=4,
        network="none",
        ended_at=ended_at,
        usage=Usage(cpu_s=2.0),
    )
    return Tombstone(sandbox=msgspec.structs.replace(sandbox), principal="p")
