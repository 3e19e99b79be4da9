"""A command that fails while a layer of its sandbox cannot be read ends with a cause that says so."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsec.backends.base import InstanceUsage
from dsec.backends.fake.host import FakeHost
from dsec.core.errors import DeadlineError, DsecError, HostError, InvalidArgumentError, UnavailableError
from dsec.node.accounting import UsageMeter
from dsec.node.environments import StoredEnvironments
from dsec.storage.layers import LayerKind, LayerRecord, LayerStore, RemoteBlob
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.testing.nodes import FakeEnvironments, NodeClient, crash, fake_node
from dsec.testing.waiting import eventually
from dsec.wire.codec import pack, unpack
from dsec.wire.loader import (
    MESSAGE_BYTES_MAX,
    FailureAnswer,
    FailureArgs,
    LoaderOp,
    LoaderRequest,
    ReadFailure,
)
from dsec.wire.node import Method, StdinWrite
from dsec.wire.records import ExecInfo, ExecQuery
from tests.node_calls import create, start

FAR, NEAR = "1" * 64, "2" * 64


class TalkedTo:
    """A loader of which somebody reads, as far as it is asked for failures."""

    def __init__(self, cause: str = "gone", at_s: float = 100.0) -> None:
        self.answer: FailureAnswer | DsecError = FailureAnswer(ReadFailure(digest=FAR, cause=cause, at_s=at_s))
        self.asked: list[tuple[str, ...]] = []

    async def ask(self, op: LoaderOp, args: FailureArgs, answer: type, *, timeout_s: float) -> FailureAnswer:
        assert (op, answer) == (LoaderOp.FAILURE, FailureAnswer)
        self.asked.append(args.digests)
        if isinstance(self.answer, DsecError):
            raise self.answer
        return self.answer


def remote_of(loader: TalkedTo) -> RemoteLayers:
    return RemoteLayers(loader)  # type: ignore[arg-type]


# ---- what the loader says -------------------------------------------------------------------------


async def test_only_a_read_that_failed_since_then_counts() -> None:
    remote = remote_of(TalkedTo(at_s=100.0))

    assert await remote.failed_since([FAR], 99.0) == "gone"
    assert await remote.failed_since([FAR], 100.0) == "gone"
    assert await remote.failed_since([FAR], 100.001) is None


@pytest.mark.parametrize(
    "said",
    [
        FailureAnswer(),
        UnavailableError("it does not run"),
        DeadlineError("it hangs"),
        InvalidArgumentError("no operation"),  # one that was started by an older node
        HostError("no"),
    ],
    ids=lambda said: type(said).__name__,
)
async def test_a_loader_that_says_nothing_costs_nothing_but_the_cause(said: FailureAnswer | DsecError) -> None:
    loader = TalkedTo()
    loader.answer = said

    assert await remote_of(loader).failed_since([FAR], 0.0) is None


# ---- what a node makes of it ----------------------------------------------------------------------


def stored(root: Path, loader: TalkedTo) -> StoredEnvironments:
    """FAR is a layer of a store, NEAR is not."""
    layers = LayerStore(root)
    for digest in (FAR, NEAR):
        with layers.staging() as work:
            (work / "layer").mkdir()
            (work / "layer" / "meta.erofs").touch()
            blob = RemoteBlob(store="file:///store", size=1, chunk_size=1, stored=1) if digest == FAR else None
            record = LayerRecord(
                digest=digest, kind=LayerKind.EROFS, size_bytes=1, entries=1, created_at=1.0, remote=blob
            )
            layers.publish(work / "layer", record)
    return StoredEnvironments(SimpleNamespace(layers=layers), remote_of(loader))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("corrupt", "layer_corrupt"),
        ("gone", "layer_unavailable"),
        ("denied", "layer_unavailable"),
        ("unreachable", "layer_unavailable"),
        ("unavailable", "layer_unavailable"),
    ],
)
async def test_what_the_store_did_becomes_a_cause(tmp_path: Path, said: str, cause: str) -> None:
    loader = TalkedTo(said)

    assert await stored(tmp_path, loader).read_failure([NEAR, FAR], 1.0) == cause
    assert loader.asked == [(FAR,)]


async def test_nobody_is_asked_for_layers_that_are_on_the_node_or_gone(tmp_path: Path) -> None:
    loader = TalkedTo()
    environments = stored(tmp_path, loader)

    assert await environments.read_failure([], 1.0) is None
    assert await environments.read_failure([NEAR, "3" * 64], 1.0) is None
    assert loader.asked == []


def test_a_kill_for_memory_goes_before_a_layer_and_a_layer_before_a_full_disk() -> None:
    meter = UsageMeter(0.0)
    meter.sample(InstanceUsage(oom_kills=1, disk_full=True), 1.0)

    assert meter.limit_hit(0, "layer_corrupt") == "oom"
    assert meter.limit_hit(1, "layer_corrupt") == "layer_corrupt"
    assert meter.limit_hit(1) == "disk_full"


class Failing(FakeEnvironments):
    """A layer that fails as told, at a moment of the monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self.failed_at = -1.0
        self.asked = 0

    async def read_failure(self, digests: Sequence[str], since_s: float) -> str | None:
        self.asked += 1
        return "layer_unavailable" if self.failed_at >= since_s else None


