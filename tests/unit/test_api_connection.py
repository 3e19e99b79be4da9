"""How an answer gets onto its connection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dsec.api.connection import Connection


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.said: list[bytes | None] = []

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def close(self) -> None:
        self.said.append(None)


def connection_on(wire: Wire) -> Any:
    connection = Connection.__new__(Connection)
    connection.transport = cast(Any, wire)
    connection.cycle = cast(Any, SimpleNamespace(transport=wire))
    return connection


def test_head_and_body_of_an_answer_go_out_at_once() -> None:
    wire = Wire()
    connection = connection_on(wire)

    with connection.joined():
        connection.cycle.transport.write(b"head ")
        connection.cycle.transport.write(b"body")
        connection.cycle.transport.close()

    assert wire.said == [b"head body", None]
    assert connection.cycle.transport is wire


def test_an_answer_that_fails_half_way_still_shows_what_there_was() -> None:
    wire = Wire()
    connection = connection_on(wire)

    try:
        with connection.joined():
            connection.cycle.transport.write(b"head")
            raise ConnectionError
    except ConnectionError:
        pass

    assert wire.said == [b"head"]
    assert connection.cycle.transport is wire
