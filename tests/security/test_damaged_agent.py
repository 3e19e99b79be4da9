"""Conversations damaged at random: each ends with a typed error or not at all, and leaves nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from dsec.agent.client import AgentClient
from dsec.backends.fake.backend import FakeBackend
from dsec.core.errors import DsecError, ProtocolError
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.leaks import no_leaks_async
from dsec.wire import agent
from tests.contract.agents_under_test import run


class Mutated(asyncio.Protocol):
    """Between the fake agent and the channel: now and then it damages what the agent sends."""

    def __init__(self, inner: asyncio.Protocol, rng: random.Random, rate: float) -> None:
        self._inner = inner
        self._rng = rng
        self._rate = rate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._rng.random() < self._rate:
            data = self._damage(bytearray(data))
        self._inner.data_received(data)

    def _damage(self, data: bytearray) -> bytes:
        at = self._rng.randrange(len(data))
        kind = self._rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << self._rng.randrange(8)
        elif kind == 1:
            data[at:at] = self._rng.randbytes(self._rng.randrange(1, 40))
        elif kind == 2:
            del data[at : at + self._rng.randrange(1, 40)]
        elif kind == 3:
            data += data[at:]
        elif kind == 4:
            data[at : at + 4] = b"\xff\xff\xff\xff"
        else:
            data[at : at + 8] = self._rng.randbytes(8)
        return bytes(data)


async def work(client: AgentClient) -> None:
    """A bit of everything."""
    await client.write(agent.WriteArgs(path=b"/tmp/f"), bytes(100_000))
    async with await client.read(agent.ReadArgs(path=b"/tmp/f")) as download:
        assert len(b"".join([piece async for piece in download])) == 100_000
    await client.list(agent.ListArgs(path=b"/"))
    await client.session_open(agent.SessionOpen(name="s"))
    await run(client, "echo a; echo b >&2; seq 1000", session="s")
    async with await client.watch(agent.WatchArgs(path=b"/tmp")) as watch:
        await client.mkdir(agent.MkdirArgs(path=b"/tmp/d"))
        await watch.receive()
    async with await client.open_connection(agent.ConnectArgs(port=7)) as connection:
        await connection.send(b"x" * 1000)
        await connection.receive()
    await client.execs()


async def one_conversation(seed: int, rate: float, patience_s: float = 0.5) -> type[BaseException] | None:
    """The type of the error that it ended with. Anything but a DsecError, or a damage that shows, is our fault."""
    rng = random.Random(seed)
    instance = await FakeBackend().create(instance_spec(), intend=Intents(), deadline_s=60)

    async def connect(factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        return await instance.connect(lambda: Mutated(factory(), rng, rate))

    client: AgentClient | None = None
    try:
        # Half a frame may come, and then nothing more: that is no hang of ours.
        async with asyncio.timeout(2 * patience_s):
            client = await AgentClient.connect(
                connect, sandbox=instance.id, open_timeout_s=patience_s, timeout_s=patience_s
            )
            await work(client)
    except (DsecError, TimeoutError) as error:
        return type(error)
    except AssertionError:
        if rate == 0:
            raise
        # The damage hit the content, which the channel cannot know.
        return None
    finally:
        if client is not None:
            client.close()
            assert client.channel.failure is not None
            async with asyncio.timeout(60):
                await client.channel.closed()
        await instance.destroy()
    return None


@pytest.mark.timeout(300)
async def test_damaged_conversations_end_typed_and_leave_nothing(rng: random.Random) -> None:
    ended: list[type[BaseException] | None] = []
    async with no_leaks_async():
        for _ in range(10):
            seeds = [rng.randrange(2**32) for _ in range(40)]
            ended += await asyncio.gather(*(one_conversation(seed, 0.15) for seed in seeds))

    assert ProtocolError in ended
    unexpected = {kind for kind in ended if kind is not None and not issubclass(kind, (DsecError, TimeoutError))}
    assert unexpected == set()


async def test_the_conversation_itself_is_sound() -> None:
    assert await one_conversation(1, 0.0, patience_s=60.0) is None
