"""Private names within a job: sockets in one sandbox that reach a port of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.transfers import ECHO_PORT
from dsec.core.errors import ConflictError, InvalidArgumentError, LaunchError
from dsec.core.ids import parse_sandbox_id
from dsec.core.spec import Link, SandboxSpec, link_addresses
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, crash, make_fake_node
from dsec.wire.jobs import JobOrder, JobOrderKind, JobPart
from dsec.wire.node import Method
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef
from tests.contract.served import until

DB = Link("db", ECHO_PORT)


@dataclass
class Machine:
    directory: Path
    host: FakeHost
    client: NodeClient
    by_agent: bool = False

    async def create(
        self, member: str, *links: Link, job: str = "shop", project: str = "/team", job_id: str | None = None
    ) -> str:
        spec = msgspec.structs.replace(FAKE_SPEC, job=job, member=member, links=links, job_id=job_id)
        client = self.client.of(caller_of(project))
        return (await client.call(Method.CREATE, CreateRequest(spec=spec), Sandbox)).id

    async def destroy(self, id: str, project: str = "/team") -> None:
        await self.client.of(caller_of(project)).call(Method.DESTROY, SandboxRef(id), Sandbox)

    async def dial(self, id: str, link: Link = DB) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As a program in that sandbox would."""
        return await asyncio.open_connection("127.0.0.1", self.port(id, link))

    def port(self, id: str, link: Link = DB) -> int:
        spec = SandboxSpec(environment=FAKE_SPEC.environment, job="shop", links=(link,))
        return self.host.listening[parse_sandbox_id(id), link_addresses(spec)[link.name], link.port]

    async def restarted(self) -> None:
        await crash(self.client.node)
        node = make_fake_node(self.directory, host=self.host, links_by_agent=self.by_agent)
        await node.start()
        self.client = NodeClient(node)


@pytest.fixture(params=["by the node", "by the agent"])
async def machine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Machine]:
    """Who listens: the node on the loopback of a container, or the agent of a machine."""
    host, by_agent = FakeHost(), request.param == "by the agent"
    node = make_fake_node(tmp_path, host=host, links_by_agent=by_agent)
    await node.start()
    machine = Machine(tmp_path, host, NodeClient(node), by_agent)
    try:
        yield machine
    finally:
        await machine.client.node.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(30):
            return await reader.read() == b""
    except ConnectionError:
        return True


async def test_bytes_pass_both_ways_and_each_side_ends_for_itself(machine: Machine) -> None:
    await machine.create("db")
    reader, writer = await machine.dial(await machine.create("web", DB))
    data = bytes(range(256)) * 1_000

    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.write(b"last")
    writer.write_eof()

    assert await reader.read() == b"last"
    writer.close()


async def test_a_name_that_nobody_has_yet_refuses_and_then_works(machine: Machine) -> None:
    web = await machine.create("web", DB)

    reader, writer = await machine.dial(web)
    assert await closed(reader)
    writer.close()

    await machine.create("db")
    reader, writer = await machine.dial(web)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()


@pytest.mark.parametrize(("job", "project"), [("other", "/team"), ("shop", "/others"), ("shop", "/team/below")])
async def test_no_link_leaves_its_job_and_project(machine: Machine, job: str, project: str) -> None:
    await machine.create("db", job=job, project=project)
    reader, writer = await machine.dial(await machine.create("web", DB))

    assert await closed(reader)
    writer.close()


# A machine that is paused accepts nothing itself.
@pytest.mark.parametrize("machine", ["by the node"], indirect=True)
async def test_what_runs_yet_of_a_job_that_is_paused_wakes_nothing_of_it(machine: Machine) -> None:
    db = await machine.create("db", job_id="job_1")
    web = await machine.create("web", DB, job_id="job_1")
    client = machine.client.of(caller_of("/team"))

    async def order(number: int, kind: JobOrderKind) -> None:
        body = JobOrder(id="job_1", job="shop", project="/team", order=number, kind=kind)
        await client.call(Method.JOB_ACT, body, JobPart)

    await order(1, JobOrderKind.PAUSE)
    reader, writer = await machine.dial(web)
    assert await closed(reader)
    writer.close()
    assert (await client.call(Method.GET, SandboxRef(db), Sandbox)).state == "paused"

    await order(2, JobOrderKind.RESUME)
    reader, writer = await machine.dial(web)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_a_port_on_which_nobody_listens_is_reset(machine: Machine) -> None:
    link = Link("db", 9)
    await machine.create("db")
    reader, writer = await machine.dial(await machine.create("web", link), link)

    assert await closed(reader)
    writer.close()


async def test_a_port_that_is_taken_fails_the_create_and_leaves_nothing(machine: Machine) -> None:
    class Taken(set[tuple[str, int]]):
        def __contains__(self, item: object) -> bool:
            return isinstance(item, tuple) and item[1] == ECHO_PORT

    machine.host.ports_taken = Taken()  # type: ignore[assignment]

    with pytest.raises(LaunchError) as found:
        await machine.create("web", Link("aaa", 1), DB)

    assert found.value.step == "links"
    assert machine.host.leftovers() == []
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", next(iter(machine.host.listening.values())))


async def test_with_either_sandbox_its_connections_end(machine: Machine) -> None:
    db = await machine.create("db")
    web = await machine.create("web", DB)
    reader, writer = await machine.dial(web)
    writer.write(b"1")
    await reader.readexactly(1)
    port = machine.port(web)

    await machine.destroy(db)
    assert await closed(reader)
    writer.close()

    await machine.destroy(web)

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    async with asyncio.timeout(30):
        while not await refused():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_links_are_there_again_after_a_restart_of_the_node(machine: Machine) -> None:
    db = await machine.create("db")
    web = await machine.create("web", DB)
    before = machine.port(web)

    await machine.restarted()
    for id in (db, web):
        await machine.client.of(caller_of("/team")).call(Method.GET, SandboxRef(id), Sandbox)
    await until(lambda: machine.port(web) != before)

    reader, writer = await machine.dial(web)
    writer.write(b"again")
    assert await reader.readexactly(5) == b"again"
    writer.close()


async def test_connections_are_bounded_and_those_beyond_wait(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.core.limits.LINK_CONNECTIONS_MAX", 2)
    await machine.create("db")
    web = await machine.create("web", DB)
    first = [await machine.dial(web) for _ in range(2)]
    for reader, writer in first:
        writer.write(b"x")
        await reader.readexactly(1)

    reader, writer = await machine.dial(web)
    writer.write(b"waits")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await reader.readexactly(1)

    first[0][1].close()
    assert await reader.readexactly(5) == b"waits"
    for _, open_writer in (*first, (reader, writer)):
        open_writer.close()


async def test_a_name_is_given_once_in_a_job(machine: Machine) -> None:
    await machine.create("db")

    with pytest.raises(ConflictError):
        await machine.create("db")
    await machine.create("db", job="other")


def test_links_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"member": "web"},
        {"links": (DB,)},
        {"job": "j", "links": (DB, DB)},
        {"job": "j", "member": "db", "links": (DB,)},
        {"job": "j", "links": (Link("localhost", 80),)},
    ):
        with pytest.raises(InvalidArgumentError):
            msgspec.structs.replace(FAKE_SPEC, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        Link("db", 0)
