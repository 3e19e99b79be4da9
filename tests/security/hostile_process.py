"""A program that has taken the place of an agent and does its node harm, in the way that its argument names.

    hostile_process.py SOCKET WAY < BOOT_ID

Listens until it is killed; serves each connection with a thread, once it has been told who the agent was.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

_HEADER = struct.Struct(">IBI")
HELLO, REQ, RES, ERR, DATA, CREDIT, END, EVENT = range(1, 9)
NOISE_BYTES = 192 << 20  # of a flood that nobody stops earlier


class Link:
    """One connection of the node, as an agent sees it."""

    def __init__(self, connection: socket.socket, boot_id: str) -> None:
        self.connection = connection
        self.boot_id = boot_id
        self.preamble = self.read(20)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.connection.recv(count - len(data))
            if not piece:
                raise ConnectionError
            data += piece
        return data

    def write(self, data: bytes) -> None:
        self.connection.sendall(data)

    def frame(self) -> tuple[int, int, bytes]:
        length, kind, stream = _HEADER.unpack(self.read(_HEADER.size))
        return kind, stream, self.read(length - 5)

    def open(self, **fields: object) -> None:
        """As a well-behaved agent would; `fields` change what its hello says."""
        self.write(self.preamble)
        while self.frame()[0] != HELLO:
            pass
        hello = {"generation": 1, "version": "hostile", "boot_id": self.boot_id, "execs": [], **fields}
        self.write(frame(HELLO, 0, hello))

    def request(self, *ops: str) -> tuple[str, int, dict[str, object]]:
        """The next request of one of these, or any. Others get no answer."""
        while True:
            kind, stream, body = self.frame()
            if kind == REQ:
                request = msgspec.msgpack.decode(body, strict=False)
                if not ops or request["op"] in ops:
                    return request["op"], stream, request["args"]

    def started(self) -> int:
        """Accepts the next exec. Its stream."""
        _, stream, args = self.request("exec")
        self.write(frame(RES, stream, {"id": args["id"], "pid": 7}))
        return stream


def frame(kind: int, stream: int, body: object) -> bytes:
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return _HEADER.pack(5 + len(data), kind, stream) + data


def output(stream: int, channel: int, offset: int, sequence: int, payload: bytes) -> bytes:
    return frame(DATA, stream, struct.pack(">BQQ", channel, offset, sequence) + payload)


WAYS: dict[str, Callable[[Link], None]] = {}


def way(run: Callable[[Link], None]) -> Callable[[Link], None]:
    WAYS[run.__name__] = run
    return run


def _noise() -> Iterator[bytes]:
    source = random.Random(7)
    block = source.randbytes(1 << 20)
    for _ in range(NOISE_BYTES >> 20):
        yield block


@way
def noise_instead_of_the_marker(link: Link) -> None:
    for block in _noise():
        link.write(block)


@way
def another_marker(link: Link) -> None:
    link.write(b"DSEC" + os.urandom(16))
    link.write(frame(HELLO, 0, {"generation": 1, "version": "x", "boot_id": link.boot_id}))
    link.read(1 << 30)


@way
def half_a_marker_for_ever(link: Link) -> None:
    while True:
        link.write(link.preamble[:10])
        time.sleep(0.01)


@way
def silence(link: Link) -> None:
    link.read(1 << 30)


@way
def hello_of_many_execs(link: Link) -> None:
    link.open(execs=[{"id": f"ex_{n}", "pid": n} for n in range(20_000)])


@way
def hello_of_another_boot(link: Link) -> None:
    link.open(boot_id="another")
    link.read(1 << 30)


@way
def hello_without_end(link: Link) -> None:
    link.open()
    for _ in range(1_000_000):
        link.write(frame(HELLO, 0, {"generation": 1, "version": "x", "boot_id": link.boot_id}))


@way
def hello_and_goodbye(link: Link) -> None:
    link.open()


@way
def a_huge_length(link: Link) -> None:
    link.open()
    link.request()
    link.write(struct.pack(">IBI", 0xFFFF_FFFF, RES, 1))
    for block in _noise():
        link.write(block)


@way
def lengths_that_are_too_small(link: Link) -> None:
    link.open()
    link.request()
    link.write(struct.pack(">IBI", 0, RES, 1) * 1_000)
    link.read(1 << 30)


@way
def half_a_frame(link: Link) -> None:
    link.open()
    _, stream, _ = link.request()
    link.write(frame(RES, stream, {"x": "y" * 100})[:40])
    link.read(1 << 30)


@way
def byte_by_byte(link: Link) -> None:
    link.open()
    _, stream, _ = link.request()
    for byte in frame(RES, stream, bytes(1 << 20)[:-5]):
        link.write(bytes([byte]))
        time.sleep(0.005)


@way
def an_answer_to_nothing(link: Link) -> None:
    link.open()
    link.write(frame(RES, 4_000_001, {}))
    link.read(1 << 30)


@way
def a_request_of_its_own(link: Link) -> None:
    link.open()
    link.write(frame(REQ, 2, {"op": "exec", "args": {}}))
    link.read(1 << 30)


@way
def answers_that_nest(link: Link) -> None:
    link.open()
    _, stream, _ = link.request()
    link.write(frame(RES, stream, b"\x91" * 500_000 + b"\xc0"))
    link.read(1 << 30)


@way
def answers_that_declare_more(link: Link) -> None:
    link.open()
    _, stream, _ = link.request()
    link.write(frame(RES, stream, b"\xdf\xff\xff\xff\xff"))  # a map of 4 thousand million entries
    link.read(1 << 30)


@way
def credit_without_end(link: Link) -> None:
    link.open()
    stream = link.started()
    for _ in range(1_000_000):
        link.write(frame(CREDIT, stream, {"bytes": 1 << 62}))


@way
def output_beyond_the_credit(link: Link) -> None:
    link.open()
    stream = link.started()
    offset, piece = 0, bytes(256 << 10)
    for sequence in range(NOISE_BYTES // len(piece)):
        link.write(output(stream, 1, offset, sequence, piece))
        offset += len(piece)


@way
def output_with_holes(link: Link) -> None:
    link.open()
    stream = link.started()
    link.write(output(stream, 1, 1 << 40, 0, b"x"))
    link.read(1 << 30)


@way
def output_that_goes_back(link: Link) -> None:
    link.open()
    stream = link.started()
    for _ in range(1_000):
        link.write(output(stream, 1, 0, 0, b"x" * 100))
    link.read(1 << 30)


@way
def an_end_that_lies(link: Link) -> None:
    link.open()
    stream = link.started()
    usage = {"wall_us": -1, "user_us": 1 << 62}
    link.write(frame(END, stream, {"end": {"status": "exited", "code": 1 << 40, "out_bytes": 5, "usage": usage}}))
    link.read(1 << 30)


@way
def two_ends(link: Link) -> None:
    link.open()
    stream = link.started()
    end = frame(END, stream, {"end": {"status": "exited", "code": 0}})
    link.write(end * 10_000)
    link.read(1 << 30)


@way
def errors_that_forge_lines(link: Link) -> None:
    link.open()
    while True:
        _, stream, _ = link.request()
        text = "\n\x1b]0;owned\x07 level=error root logged in\r" * 10_000
        link.write(frame(ERR, stream, {"code": "x\ny" * 1_000, "message": text, "errno": "E\n" * 1_000}))


@way
def events_without_end(link: Link) -> None:
    link.open()
    _, stream, _ = link.request()
    for _ in range(1_000_000):
        link.write(frame(EVENT, stream, {"kind": "created", "path": b"/x"}))


@way
def mutated_frames(link: Link) -> None:
    source = random.Random(os.urandom(8))
    link.open()
    op, stream, _ = link.request()
    honest = [
        frame(RES, stream, {"id": "x", "pid": 7}),
        output(stream, 1, 0, 0, b"some output\n"),
        frame(CREDIT, stream, {"bytes": 100}),
        frame(END, stream, {"end": {"status": "exited", "code": 0, "out_bytes": 12}}),
        frame(ERR, stream, {"code": op, "message": "no"}),
    ]
    while True:
        data = bytearray(source.choice(honest))
        for _ in range(source.randrange(4)):
            data[source.randrange(len(data))] = source.randrange(256)
        link.write(bytes(data[: source.randrange(len(data)) if source.random() < 0.1 else None]))


@way
def nothing_is_read(link: Link) -> None:
    link.open()
    while True:
        time.sleep(1)


def _serve(connection: socket.socket, run: Callable[[Link], None], boot_id: str) -> None:
    with connection, suppress(OSError):
        run(Link(connection, boot_id))


def main(path: str, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)
        boot_id = sys.stdin.readline().strip()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, WAYS[name], boot_id), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