async def test_a_command_that_fails_during_it_has_the_cause_and_others_have_not(tmp_path: Path) -> None:
    environments = Failing()
    async with fake_node(tmp_path, environments=environments) as client:
        sandbox = await create(client)
        before = await start(client, sandbox.id, shell="exit 3")
        running = await start(client, sandbox.id, shell="cat; exit 4", stdin=True, wait_s=None)
        killed = await start(client, sandbox.id, shell="cat; kill -9 $$", stdin=True, wait_s=None)
        environments.failed_at = time.monotonic()
        after = await start(client, sandbox.id, shell="exit 5")
        assert environments.asked == 2

        good = await start(client, sandbox.id, "true")
        late = await start(client, sandbox.id, "sleep", "60", timeout_s=0.05)
        assert environments.asked == 2
        ends = [await ended(client, sandbox.id, exec.exec.id) for exec in (running, killed)]

    assert (before.exec.exit_code, before.exec.cause) == (3, None)
    assert [(info.exit_code, info.signal, info.cause) for info in ends] == [
        (4, None, "layer_unavailable"),
        (None, 9, "layer_unavailable"),
    ]
    assert (after.exec.exit_code, after.exec.cause) == (5, None)
    assert (good.exec.cause, late.exec.cause) == (None, "timed_out")


async def ended(client: NodeClient, sandbox: str, exec: str) -> ExecInfo:
    await client.call(Method.EXEC_STDIN, StdinWrite(sandbox=sandbox, exec=exec, data=b"", eof=True), dict)
    return await client.call(Method.EXEC_GET, ExecQuery(sandbox=sandbox, exec=exec, wait_s=20), ExecInfo)


async def test_a_command_that_another_node_process_began_has_it_too(tmp_path: Path) -> None:
    host, environments = FakeHost(), Failing()
    async with fake_node(tmp_path, host=host, environments=environments) as client:
        sandbox = await create(client)
        environments.failed_at = time.monotonic() - 60.0
        first = await start(client, sandbox.id, shell="cat; exit 4", stdin=True, wait_s=None)
        second = await start(client, sandbox.id, shell="cat; exit 4", stdin=True, wait_s=None)
        await crash(client.node)

    async with fake_node(tmp_path, host=host, environments=environments) as client:
        before = await ended(client, sandbox.id, first.exec.id)
        environments.failed_at = time.monotonic()
        during = await ended(client, sandbox.id, second.exec.id)

    assert (before.exit_code, before.cause) == (4, None)
    assert (during.exit_code, during.cause) == (4, "layer_unavailable")


# ---- asking -----------------------------------------------------------------------------------------


@contextmanager
def answering(path: Path, answers: Sequence[bytes | None]) -> Iterator[list[str]]:
    """A loader's socket: each connection's only request is answered by the next of these; None: never."""
    seen: list[str] = []
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(path))
    server.listen()
    ends = threading.Event()

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # it is being closed
            with connection:
                seen.append(unpack(connection.recv(MESSAGE_BYTES_MAX), LoaderRequest).op)
                if answer is None:
                    ends.wait(60)
                else:
                    connection.send(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ends.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        server.close()


def ask(loader: Loader, timeout_s: float = 60.0) -> Any:
    return loader.ask(LoaderOp.FAILURE, FailureArgs((FAR,)), FailureAnswer, timeout_s=timeout_s)


async def test_many_ask_at_once_and_each_is_answered(short_tmp: Path) -> None:
    failure = FailureAnswer(ReadFailure(digest=FAR, cause="gone", at_s=1.5))
    loader = Loader(short_tmp, short_tmp / "cache", cache_bytes=0)
    with answering(short_tmp / "loader.sock", [pack({"id": 1, "ok": failure})] * 20) as seen:
        assert await asyncio.gather(*(ask(loader) for _ in range(20))) == [failure] * 20
    assert seen == ["failure"] * 20


async def test_a_loader_that_hangs_is_waited_for_no_longer_than_said(short_tmp: Path) -> None:
    loader = Loader(short_tmp, short_tmp / "cache", cache_bytes=0)
    with answering(short_tmp / "loader.sock", [None]) as seen:
        asked = [asyncio.ensure_future(ask(loader, 0.2)) for _ in range(3)]
        await eventually(lambda: all(task.done() for task in asked))
        assert [type(task.exception()) for task in asked] == [DeadlineError] * 3
    assert seen == ["failure"]


async def test_a_loader_that_is_not_there_or_says_no_is_a_typed_error_and_none_is_started(short_tmp: Path) -> None:
    loader = Loader(short_tmp, short_tmp / "cache", cache_bytes=0, binary=Path("/nowhere"))
    with pytest.raises(UnavailableError):
        await ask(loader)
    refusal = pack({"id": 1, "ok": None, "error": {"code": "invalid", "message": "no operation"}})
    with answering(short_tmp / "loader.sock", [refusal]), pytest.raises(InvalidArgumentError, match="no operation"):
        await ask(loader)
