"""Watches and connections of the real agent."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dsec.wire.frames import FrameType, decode_data
from tests.native.agent_process import Agent, eventually
from tests.native.agent_wire import AgentWire, Refused
from tests.native.test_agent_file_operations import write


class Watch:
    def __init__(self, wire: AgentWire, path: Path, *, recursive: bool = False) -> None:
        self.wire = wire
        self.stream = wire.open("watch", path=os.fsencode(path), recursive=recursive)
        wire.result(self.stream)

    def until(self, kind: str, path: bytes) -> list[dict[str, Any]]:
        events = []
        while not events or (events[-1]["kind"], events[-1]["path"]) != (kind, path):
            events.append(self.wire.body(self.wire.frame(self.stream), FrameType.EVENT))
        return events


def test_changes_are_told_in_order(wire: AgentWire, tmp_path: Path) -> None:
    watch = Watch(wire, tmp_path)

    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0o600)
    (tmp_path / "f").rename(tmp_path / "g")
    (tmp_path / "g").unlink()

    events = watch.until("deleted", b"g")
    assert [(event["kind"], event["path"], event["source"]) for event in events] == [
        ("created", b"f", None),
        ("modified", b"f", None),
        ("attributes", b"f", None),
        ("moved", b"g", b"f"),
        ("deleted", b"g", None),
    ]


def test_an_upload_is_told_as_the_file_it_becomes(wire: AgentWire, tmp_path: Path) -> None:
    watch = Watch(wire, tmp_path, recursive=True)

    write(wire, tmp_path / "f", b"new")
    write(wire, tmp_path / "f", b"again")
    write(wire, tmp_path / "d" / "g", b"in a directory that comes with it")
    stream = wire.open("write", path=os.fsencode(tmp_path / "never"))
    wire.result(stream)
    wire.send(FrameType.ERR, stream, {"code": "cancelled", "message": ""})
    (tmp_path / "end").touch()

    told = [(event["kind"], event["path"]) for event in watch.until("created", b"end")]
    assert [event for event in told if event != ("created", b"end")] == [
        ("created", b"f"),
        ("modified", b"f"),
        ("created", b"d"),
        ("created", b"d/g"),
    ]


def test_a_recursive_watch_follows_new_and_moved_directories(wire: AgentWire, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    watch = Watch(wire, tmp_path, recursive=True)

    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "f").touch()
    seen = watch.until("created", b"new/deep/f")
    assert {event["path"] for event in seen if event["directory"]} == {b"new", b"new/deep"}

    (tmp_path / "old").rename(tmp_path / "new" / "moved")
    (tmp_path / "new" / "moved" / "g").touch()
    moved = watch.until("created", b"new/moved/g")
    assert ("moved", b"new/moved", b"old") in [(e["kind"], e["path"], e["source"]) for e in moved]


def test_a_directory_that_leaves_is_not_watched_any_more(wire: AgentWire, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "d").mkdir(parents=True)
    outside.mkdir()
    watch = Watch(wire, inside, recursive=True)

    (inside / "d").rename(outside / "d")
    watch.until("deleted", b"d")
    (outside / "d" / "secret").touch()
    (inside / "end").touch()

    assert [event["path"] for event in watch.until("created", b"end")] == [b"end"]


def test_an_overflow_is_said_and_not_silent(wire: AgentWire, tmp_path: Path) -> None:
    watch = Watch(wire, tmp_path)
    # More than the kernel or the agent queues, while nobody reads.
    for number in range(60_000):
        (tmp_path / "f").touch() if number % 2 else (tmp_path / "f").unlink(missing_ok=True)
    (tmp_path / "last").touch()

    last = None
    count = 0
    while last not in {"overflow", b"last"}:
        event = wire.body(wire.frame(watch.stream), FrameType.EVENT)
        count += 1
        last = "overflow" if event["kind"] == "overflow" else event["path"]
    assert count > 1


def test_ending_a_watch_gives_its_descriptor_back(agent: Agent, wire: AgentWire, tmp_path: Path) -> None:
    before = agent.descriptors()
    first, second = Watch(wire, tmp_path), Watch(wire, tmp_path)
    assert agent.descriptors() == before + 1

    for watch in (first, second):
        wire.end(watch.stream)
        assert wire.body(wire.frame(watch.stream), FrameType.END) == {}

    assert agent.descriptors() == before
    with pytest.raises(Refused) as refused:
        Watch(wire, tmp_path / "none")
    assert refused.value.errno == "ENOENT"


@pytest.fixture(params=["tcp4", "tcp6", "unix"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A server that sends back what it gets, then closes; and how to reach it."""
    if request.param == "unix":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / "s"))
        args: dict[str, Any] = {"path": os.fsencode(tmp_path / "s")}
    else:
        family, host = (socket.AF_INET, "127.0.0.1") if request.param == "tcp4" else (socket.AF_INET6, "::1")
        server = socket.socket(family)
        try:
            server.bind((host, 0))
        except OSError:
            server.close()
            pytest.skip("no such address here")
        args = {"host": host if request.param == "tcp6" else "localhost", "port": server.getsockname()[1]}
    server.listen()

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(65_536):
                peer.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield args
    thread.join(10)
    server.close()


def test_a_connection_carries_both_ways_and_half_closes(wire: AgentWire, echo: dict[str, Any]) -> None:
    stream = wire.open("connect", **echo)
    assert wire.result(stream) == {}
    payload = os.urandom(1_000_000)
    credit, at, received = 256 << 10, 0, b""

    while len(received) < len(payload):
        while at < len(payload) and credit > 0:
            piece = payload[at : at + min(credit, 32_768)]
            wire.data(stream, at, piece)
            at += len(piece)
            credit -= len(piece)
        frame = wire.frame(stream)
        if frame.type == FrameType.CREDIT:
            credit += wire.body(frame, FrameType.CREDIT)["bytes"]
            continue
        data = decode_data(frame.body)
        received += data.payload
        wire.credit(stream, len(data.payload))
    wire.end(stream, at)

    while (frame := wire.frame(stream)).type == FrameType.CREDIT:
        pass
    assert wire.body(frame, FrameType.END) == {}
    assert received == payload


def test_what_cannot_be_reached_is_refused(wire: AgentWire, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for args in ({"port": closed.getsockname()[1]}, {"path": os.fsencode(tmp_path / "none")}):
            with pytest.raises(Refused) as refused:
                wire.call("connect", **args)
            assert refused.value.code == "connect_failed"
            assert refused.value.errno in {"ECONNREFUSED", "ENOENT"}


def test_connections_end_with_the_channel(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = agent.connect()
        wire.result(wire.open("connect", port=server.getsockname()[1]))
        peer, _ = server.accept()
        with peer:
            peer.settimeout(60)
            wire.close()
            assert peer.recv(1) == b""
    eventually(lambda: agent.descriptors() < 12)
