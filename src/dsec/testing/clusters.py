"""A cluster of real processes on loopback for tests: replicas, nodes and a watcher, killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.testing.nats_servers import NatsServers
from dsec.testing.networks import Networks

_START_S: Final = 60.0


@dataclass
class ClusterProcesses:
    """Names are the caller's. A process that is started again has its directories, and its identity, of before."""

    directory: Path  # with a short path: sockets lie below it
    servers: NatsServers
    substrate: str = "fake"
    more: tuple[str, ...] = ()  # options of nodes
    networks: Networks | None = None  # in which each has a machine of its name; none: all are on loopback
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)  # name → id

    def socket(self, name: str) -> Path:
        return self.directory / name / "r" / "api.sock"

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def start_api(self, name: str, *more: str) -> None:
        """Returns when it answers."""
        identity = self.directory / name / "id"
        if not identity.exists():
            self.servers.keys.issue_api(identity, name)
        self._start(name, "api", *more)
        self._wait(name, lambda: _listens(self.socket(name)))

    def start_watcher(self, name: str) -> None:
        identity = self.directory / name / "id"
        if not identity.exists():
            self.servers.keys.issue_api(identity, name)
        self._start(name, "watcher")

    def start_node(self, name: str, *more: str) -> None:
        """Returns when it is a member."""
        identity = self.directory / name / "id"
        if not identity.exists():
            self.nodes[name] = self.servers.keys.issue_node(identity)
        said = self._said(name)
        host = "127.0.0.1" if self.networks is None else self.networks.address(name)
        options = ("--listen", f"{host}:0", "--substrate", self.substrate, *self.more, *more)
        self._start(name, "node", *options)
        self._wait(name, lambda: self._said(name) > said)

    def kill(self, name: str, sign: int = signal.SIGKILL) -> None:
        """Returns when it has ended."""
        process = self.processes.pop(name)
        process.send_signal(sign)
        process.wait(60)

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        self.processes.clear()

    def _start(self, name: str, verb: str, *more: str) -> None:
        place = self.directory / name
        config = self.directory / "dsec.toml"
        config.write_text('[cluster]\nlog_bytes_max = "256MiB"\n')
        joins = [part for url in self.servers.urls for part in ("--join", url)]
        wrap = () if self.networks is None else self.networks.wrap(name)
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *wrap, sys.executable, "-m", "dsec.serve", verb, *joins, "--config", str(config),
                    "--identity", str(place / "id"), "--run-dir", str(place / "r"), "--state-dir", str(place / "s"),
                    *more,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ},
            )  # fmt: skip

    def _said(self, name: str) -> int:
        """How often it has said that it is ready."""
        with contextlib.suppress(FileNotFoundError):
            return self.log(name).count('"event":"ready"')
        return 0

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not ready():
            process = self.processes[name]
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name} does not start:\n{self.log(name)[-3_000:]}")
            time.sleep(0.02)


@contextlib.contextmanager
def cluster_processes(
    directory: Path,
    servers: NatsServers,
    *,
    substrate: str = "fake",
    more: tuple[str, ...] = (),
    networks: Networks | None = None,
) -> Iterator[ClusterProcesses]:
    found = ClusterProcesses(directory, servers, substrate, more, networks)
    try:
        yield found
    finally:
        found.end()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False
