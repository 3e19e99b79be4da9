"""What a node tells of its sandboxes: each change once, in order, over restarts, and to nobody else's callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fake.host import FakeHost
from dsec.core import limits
from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.testing.faults import each_nth_failure
from dsec.testing.nodes import NodeClient, caller_of, crash, fake_instance, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.events import Event, EventLine, EventQuery
from dsec.wire.frames import FrameType
from dsec.wire.node import Method, Right
from dsec.wire.snapshots import Rollback, RollbackRequest, SnapshotInfo, SnapshotRequest, SnapshotTake
from tests.node_calls import create, destroy


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def told(client: NodeClient, **query: Any) -> list[Event]:
    """All that has happened by now, or after `after`."""
    async with client.stream(Method.EVENTS, EventQuery(follow=False, **query)) as stream:
        frames = await stream.all()
    assert frames[-1].type == FrameType.END
    lines = [unpack(frame.body, EventLine) for frame in frames[:-1]]
    return [line.event for line in lines if line.event is not None]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def spec(**changes: Any) -> SandboxSpec:
    return SandboxSpec(environment=Environment(base="base"), substrate=Substrate.FAKE, memory_bytes=64 << 20, **changes)


async def make(client: NodeClient, **changes: Any) -> str:
    made = await client.call(Method.CREATE, records.CreateRequest(spec=spec(**changes)), records.Sandbox)
    return made.id


async def change(client: NodeClient, method: Method, sandbox: str) -> None:
    await client.call(method, records.SandboxRef(sandbox), records.Sandbox)


async def test_each_change_of_a_sandbox_is_told_once_and_in_order(client: NodeClient) -> None:
    id = await make(client, name="one", labels={"run": "7"})
    await change(client, Method.PAUSE, id)
    await change(client, Method.RESUME, id)
    snapshot = await client.call(Method.SNAPSHOT_TAKE, SnapshotTake(id, SnapshotRequest(name="s")), SnapshotInfo)
    await client.call(Method.ROLLBACK, Rollback(id, RollbackRequest("s")), records.Sandbox)
    await destroy(client, id)

    events = await told(client)

    assert kinds(events) == ["created", "running", "paused", "resumed", "snapshot", "rolled_back", "destroyed"]
    assert [event.number for event in events] == sorted({event.number for event in events})
    assert {(e.sandbox, e.project, e.name, e.labels["run"]) for e in events} == {(id, "/test", "one", "7")}
    assert events[4].snapshot == snapshot.id
    assert [event.incarnation for event in events][-2:] == [2, 2]


async def test_an_end_says_whether_it_was_wanted(client: NodeClient) -> None:
    failed, expired = await make(client), await make(client, ttl_running_s=0.05)
    await _until_ended(client, expired)
    await fake_instance(client.node, failed).crash()
    await _until_ended(client, failed)

    ends = {event.sandbox: event for event in await told(client) if event.kind in ("failed", "expired", "destroyed")}

    assert (ends[expired].kind, ends[expired].cause) == ("expired", "ttl_running")
    assert (ends[failed].kind, ends[failed].cause) == ("failed", "sandbox_fault")


async def _until_ended(client: NodeClient, id: str) -> None:
    await eventually(lambda: client.node.registry.find(id) is None)


async def test_whatever_fails_an_end_is_told_of_what_was_told_to_begin(tmp_path: Path) -> None:
    """At each failure of a create: nothing, or a beginning and an end."""
    count = 0
    async for faults in each_nth_failure():
        count += 1
        async with fake_node(tmp_path / str(count)) as client:
            with faults, suppress(DsecError):
                await destroy(client, await make(client))
            await eventually(lambda: len(client.node.registry) == 0)
            events = await told(client)
            assert kinds(events) in ([], ["created", "failed"], ["created", "running", "destroyed"])
    assert count > 2


async def test_a_reader_goes_on_where_it_left_off_after_the_node_was_killed(tmp_path: Path) -> None:
    host = FakeHost()
    first = make_fake_node(tmp_path, host=host)
    await first.start()
    id = await make(NodeClient(first))
    before = await told(NodeClient(first))
    await crash(first)

    async with fake_node(tmp_path, host=host) as client:
        await client.node.settled(id, project=None)
        await destroy(client, id)

        assert kinds(await told(client, after=before[-1].position)) == ["destroyed"]
        assert kinds(await told(client, after=before[0].position)) == ["running", "destroyed"]
        assert kinds(await told(client)) == ["created", "running", "destroyed"]


async def test_a_follower_is_told_as_it_happens(client: NodeClient) -> None:
    await create(client)
    async with client.stream(Method.EVENTS, EventQuery(kinds=("running",))) as stream:
        begin = unpack((await _received(stream)).body, EventLine)
        assert begin.event is None
        assert begin.position
        id = await make(client)

        while (line := unpack((await _received(stream)).body, EventLine)).event is None:
            pass
        assert (line.event.kind, line.event.sandbox) == ("running", id)


async def _received(stream: Any) -> Any:
    async with asyncio.timeout(30):
        return await stream.recv()


async def test_a_caller_is_told_of_its_own_project_and_those_below(client: NodeClient) -> None:
    for project in ("/a", "/a/b", "/ab", "/c"):
        await create(client.of(caller_of(project)))
    seen = {
        who.project: {event.project for event in await told(client.of(who))}
        for who in (caller_of("/a"), caller_of("/a/b"), caller_of("/nobody"))
    }
    everybody = caller_of("/x", rights=frozenset({Right.ADMIN}))

    assert seen == {"/a": {"/a", "/a/b"}, "/a/b": {"/a/b"}, "/nobody": set()}
    assert {event.project for event in await told(client.of(everybody))} == {"/a", "/a/b", "/ab", "/c"}
    assert await told(client.of(caller_of("/a")), project="/c") == []
    assert {event.project for event in await told(client.of(everybody), project="/a")} == {"/a", "/a/b"}


async def test_labels_sandbox_and_kinds_are_chosen(client: NodeClient) -> None:
    one = await make(client, labels={"run": "7", "x": "y"}, job="j")
    other = await make(client, labels={"run": "8"})

    assert {event.sandbox for event in await told(client, labels={"run": "7"})} == {one}
    assert {event.sandbox for event in await told(client, sandbox=other)} == {other}
    assert {event.sandbox for event in await told(client, job="j")} == {one}
    assert kinds(await told(client, kinds=("created",))) == ["created", "created"]
    for wrong in ({"kinds": ("nothing",)}, {"after": "7"}, {"after": "a:-1:0"}, {"sandbox": "x"}):
        with pytest.raises(InvalidArgumentError):
            await told(client, **wrong)


async def test_what_is_not_kept_is_a_gap(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await make(client)
    (first, *_) = await told(client)
    monkeypatch.setattr("dsec.node.events.EVENTS_NODE_BYTES_MAX", 2_000)
    for _ in range(12):
        await change(client, Method.PAUSE, id)
        await change(client, Method.RESUME, id)

    events = await told(client, after=first.position)

    assert events[0].kind == "gap"
    assert "gap" not in kinds(events[1:])
    assert [event.number for event in events[1:]] == list(range(events[1].number, events[-1].number + 1))
    assert "gap" not in kinds(await told(client, after=events[1].position))
    assert "gap" not in kinds(await told(client))


async def test_a_position_of_elsewhere_gives_what_is_kept_and_says_so(client: NodeClient) -> None:
    await create(client)

    for position in ("aaaaaaaa:3:0", f"{client.node.id}:{limits.EVENT_NUMBER_MAX}:0"):
        assert kinds(await told(client, after=position)) == ["gap", "created", "running"]


async def test_a_reader_that_stands_still_holds_nothing_up_and_loses_nothing(client: NodeClient) -> None:
    async with client.stream(Method.EVENTS, EventQuery(after="oldest")) as stream:
        ids = [await make(client) for _ in range(20)]
        seen = []
        while len(seen) < 40:
            line = unpack((await _received(stream)).body, EventLine)
            if line.event is not None:
                seen.append((line.event.sandbox, line.event.kind))
    assert seen == [(id, kind) for id in ids for kind in ("created", "running")]
