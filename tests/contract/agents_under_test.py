"""The agents that the agent contract is run on: the fake one, and the real one on a plain socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec.agent.client import AgentClient
from dsec.agent.execs import ExecStream
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.transfers import ECHO_PORT
from dsec.core.ids import new_exec_id
from dsec.testing.agents import running_agent
from dsec.testing.hosts import Intents, instance_spec
from dsec.wire import agent
from dsec.wire.frames import Channel
from tests.contract.backends_under_test import BackendUnderTest


@dataclass(frozen=True, slots=True)
class Result:
    out: bytes
    err: bytes
    end: agent.ExecEnd


class AgentUnderTest:
    """`place` is a directory of the test's own inside."""

    def __init__(
        self,
        connect: Callable[..., object],
        *,
        kind: str,
        place: bytes,
        echo_port: int | None,
        sandbox: str = "sbx_test",
    ) -> None:
        self.connect = connect
        self.kind = kind
        self.sandbox = sandbox
        self.place = place
        self._echo_port = echo_port
        self._clients: list[AgentClient] = []

    async def client(self, *, timeout_s: float = 20.0) -> AgentClient:
        client = await AgentClient.connect(self.connect, sandbox=self.sandbox, timeout_s=timeout_s)  # type: ignore[arg-type]
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()

    async def echo_port(self) -> int:
        """Where an echo listens. In a container it is started when first asked for, and stays behind its exec."""
        if self._echo_port is None:
            script = 'python3 -c "$ECHO" > /tmp/port & while ! test -s /tmp/port; do sleep 0.01; done; cat /tmp/port'
            client = await self.client()
            result = await run(client, script, env={b"ECHO": _ECHO.encode()}, timeout_s=60)
            client.close()
            self._echo_port = int(result.out)
        return self._echo_port

    def path(self, name: str) -> bytes:
        return self.place + b"/" + name.encode()


async def collect(stream: ExecStream) -> Result:
    """Reads an exec to its end; offsets must join."""
    got = {int(Channel.OUT): bytearray(), int(Channel.ERR): bytearray()}
    async for data in stream:
        got[data.channel] += data.payload
    return Result(bytes(got[Channel.OUT]), bytes(got[Channel.ERR]), stream.end)


async def run(client: AgentClient, shell: str | None = None, /, **fields: object) -> Result:
    """One exec, from its start to its end, acknowledged."""
    if shell is not None:
        fields["shell"] = shell.encode()
    stream = await client.exec(agent.Exec(id=new_exec_id(), **fields))  # type: ignore[arg-type]
    result = await collect(stream)
    await client.exit_ack(stream.started.id)
    return result


@asynccontextmanager
async def fake_agent() -> AsyncIterator[AgentUnderTest]:
    backend = FakeBackend()
    instance = await backend.create(instance_spec(), intend=Intents(), deadline_s=60)
    under_test = AgentUnderTest(
        instance.connect, kind="fake", place=b"/tmp/place", echo_port=ECHO_PORT, sandbox=instance.id
    )
    client = await under_test.client()
    await client.mkdir(agent.MkdirArgs(path=under_test.place))
    client.close()
    try:
        yield under_test
    finally:
        under_test.close()
        await instance.destroy()


@asynccontextmanager
async def real_agent(directory: Path) -> AsyncIterator[AgentUnderTest]:
    """Raises HostError when the program has not been built."""
    place = directory / "place"
    place.mkdir()
    # Unlike a fake sandbox's /tmp, a temporary directory of ours lets nobody else in.
    directory.chmod(0o755)
    async with running_agent(directory) as running, _echo_server() as port:
        under_test = AgentUnderTest(running.connect, kind="real", place=str(place).encode(), echo_port=port)
        try:
            yield under_test
        finally:
            under_test.close()


_ECHO = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def serve(link):
    while piece := link.recv(65536):
        link.sendall(piece)
    link.close()
while True:
    threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()
"""


@asynccontextmanager
async def contained_agent(backend: BackendUnderTest) -> AsyncIterator[AgentUnderTest]:
    """The real one, in an instance that has programs."""
    instance = await backend.create()
    client = await AgentClient.connect(instance.connect, sandbox=instance.id)
    under_test = AgentUnderTest(
        instance.connect, kind="container", place=b"/tmp/place", echo_port=None, sandbox=instance.id
    )
    await client.mkdir(agent.MkdirArgs(path=under_test.place))
    client.close()
    try:
        yield under_test
    finally:
        under_test.close()
        await instance.destroy()


@asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
