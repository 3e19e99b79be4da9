"""A web server of a directory that is as far and as narrow as one says: what a store is to a node.

`python -m bench.throttle --root DIR --latency-ms 5 --bytes-per-second 50000000` says its port on standard output, and
at `/-/counts` what it has answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

_PIECE_BYTES: Final = 64 << 10
_LATE_S: Final = 0.05  # what a busy machine is late by is made up for
_COUNTS: Final = "/-/counts"


class Throttle:
    """One line for all: pieces go out one after another, at the rate of the line."""

    def __init__(self, root: Path, latency_s: float, rate: float) -> None:
        self._root = root
        self._latency_s = latency_s
        self._rate = rate
        self._free_at = 0.0
        self._requests = 0
        self._bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        if path == _COUNTS:
            body = json.dumps({"requests": self._requests, "bytes": self._bytes}).encode()
            writer.write(_head("200 OK", len(body)) + body)
            return True
        self._requests += 1
        await asyncio.sleep(self._latency_s)
        file = self._root / path.lstrip("/")
        if not file.is_file():
            writer.write(_head("404 Not Found", 0))
            return True
        size = file.stat().st_size
        first, last = _range(fields.get("range"), size)
        ranged = f"Content-Range: bytes {first}-{last}/{size}\r\n" if "range" in fields else ""
        writer.write(_head("206 Partial" if ranged else "200 OK", last - first + 1, ranged))
        if method == "GET":
            with file.open("rb") as content:
                content.seek(first)
                await self._send(content, last - first + 1, writer)
        await writer.drain()
        return True

    async def _send(self, content: IO[bytes], left: int, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while left > 0:
            piece = content.read(min(_PIECE_BYTES, left))
            left -= len(piece)
            self._free_at = max(self._free_at, clock() - _LATE_S) + len(piece) / self._rate
            await asyncio.sleep(max(0.0, self._free_at - clock()))
            writer.write(piece)
            await writer.drain()
            self._bytes += len(piece)


def _head(status: str, length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def _range(field: str | None, size: int) -> tuple[int, int]:
    if field is None:
        return 0, size - 1
    first, _, last = field.removeprefix("bytes=").partition("-")
    return int(first), min(int(last), size - 1)


class Store:
    """A running one."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}{_COUNTS}", timeout=60) as answer:
            found: dict[str, int] = json.load(answer)
            return found


@contextlib.contextmanager
def throttled_store(root: Path, *, latency_ms: float, rate: float) -> Iterator[Store]:
    """In a process of its own; each starts with counts of 0."""
    words = ["--root", str(root), "--latency-ms", str(latency_ms), "--bytes-per-second", str(rate)]
    process = subprocess.Popen([sys.executable, "-m", "bench.throttle", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Store(int(process.stdout.readline()))
    finally:
        process.terminate()
        process.communicate()


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="bench.throttle", description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--bytes-per-second", type=float, default=50e6)
    options = parser.parse_args()
    throttle = Throttle(options.root, options.latency_ms / 1000, options.bytes_per_second)
    server = await asyncio.start_server(throttle.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
