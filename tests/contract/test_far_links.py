"""Links whose two sandboxes are on two nodes: what a program in one of them sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.fake.transfers import ECHO_PORT
from dsec.core.errors import NotFoundError
from dsec.core.spec import Link
from dsec.wire.peers import LinkDial
from tests.contract.far_nodes import DB, GROUP, FarNode, FarNodes, cut_off, far_nodes
from tests.contract.served import until


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[FarNodes]:
    """`web`, on the first node, reaches `db`, on the second."""
    async with far_nodes(tmp_path) as found:
        found.note(nodes={"web": 0, "db": 1}, across={"web": [(DB.name, DB.port)]})
        yield found


async def echoes(node: FarNode, id: str, text: bytes = b"hello") -> bool:
    """Whether a new connection works."""
    reader, writer = await node.dial(id)
    try:
        writer.write(text)
        async with asyncio.timeout(60):
            return await reader.readexactly(len(text)) == text
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()


async def eventually_echoes(node: FarNode, id: str) -> None:
    async with asyncio.timeout(60):
        while not await echoes(node, id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_bytes_pass_both_ways_and_each_side_ends_for_itself(far: FarNodes) -> None:
    first, second = far.nodes
    await second.create("db")
    reader, writer = await first.dial(await first.create("web", DB))
    data = bytes(range(256)) * 4_000

    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.write(b"last")
    writer.write_eof()

    assert await reader.read() == b"last"
    writer.close()
    await until(lambda: not far.peered.listeners[second.id].streams_open)


async def test_who_does_not_read_holds_up_who_writes_and_nothing_is_lost(far: FarNodes) -> None:
    first, second = far.nodes
    await second.create("db")
    reader, writer = await first.dial(await first.create("web", DB))
    piece, count = bytes(range(256)) * 4_096, 48

    async def write() -> None:
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    writing = asyncio.create_task(write())
    listener = far.peered.listeners[second.id]
    await until(lambda: any(one._is_full(1 << 16) for link in listener.of_peers() for one in link.streams.values()))
    assert not writing.done()

    got = 0
    while data := await reader.read(1 << 18):
        assert data == (piece + piece)[got % len(piece) : got % len(piece) + len(data)]
        got += len(data)
    await writing
    writer.close()
    assert got == count * len(piece)


async def test_a_member_that_is_not_there_refuses_and_then_works(far: FarNodes) -> None:
    first, second = far.nodes
    web = await first.create("web", DB)

    assert not await echoes(first, web)
    await second.create("db")
    assert await echoes(first, web)


async def test_a_port_on_which_nobody_listens_is_reset(far: FarNodes) -> None:
    first, second = far.nodes
    link = Link("db", 9)
    far.note(nodes={"web": 0, "db": 1}, across={"web": [("db", 9)]})
    await second.create("db")
    reader, writer = await first.dial(await first.create("web", link), link)

    assert await cut_off(reader)
    writer.close()


async def test_with_either_sandbox_its_connections_end_and_no_new_ones_are_taken(far: FarNodes) -> None:
    first, second = far.nodes
    db, web = await second.create("db"), await first.create("web", DB)
    reader, writer = await first.dial(web)
    writer.write(b"1")
    await reader.readexactly(1)

    await second.destroy(db)
    assert await cut_off(reader)
    writer.close()
    assert not await echoes(first, web)

    await second.create("db")
    reader, writer = await first.dial(web)
    writer.write(b"1")
    await reader.readexactly(1)
    await first.destroy(web)
    assert await cut_off(reader)
    writer.close()
    await until(lambda: not far.peered.listeners[second.id].streams_open)


async def test_a_node_that_is_lost_cuts_and_refuses_and_works_again_when_it_is_back_elsewhere(far: FarNodes) -> None:
    first, second = far.nodes
    await second.create("db")
    web = await first.create("web", DB)
    reader, writer = await first.dial(web)
    writer.write(b"1")
    await reader.readexactly(1)

    await far.peered.leave(second.id)
    assert await cut_off(reader)
    writer.close()
    assert not await echoes(first, web)

    await far.peered.join(second.node)
    await eventually_echoes(first, web)


async def test_what_is_connected_stays_and_what_was_told_is_good_while_no_replica_is_there(far: FarNodes) -> None:
    first, second = far.nodes
    await second.create("db")
    web = await first.create("web", DB)
    assert await echoes(first, web)
    far.peered.away = True

    assert await echoes(first, web)
    await far.peered.leave(second.id)
    assert not await echoes(first, web)
    far.peered.away = False
    await far.peered.join(second.node)
    await eventually_echoes(first, web)


async def test_members_that_are_placed_anew_are_found_where_they_are_now(far: FarNodes) -> None:
    first, second = far.nodes
    await second.create("db")
    web = await first.create("web", DB)
    assert await echoes(first, web)

    other = await second.create("web", DB)  # as after a try that was given up
    await first.destroy(web)
    far.note(nodes={"web": 1, "db": 0}, across={"web": [(DB.name, DB.port)]})
    for sandbox in list(second.node.registry):
        if sandbox.row.spec.member == "db":
            await second.destroy(sandbox.id)
    await first.create("db")

    await eventually_echoes(second, other)


async def test_a_connection_that_nobody_uses_is_closed(far: FarNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.peers.PEER_IDLE_S", 0.05)
    first, second = far.nodes
    await second.create("db")
    web = await first.create("web", DB)

    assert await echoes(first, web)
    await until(lambda: not far.peered.listeners[second.id].links)
    assert await echoes(first, web)


async def test_streams_to_one_node_are_bounded_and_those_beyond_are_reset(
    far: FarNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.PEER_STREAMS_MAX", 1)
    first, second = far.nodes
    await second.create("db")
    web = await first.create("web", DB)
    reader, writer = await first.dial(web)
    writer.write(b"1")
    await reader.readexactly(1)

    assert not await echoes(first, web)
    writer.close()
    await eventually_echoes(first, web)


async def test_a_link_that_is_not_across_is_not_asked_for(far: FarNodes) -> None:
    first, _ = far.nodes
    dial = LinkDial(project=GROUP.project, job=GROUP.name, id=GROUP.id, source="web", target="cache", port=ECHO_PORT)

    with pytest.raises(NotFoundError):
        await first.peers.dial(dial)
