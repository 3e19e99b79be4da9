"""A service of the bench's own, beside whatever runs on the machine: its directories, its launcher, and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dsec
from dsec.storage.loader import Loader
from dsec.testing.launchers import end_launcher, remove_cgroups

_READY_S = 60.0
_FULL_S = 60.0
_STORE = ("layers", "environments", "builds")


@dataclass(frozen=True, slots=True)
class PrivateService:
    client: dsec.Client
    socket: Path
    state_dir: Path

    @property
    def run_dir(self) -> Path:
        return self.socket.parent

    def remove_all(self) -> None:
        """Every sandbox; returns once they have gone."""
        for sandbox in self.client.list():
            sandbox.destroy()

    def cache_bytes(self) -> int:
        """What chunks of stores take on the disk."""
        cache = self.state_dir / "cache"
        return sum(file.stat().st_blocks * 512 for file in cache.rglob("data"))

    def warm_spares(self) -> int:
        """How many are there now, as the metrics say."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            link.sendall(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            text = b"".join(iter(lambda: link.recv(65_536), b"")).decode()
        lines = [line for line in text.splitlines() if line.startswith("dsec_warm_spares{")]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    def wait_warm(self, count: int) -> None:
        """Until that many spares are there: what a create finds when it does not come in a burst."""
        until = time.monotonic() + _FULL_S
        while self.warm_spares() < count:
            if time.monotonic() > until:
                raise SystemExit(f"bench: there are no {count} warm spares after {_FULL_S:g} s")
            time.sleep(0.005)


@contextlib.contextmanager
def private_service(store: Path, settings: str = "") -> Iterator[PrivateService]:
    """`store` is a state directory of which the environments are used; `settings` is added to the configuration."""
    # Beside the store, so that its files can be linked instead of copied; sockets want a short path.
    run_dir = Path(tempfile.mkdtemp(prefix="dsec-", dir="/run"))
    state_dir = Path(tempfile.mkdtemp(prefix="bench-", dir=store))
    parent = f"dsec-bench-{os.getpid()}-{run_dir.name}"
    try:
        for name in _STORE:
            if (store / name).is_dir():
                shutil.copytree(store / name, state_dir / name, copy_function=os.link)
        config = run_dir / "dsec.toml"
        config.write_text(
            f'run_dir = "{run_dir}"\nstate_dir = "{state_dir}"\n'
            f'[container]\nid_dir = "{run_dir}/ids"\ncgroup_parent = "{parent}"\n{settings}\n'
        )
        yield from _served(run_dir, state_dir, config)
    finally:
        end_launcher(run_dir)
        Loader(run_dir, run_dir, cache_bytes=0).shutdown()
        remove_cgroups(parent)
        shutil.rmtree(state_dir, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


def _served(run_dir: Path, state_dir: Path, config: Path) -> Iterator[PrivateService]:
    log = run_dir / "log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsec.serve", "up", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        path = run_dir / "api.sock"
        until = time.monotonic() + _READY_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"bench: the service did not start: {log.read_text()[-1_000:]}")
            time.sleep(0.05)
        with dsec.Client(f"unix://{path}") as client:
            yield PrivateService(client, path, state_dir)
    finally:
        process.terminate()
        process.wait(_READY_S)
