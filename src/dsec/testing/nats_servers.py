"""Real NATS servers on loopback for tests: one or three, durable, with TLS and credentials, ended by their pid."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.cluster.certificates import client_context
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.credentials import Credentials
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.setup import prepare
from dsec.core.errors import DsecError
from dsec.core.ids import NodeId
from dsec.serve.authority import AuthorityDirectory
from dsec.testing.ports import free_ports

UNIT: Final = "test"
_START_S: Final = 60.0
_LOG_BYTES: Final = 256 << 20


def nats_server() -> Path | None:
    """The program, beside the interpreter or on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    return Path(found) if found else None


@dataclass
class NatsServers:
    """Made by `nats_servers`. Every server keeps its directory, so that it comes back with what it had."""

    directory: Path
    count: int
    layout: Layout
    host: str = "localhost"  # where they are reached
    wrap: tuple[str, ...] = ()  # what their commands are preceded by
    keys: AuthorityDirectory = field(init=False)
    ports: list[int] = field(default_factory=list)
    _routes: list[int] = field(default_factory=list)
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _engines: list[Engine] = field(default_factory=list)

    @classmethod
    def started(
        cls, directory: Path, *, count: int = 1, host: str = "localhost", wrap: tuple[str, ...] = ()
    ) -> NatsServers:
        """Not `ready` yet; the caller closes them."""
        directory.mkdir(parents=True, exist_ok=True)
        servers = cls(directory, count, Layout(UNIT), host, wrap)
        servers.prepare_files()
        try:
            for number in range(count):
                servers.start(number)
        except BaseException:
            servers.end()
            raise
        return servers

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"tls://{self.host}:{port}" for port in self.ports)

    def tls(self) -> ssl.SSLContext:
        return client_context(self.directory / "nats" / "ca.pem")

    def control(self, who: str = "api-1") -> Credentials:
        return self.keys.credentials(who, self.layout.control_rights())

    def node(self, node: NodeId) -> Credentials:
        return self.keys.credentials(node, self.layout.node_rights(node))

    async def connect(self, who: str = "api-1", credentials: Credentials | None = None) -> Engine:
        settings = EngineSettings(self.urls, self.layout, who, credentials or self.control(who), self.tls())
        engine = await Engine.connect(settings)
        self._engines.append(engine)
        return engine

    # -- processes ---------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        program = nats_server()
        assert program is not None
        with (self.directory / f"server-{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [*self.wrap, program, "-c", self.directory / f"server-{number}.conf"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pid(self, number: int) -> int:
        return self._processes[number].pid

    def kill(self, number: int, sign: int = signal.SIGKILL) -> None:
        """Returns when it has ended."""
        process = self._processes.pop(number)
        process.send_signal(sign)
        process.wait(60)

    def signal(self, number: int, sign: int) -> None:
        self._processes[number].send_signal(sign)

    def pause(self, number: int) -> None:
        """It holds its connections and says nothing, as behind a cut network. Returns when it stands still."""
        self._processes[number].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + _START_S
        while _runs(self.pid(number)):
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)

    def resume(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)

    async def ready(self) -> None:
        """Returns when buckets and streams are there and written to."""
        deadline = asyncio.get_running_loop().time() + _START_S
        while True:
            try:
                engine = await Engine.connect(
                    EngineSettings(self.urls, self.layout, "setup", self.control("setup"), self.tls())
                )
                try:
                    await prepare(engine, replicas=self.count, log_bytes_max=_LOG_BYTES)
                    return
                finally:
                    await engine.close()
            except DsecError as error:
                ended = any(process.poll() is not None for process in self._processes.values())
                if ended or asyncio.get_running_loop().time() > deadline:
                    raise AssertionError(f"the NATS servers are not ready: {error}\n{self.logs()}") from error
                await asyncio.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2_000:] for path in sorted(self.directory.glob("server-*.log")))

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        self.end()

    def end(self) -> None:
        """All servers; what is connected by `connect` stays."""
        for number in list(self._processes):
            self.resume(number)
            self.kill(number)

    # -- files -------------------------------------------------------------------------------------

    def prepare_files(self) -> None:
        self.keys = AuthorityDirectory.create(self.directory / "authority", UNIT)
        self.keys.issue_nats(self.directory / "nats", [self.host, "127.0.0.1"])
        found = free_ports(2 * self.count)
        self.ports, self._routes = found[: self.count], found[self.count :]
        for number in range(self.count):
            (self.directory / f"server-{number}.conf").write_text(self._configuration(number))

    def _configuration(self, number: int) -> str:
        here = self.directory
        tls = f'cert_file: "{here}/nats/cert.pem", key_file: "{here}/nats/cert.key", ca_file: "{here}/nats/ca.pem"'
        lines = [
            f"server_name: n{number}",
            f"listen: {'127.0.0.1' if self.host == 'localhost' else self.host}:{self.ports[number]}",
            f"tls {{ {tls} }}",
            f'jetstream {{ store_dir: "{here}/store-{number}", sync_interval: always, max_mem: 64MB, max_file: 4GB }}',
        ]
        if self.count > 1:
            routes = ", ".join(f"tls://127.0.0.1:{port}" for port in self._routes)
            listen = f"listen: 127.0.0.1:{self._routes[number]}"
            lines.append(f"cluster {{ name: test, {listen}, routes: [{routes}], tls {{ {tls} }} }}")
        return "\n".join((*lines, "include nats/nats-trust.conf")) + "\n"


def _runs(pid: int) -> bool:
    """Any of its threads: they stop one after the other."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            if stat.read_text().rpartition(")")[2].split()[0] != "T":
                return True
    return False


@contextlib.asynccontextmanager
async def nats_servers(directory: Path, *, count: int = 1) -> AsyncIterator[NatsServers]:
    """One server, or three that replicate; ready. What connects by `connect` is closed with them."""
    servers = NatsServers.started(directory, count=count)
    try:
        await servers.ready()
        yield servers
    finally:
        await servers.close()
