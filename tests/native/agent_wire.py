"""A raw client of the agent protocol for the agent's own tests: frames in, frames out, no policy."""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dsec.wire.frames import Channel, Data, Frame, FrameDecoder, FrameType, decode_data, encode_data, encode_frame

DEADLINE_S = 60.0


def request(stream: int, op: str, **args: Any) -> bytes:
    """The frame of a request, for those who send several in one piece."""
    return encode_frame(FrameType.REQ, stream, msgspec.msgpack.encode({"op": op, "args": args}))


class Refused(Exception):
    """The agent answered ERR."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.code: str = body["code"]
        self.errno: str | None = body.get("errno")


@dataclass
class Output:
    """What an exec's stream gave until its end."""

    out: bytes = b""
    err: bytes = b""
    end: dict[str, Any] = field(default_factory=dict)
    chunks: list[Data] = field(default_factory=list)


class AgentWire:
    """One connection. Frames of other streams than the one asked for are kept until they are asked for."""

    def __init__(self, path: Path | str, *, sandbox: str = "test", hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._decoder = FrameDecoder()
        self._waiting: dict[int, deque[Frame]] = defaultdict(deque)
        self._next_stream = 1
        self.hello: dict[str, Any] = {}
        try:
            self.socket.connect(str(path))
            self._open(sandbox if hello else None)
        except BaseException:
            self.close()
            raise

    def _open(self, sandbox: str | None) -> None:
        nonce = b"DSEC" + secrets.token_bytes(16)
        self.socket.sendall(nonce)
        echo = b""
        while len(echo) < len(nonce):
            echo += self._receive(DEADLINE_S)
        assert echo[: len(nonce)] == nonce
        self._sort(echo[len(nonce) :])
        if sandbox is not None:
            self.send(FrameType.HELLO, 0, {"generation_min": 1, "generation_max": 1, "sandbox": sandbox})
            self.hello = self.body(self.frame(0), FrameType.HELLO)

    def close(self) -> None:
        self.socket.close()

    # ---- frames ----

    def send(self, kind: FrameType, stream: int, body: Any) -> None:
        self.socket.sendall(encode_frame(kind, stream, msgspec.msgpack.encode(body)))

    def data(self, stream: int, offset: int, payload: bytes) -> None:
        self.socket.sendall(encode_data(stream, Channel.IN, offset, 0, payload))

    def frame(self, stream: int, timeout_s: float = DEADLINE_S) -> Frame:
        """The next frame of a stream."""
        deadline = time.monotonic() + timeout_s
        while not self._waiting[stream]:
            self._sort(self._receive(deadline - time.monotonic()))
        return self._waiting[stream].popleft()

    def next_streams(self, count: int) -> list[int]:
        """Of which streams the next frames are, in the order in which they come."""
        streams: list[int] = []
        while len(streams) < count:
            found = self._decoder.feed(self._receive(DEADLINE_S))
            streams += [frame.stream for frame in found]
        return streams

    def shown(self, stream: int, end: bytes) -> bytes:
        """Output until it ends so: a line that is written to a terminal may come in pieces."""
        output = b""
        while not output.endswith(end):
            output += decode_data(self.frame(stream).body).payload
        return output

    @contextmanager
    def time_held(self) -> Iterator[None]:
        """In the block no timeout fires, however long a loaded machine takes; after it those that are due do."""
        self.call("freeze_prepare")
        yield
        self.call("clock", paused_s=0.0, wall_s=None)

    def none_within(self, stream: int, timeout_s: float) -> bool:
        """Whether the stream stays silent that long."""
        try:
            self._waiting[stream].appendleft(self.frame(stream, timeout_s))
        except TimeoutError:
            return True
        return False

    @staticmethod
    def body(frame: Frame, kind: FrameType) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.msgpack.decode(frame.body) if frame.type != FrameType.DATA else {}
        if frame.type == FrameType.ERR and kind != FrameType.ERR:
            raise Refused(body)
        assert frame.type == kind, (frame, kind)
        return body

    # ---- operations ----

    def open(self, op: str, **args: Any) -> int:
        """Sends a request without waiting for its answer."""
        stream = self._next_stream
        self._next_stream += 2
        self.send(FrameType.REQ, stream, {"op": op, "args": args})
        return stream

    def result(self, stream: int) -> dict[str, Any]:
        return self.body(self.frame(stream), FrameType.RES)

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        return self.result(self.open(op, **args))

    def credit(self, stream: int, count: int) -> None:
        self.send(FrameType.CREDIT, stream, {"bytes": count})

    def end(self, stream: int, offset: int = 0) -> None:
        self.send(FrameType.END, stream, {"offset": offset})

    def collect(self, stream: int, *, ack: str | None = None, timeout_s: float = DEADLINE_S) -> Output:
        """Data until END, with credit for all of it; acknowledged to the exec `ack`."""
        output = Output()
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self.frame(stream, deadline - time.monotonic())
            if frame.type != FrameType.DATA:
                output.end = self.body(frame, FrameType.END)
                return output
            data = decode_data(frame.body)
            output.chunks.append(data)
            if data.channel == Channel.OUT:
                output.out += data.payload
            else:
                output.err += data.payload
            self.credit(stream, len(data.payload))
            if ack is not None:
                first = output.chunks[0]
                base = first.offset if first.channel == Channel.OUT else 0
                self.call("ack", id=ack, out=base + len(output.out), err=len(output.err))

    def run(self, id: str, *argv: bytes | str, ack: bool = True, **args: Any) -> Output:
        """An exec from start to end, its record acknowledged."""
        if argv:
            args["argv"] = [a.encode() if isinstance(a, str) else a for a in argv]
        if isinstance(args.get("shell"), str):
            args["shell"] = args["shell"].encode()
        stream = self.open("exec", id=id, **args)
        self.result(stream)
        output = self.collect(stream, ack=id if ack else None)
        if ack:
            self.call("exit_ack", id=id)
        return output

    # ---- bytes ----

    def _receive(self, timeout_s: float) -> bytes:
        if timeout_s <= 0 or not select.select([self.socket], [], [], timeout_s)[0]:
            raise TimeoutError
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the agent closed the connection")
        return data

    def _sort(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._waiting[frame.stream].append(frame)
