"""A connection to a port as the file or socket that other code expects."""

from __future__ import annotations

import http.client
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec.backends.fake.transfers import ECHO_PORT
from dsec.sdk.socketlike import SocketLike
from tests.contract.sdk_service import running_service


@pytest.fixture(scope="module")
def sb() -> Iterator[dsec.Sandbox]:
    with (
        tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory,
        running_service(Path(directory)) as service,
        dsec.Client(service.url) as client,
        client.create("base", backend="fake") as found,
    ):
        yield found


def test_a_connection_is_a_file_for_text_and_for_bytes(sb: dsec.Sandbox) -> None:
    with sb.connect_port(ECHO_PORT) as connection:
        with connection.makefile("rw", newline="") as text:
            text.write("one\ntwö\n")
            text.flush()
            assert [text.readline(), text.readline()] == ["one\n", "twö\n"]
        with connection.makefile("wb") as out:
            out.write(b"x" * 100_000)
        connection.write_eof()
        with connection.makefile("rb") as into:
            assert into.read() == b"x" * 100_000


def test_without_a_buffer_what_there_is_is_read(sb: dsec.Sandbox) -> None:
    with sb.connect_port(ECHO_PORT) as connection:
        raw = connection.makefile("rwb", 0)

        assert raw.write(b"abc") == 3
        assert raw.read(100) == b"abc"


class Canned(SocketLike):
    """A peer that has said all it will."""

    def __init__(self, said: bytes) -> None:
        self.heard = b""
        self._said = io.BytesIO(said)

    def read(self, max_bytes: int = 65_536) -> bytes:
        return self._said.read(max_bytes)

    def write(self, data: bytes) -> None:
        self.heard += data

    def close(self) -> None:
        """As http.client does at its end."""


def test_http_client_speaks_over_it() -> None:
    peer = Canned(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    connection = http.client.HTTPConnection("sandbox")
    connection.sock = peer  # type: ignore[assignment]

    connection.request("GET", "/page")

    assert connection.getresponse().read() == b"hi"
    assert peer.heard.startswith(b"GET /page HTTP/1.1\r\n")


@pytest.mark.parametrize(("mode", "buffering"), [("x", None), ("", None), ("r+", None), ("r", 0)])
def test_other_modes_are_refused(mode: str, buffering: int | None) -> None:
    with pytest.raises(dsec.errors.InvalidArgumentError):
        Canned(b"").makefile(mode, buffering)
