"""The real service with the fake substrate in a process of its own, and ways to disturb the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsec.testing.ports import free_ports


@dataclass(frozen=True)
class RunningService:
    socket: Path
    tcp_port: int
    environment: dict[str, str]  # for processes that are to find it

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"


@contextlib.contextmanager
def running_service(directory: Path) -> Iterator[RunningService]:
    run, state, (port,) = directory / "r", directory / "s", free_ports(1)
    arguments = ["--run-dir", str(run), "--state-dir", str(state), "--substrate", "fake"]
    log = open(directory / "log", "wb")  # noqa: SIM115  closed below
    process = subprocess.Popen(
        [sys.executable, "-m", "dsec.serve", "up", *arguments, "--listen", f"127.0.0.1:{port}"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        _wait_for(run / "api.sock", process, directory / "log")
        environment = {**os.environ, "DSEC_URL": f"unix://{run / 'api.sock'}"}
        environment.pop("DSEC_TOKEN", None)
        yield RunningService(run / "api.sock", port, environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.close()


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the service does not start: {log.read_text(errors='replace')[-2_000:]}")
        time.sleep(0.02)


@dataclass
class CuttingProxy:
    """Between client and service. Cuts connections as it is told, and counts what it cut.

    `answer_bytes`: after so many bytes of answers on one connection. `request_bytes`: likewise of requests.
    `before_answer`: requests that begin with one of these lines reach the service, and their answer nobody. Each
    entry is used up by one cut; `answer_bytes` and `request_bytes` hold for every connection until `cuts_left` is 0.
    `stall_…`: after so many bytes of one connection nothing more passes that way, until `go_on`.
    """

    path: Path
    answer_bytes: int | None = None
    request_bytes: int | None = None
    before_answer: list[bytes] = field(default_factory=list)
    stall_answer_bytes: int | None = None
    stall_request_bytes: int | None = None
    cuts_left: int = 1_000_000
    cuts: int = 0
    connections: int = 0
    answer_bytes_seen: int = 0
    request_bytes_seen: int = 0
    stalled: bool = False
    _going: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def serve(self, target: Path) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                with contextlib.suppress(OSError, asyncio.CancelledError):  # either is how a connection ends here
                    await self._connection(reader, writer, target)
            finally:
                self._tasks.discard(task)

        return await asyncio.start_unix_server(accept, self.path, limit=1 << 16)

    async def close(self, server: asyncio.Server) -> None:
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Path) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(target)
        pending = asyncio.Event()  # a request whose answer is to be lost has passed

        async def up() -> None:
            seen = 0
            while data := await reader.read(16_384):
                for line in self.before_answer:
                    if data.startswith(line):
                        self.before_answer.remove(line)
                        pending.set()
                        break
                if self._over(seen := seen + len(data), self.request_bytes):
                    return
                self.request_bytes_seen += len(data)
                await self._stall(seen, self.stall_request_bytes)
                there_writer.write(data)
                await there_writer.drain()

        async def down() -> None:
            seen = 0
            while data := await there_reader.read(16_384):
                if pending.is_set():
                    self.cuts += 1
                    return
                over = self._over(seen + len(data), self.answer_bytes)
                if over and self.answer_bytes is not None:
                    data = data[: max(self.answer_bytes - seen, 0)]
                seen += len(data)
                self.answer_bytes_seen += len(data)
                await self._stall(seen, self.stall_answer_bytes)
                writer.write(data)
                await writer.drain()
                if over:
                    return

        both = {asyncio.create_task(up()), asyncio.create_task(down())}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            for side in (writer, there_writer):
                side.transport.abort()
            await asyncio.gather(*both, return_exceptions=True)

    async def _stall(self, seen: int, limit: int | None) -> None:
        if limit is not None and seen > limit:
            self.stalled = True
            await self._going.wait()

    def go_on(self) -> None:
        self._going.set()

    def _over(self, seen: int, limit: int | None) -> bool:
        if limit is None or seen <= limit or self.cuts_left <= 0:
            return False
        self.cuts_left -= 1
        self.cuts += 1
        return True


@contextlib.asynccontextmanager
async def cutting_proxy(directory: Path, target: Path) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(directory / "cut.sock")
    server = await proxy.serve(target)
    try:
        yield proxy
    finally:
        await proxy.close(server)
