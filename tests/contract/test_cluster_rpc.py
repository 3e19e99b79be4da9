"""Calls and streams keep one contract, within one process and over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dsec.cluster.link.client import RemoteRpc
from dsec.cluster.rpc import EmbeddedRpc
from dsec.cluster.streams import stream_pair
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    NodeRetiredError,
    PlatformError,
    StorageError,
    UnavailableError,
)
from dsec.core.ids import NodeId
from dsec.testing.links import linked
from dsec.wire.frames import Frame, FrameType
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import NodeLoad
from tests.contract.served import until

Rpc = EmbeddedRpc | RemoteRpc
NODE = NodeId("aaaaaaaa")
CALLER = Caller(principal="p", project="/p")


class Service:
    """Does what a test gives it."""

    def __init__(self) -> None:
        self.on_call: Callable[[bytes], Awaitable[bytes]] = self._echo
        self.on_stream: Callable[[Stream], Awaitable[None]] = self._nothing
        self.seen: list[tuple[Method, Caller, str | None, float]] = []

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        self.seen.append((method, caller, key, timeout_s))
        return await self.on_call(body)

    def load(self) -> NodeLoad:
        return NodeLoad(sandboxes=len(self.seen))

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        await self.on_stream(stream)

    async def _echo(self, body: bytes) -> bytes:
        return body

    async def _nothing(self, stream: Stream) -> None:
        pass


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture(params=["embedded", "tcp"])
async def rpc(request: pytest.FixtureRequest, service: Service, tmp_path: Path) -> AsyncIterator[Rpc]:
    if request.param == "embedded":
        rpc = EmbeddedRpc(service, NODE)
        yield rpc
        await rpc.close()
        return
    async with linked(service, NODE, tmp_path) as link:
        yield link.rpc


def frame(number: int = 0, size: int = 8) -> Frame:
    return Frame(FrameType.DATA, 0, number.to_bytes(8, "big") + bytes(size - 8))


# ---- calls ---------------------------------------------------------------------------------------


async def test_a_call_carries_body_caller_and_key(rpc: Rpc, service: Service) -> None:
    answer = await rpc.call(NODE, Method.GET, b"body", caller=CALLER, timeout_s=30, key="k")

    assert answer == b"body"
    assert [seen[:3] for seen in service.seen] == [(Method.GET, CALLER, "k")]
    assert 0 < service.seen[0][3] <= 30


async def test_the_nodes_load_comes_with_every_reply_and_with_refusals(rpc: Rpc, service: Service) -> None:
    async def full(_: bytes) -> bytes:
        raise CapacityError("the node is full", retry_after_s=1.0)

    assert rpc.load(NODE) is None
    await rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=60)
    assert rpc.load(NODE) == NodeLoad(sandboxes=1)

    service.on_call = full
    with pytest.raises(CapacityError):
        await rpc.call(NODE, Method.CREATE, b"", caller=CALLER, timeout_s=60)
    assert rpc.load(NODE) == NodeLoad(sandboxes=2)
    assert rpc.load(NodeId("zzzzzzzz")) is None


async def test_an_unknown_node_is_retired(rpc: Rpc) -> None:
    with pytest.raises(NodeRetiredError):
        await rpc.call(NodeId("bbbbbbbb"), Method.GET, b"", caller=CALLER, timeout_s=60)
    with pytest.raises(NodeRetiredError):
        await rpc.open(NodeId("bbbbbbbb"), Method.EXEC_OUTPUT, b"", caller=CALLER)


async def test_a_call_ends_at_its_deadline_and_its_work_with_it(rpc: Rpc, service: Service) -> None:
    cancelled = asyncio.Event()

    async def hang(body: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    service.on_call = hang
    with pytest.raises(DeadlineError) as failure:
        await rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=0.2)
    await until(cancelled.is_set)

    assert failure.value.outcome == "unknown"


async def test_a_caller_who_goes_away_ends_the_work(rpc: Rpc, service: Service) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(body: bytes) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    service.on_call = hang
    caller = asyncio.create_task(rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=60))
    await begun.wait()
    caller.cancel()
    await until(cancelled.is_set)

    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_many_calls_are_answered_each_with_its_own(rpc: Rpc) -> None:
    bodies = [str(number).encode() * (number % 7 * 40_000 + 1) for number in range(200)]

    answers = await asyncio.gather(*(rpc.call(NODE, Method.GET, body, caller=CALLER, timeout_s=60) for body in bodies))

    assert answers == bodies


async def test_errors_of_the_node_arrive_and_others_lose_their_text(rpc: Rpc, service: Service) -> None:
    async def fail(body: bytes) -> bytes:
        raise StorageError("disk") if body else ValueError("secret")

    service.on_call = fail
    with pytest.raises(StorageError, match="disk"):
        await rpc.call(NODE, Method.GET, b"x", caller=CALLER, timeout_s=60)
    with pytest.raises(PlatformError) as told:
        await rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=60)

    assert "secret" not in str(told.value)


async def test_a_timeout_of_the_nodes_own_is_not_taken_for_the_callers(rpc: Rpc, service: Service) -> None:
    async def fail(body: bytes) -> bytes:
        raise TimeoutError

    service.on_call = fail
    with pytest.raises(PlatformError) as told:
        await rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=10)

    assert not isinstance(told.value, DeadlineError)


# ---- streams -------------------------------------------------------------------------------------


async def test_frames_go_both_ways_in_order_and_end(rpc: Rpc, service: Service) -> None:
    async def echo(stream: Stream) -> None:
        while (received := await stream.recv()) is not None:
            if received.type == FrameType.END:
                return
            await stream.send(received)

    service.on_stream = echo
    stream = await rpc.open(NODE, Method.CONNECT, b"", caller=CALLER)
    for number in range(100):
        await stream.send(frame(number))
    await stream.send(Frame(FrameType.END, 0, b""))
    received = []
    while (got := await stream.recv()) is not None:
        received.append(int.from_bytes(got.body, "big"))
    await stream.close()

    assert received == list(range(100))
    assert rpc.streams_open == 0


async def test_an_error_comes_after_what_was_sent_before(rpc: Rpc, service: Service) -> None:
    async def fail(stream: Stream) -> None:
        await stream.send(frame(1))
        raise StorageError("disk")

    service.on_stream = fail
    stream = await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER)

    assert await stream.recv() == frame(1)
    with pytest.raises(StorageError):
        await stream.recv()
    with pytest.raises(UnavailableError):
        await stream.send(frame())
    await stream.close()


async def test_an_error_that_is_not_ours_is_told_without_its_text(rpc: Rpc, service: Service) -> None:
    async def fail(stream: Stream) -> None:
        raise ValueError("secret")

    service.on_stream = fail
    stream = await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER)

    with pytest.raises(PlatformError) as told:
        await stream.recv()
    assert "secret" not in str(told.value)
    await stream.close()


async def test_what_the_caller_sent_arrives_although_it_closed(rpc: Rpc, service: Service) -> None:
    received: list[Frame | None] = []

    async def read(stream: Stream) -> None:
        await asyncio.sleep(0)
        while (got := await stream.recv()) is not None:
            received.append(got)
        received.append(None)

    service.on_stream = read
    stream = await rpc.open(NODE, Method.CONNECT, b"", caller=CALLER)
    for number in range(3):
        await stream.send(frame(number))
    await stream.close()
    await stream.close()

    assert received == [frame(0), frame(1), frame(2), None]


async def test_the_callers_error_reaches_the_node(rpc: Rpc, service: Service) -> None:
    seen: list[BaseException] = []

    async def read(stream: Stream) -> None:
        try:
            await stream.recv()
        except StorageError as error:
            seen.append(error)
            raise

    service.on_stream = read
    stream = await rpc.open(NODE, Method.FILE_WRITE, b"", caller=CALLER)
    await stream.close(StorageError("mine"))

    assert [str(error) for error in seen] == ["mine"]


async def test_closing_ends_work_that_does_not_listen(
    rpc: Rpc, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rpc", "link.server"):
        monkeypatch.setattr(f"dsec.cluster.{module}.STREAM_LINGER_S", 0.01)
    cancelled = asyncio.Event()

    async def hang(stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    service.on_stream = hang
    stream = await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER)
    await stream.close()

    assert cancelled.is_set()
    assert rpc.streams_open == 0


@pytest.mark.parametrize("size", [8, limits.FRAME_BYTES_MAX - 5])
async def test_a_node_waits_for_a_caller_who_is_behind(rpc: Rpc, service: Service, size: int) -> None:
    sent = 0

    async def send(stream: Stream) -> None:
        nonlocal sent
        for number in range(1_000 if size == 8 else 30):
            await stream.send(frame(number, size))
            sent += 1

    service.on_stream = send
    stream = await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER)
    await until(lambda: sent)
    seen = -1
    while seen != sent:  # until it stands still
        seen = sent
        await asyncio.sleep(0.05)
    assert sent * size <= 2 * limits.STREAM_QUEUE_BYTES_MAX + 2 * size
    numbers = []
    while (got := await stream.recv()) is not None:
        numbers.append(int.from_bytes(got.body[:8], "big"))
    await stream.close()

    assert numbers == list(range(1_000 if size == 8 else 30))


@pytest.mark.parametrize("size", [8, limits.FRAME_BYTES_MAX - 5])
async def test_a_sender_waits_for_a_reader_who_is_behind(size: int) -> None:
    one, other = stream_pair()
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(1_000):
            await one.send(frame(number, size))
            sent += 1

    sender = asyncio.create_task(send())
    await until(lambda: sent)
    for _ in range(5):
        await asyncio.sleep(0)
    held = sent
    assert held < 1_000
    assert other.queued_bytes <= max(limits.STREAM_QUEUE_BYTES_MAX, size)  # one frame always fits
    for number in range(1_000):
        received = await other.recv()
        assert received is not None
        assert received.body[:8] == number.to_bytes(8, "big")
    await sender


async def test_a_waiting_sender_learns_of_the_close() -> None:
    one, other = stream_pair()

    async def send() -> None:
        while True:
            await one.send(frame(0, 100_000))

    sender = asyncio.create_task(send())
    await until(lambda: other.queued_bytes > limits.STREAM_QUEUE_BYTES_MAX // 2)
    await other.close()

    with pytest.raises(UnavailableError):
        await sender
    assert other.queued_bytes == 0


async def test_a_cancelled_receiver_loses_no_frame() -> None:
    one, other = stream_pair()
    for number in range(50):
        receiver = asyncio.create_task(other.recv())
        await asyncio.sleep(0)
        await one.send(frame(number))
        receiver.cancel()
        try:
            received = await receiver
        except asyncio.CancelledError:
            received = await other.recv()

        assert received == frame(number)


async def test_several_receivers_share_what_comes() -> None:
    one, other = stream_pair()
    receivers = [asyncio.create_task(other.recv()) for _ in range(10)]
    await asyncio.sleep(0)
    for number in range(10):
        await one.send(frame(number))

    received = await asyncio.wait_for(asyncio.gather(*receivers), 60)

    assert sorted(int.from_bytes(got.body, "big") for got in received if got) == list(range(10))


async def test_closing_the_rpc_ends_everything(rpc: Rpc, service: Service) -> None:
    async def hang(stream: Stream) -> None:
        await asyncio.Event().wait()

    service.on_stream = hang
    streams = [await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER) for _ in range(5)]
    await asyncio.sleep(0)
    await rpc.close()

    for stream in streams:
        with pytest.raises(UnavailableError):
            await stream.recv()
    with pytest.raises(UnavailableError):
        await rpc.call(NODE, Method.GET, b"", caller=CALLER, timeout_s=60)
    assert rpc.streams_open == 0


async def test_streams_have_a_bound(rpc: Rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rpc", "link.client"):
        monkeypatch.setattr(f"dsec.cluster.{module}.NODE_STREAMS_MAX", 0)

    with pytest.raises(Exception, match="streams open"):
        await rpc.open(NODE, Method.EXEC_OUTPUT, b"", caller=CALLER)
