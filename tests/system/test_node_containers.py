"""The node over real containers: memory, freezing, and kill -9 of the node in the middle of its work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec import AsyncSandbox
from dsec.core.ids import new_exec_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.sdk.client import AsyncClient
from dsec.testing.nodes import NodeClient, caller_of
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.frames import FrameType, decode_data
from dsec.wire.node import ExecStart, Method, OutputQuery
from tests.patience import with_a_limit
from tests.system.container_place import ENVIRONMENT, Place, container_store, private_place, served

pytestmark = pytest.mark.root

SPEC = SandboxSpec(environment=Environment(ENVIRONMENT), substrate=Substrate.CONTAINER, memory_bytes=64 << 20)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, native_binaries: dict[str, Path]) -> Path:
    return container_store(tmp_path_factory.getbasetemp())


@pytest.fixture
def place(store: Path) -> AsyncIterator[Place]:
    with private_place(store) as place:
        yield place


async def create(client: NodeClient, spec: SandboxSpec = SPEC) -> records.Sandbox:
    return await client.call(Method.CREATE, records.CreateRequest(spec=spec), records.Sandbox)


async def start(client: NodeClient, sandbox: str, shell: str, **fields: object) -> records.ExecAnswer:
    request = records.ExecRequest(**{"id": new_exec_id(), "shell": shell, "wait_s": 30.0, **fields})  # type: ignore[arg-type]
    return await client.call(Method.EXEC_START, ExecStart(sandbox, request), records.ExecAnswer)


async def follow(client: NodeClient, sandbox: str, exec: str) -> tuple[bytes, records.ExecInfo]:
    found = b""
    async with client.stream(Method.EXEC_OUTPUT, OutputQuery(sandbox=sandbox, exec=exec)) as stream:
        frames = await stream.all()
    for frame in frames:
        if frame.type == FrameType.DATA:
            data = decode_data(frame.body)
            assert data.offset == len(found), "no hole, nothing twice"
            found += data.payload
    return found, unpack(frames[-1].body, records.ExecInfo)


async def test_a_command_killed_for_memory_says_so_and_the_sandbox_lives(place: Place) -> None:
    async with served(place) as (service, _):
        client = NodeClient(service.node)
        sandbox = await create(client)

        alone = await start(client, sandbox.id, "exec tail /dev/zero")
        child = await start(client, sandbox.id, "tail /dev/zero; exit 3")
        fine = await start(client, sandbox.id, "exit 3")

        assert (alone.exec.signal, alone.exec.cause) == (9, "oom")
        assert (child.exec.exit_code, child.exec.cause) == (3, "oom")
        assert (fine.exec.exit_code, fine.exec.cause) == (3, None)


async def test_a_pause_stops_time_for_a_command_and_its_timeout(place: Place) -> None:
    async with served(place) as (service, _):
        client = NodeClient(service.node)
        sandbox = await create(client)
        count = "i=0; while [ $i -lt 10 ]; do i=$((i+1)); echo $i; sleep 0.05; done"

        async def paused_for(limit_s: float) -> tuple[int, int, bytes, records.ExecInfo]:
            answer = await start(client, sandbox.id, count, wait_s=0.15, timeout_s=2 * limit_s)
            query = records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id)
            await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)
            before = (await client.call(Method.EXEC_GET, query, records.ExecInfo)).out_bytes
            await asyncio.sleep(2 * limit_s)  # as long as the timeout: the passing of time is what is tested
            after = (await client.call(Method.EXEC_GET, query, records.ExecInfo)).out_bytes
            await client.call(Method.RESUME, records.SandboxRef(sandbox.id), records.Sandbox)
            return before, after, *await follow(client, sandbox.id, answer.exec.id)

        before, after, out, info = await with_a_limit(paused_for, lambda found: found[3].cause is None)

    assert before == after
    assert (info.exit_code, info.cause) == (0, None)
    assert out == b"".join(b"%d\n" % n for n in range(1, 11))


async def test_kill_9_of_the_node_loses_no_sandbox_and_no_output(place: Place) -> None:
    lines = 60_000
    script = f"seq 1 {lines}; sleep 2; seq {lines + 1} {2 * lines}"
    place.start_process()
    async with AsyncClient(place.url) as outside:
        await place.ready(outside)
        sandbox = await AsyncSandbox.create(ENVIRONMENT, backend="container", memory="128MiB", client=outside)
        execs = [await sandbox.start(["/bin/sh", "-c", script]) for _ in range(4)]
        await asyncio.sleep(0.3)  # anywhere in the middle
        place.kill_node()

    async with served(place) as (service, _):
        found = service.node.registry.find(sandbox.id)
        assert found is not None
        client = NodeClient(service.node)
        client.caller = caller_of(found.row.project)
        results = await asyncio.gather(*(follow(client, sandbox.id, exec.id) for exec in execs))
        again = await start(client, sandbox.id, "echo alive")
        gone = await client.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
        results.append(await follow(client, sandbox.id, execs[0].id))  # it outlives the sandbox

    expected = b"".join(b"%d\n" % n for n in range(1, 2 * lines + 1))
    for out, info in results:
        assert info.exit_code == 0
        assert out == expected
    assert again.out == b"alive\n"
    assert gone.state == "gone"
