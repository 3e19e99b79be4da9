"""One large file into a sandbox and out of it again, against the same bytes through a socket pair into a file."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import dsec
from bench.cost import Cost

_BYTES = 64 << 20
_PIECE_BYTES = 256 << 10


def measure(client: dsec.Client, environment: str, rounds: int = 5) -> dict[str, object]:
    """MiB a second, the best of some rounds; the content cannot be compressed, and is compared."""
    content = os.urandom(_BYTES)
    best = {"floor": 0.0, "upload": 0.0, "download": 0.0}
    cpu: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="dsec-bench-") as scratch,
        client.create(environment, memory="1GiB") as sandbox,
    ):
        for _ in range(rounds):
            started = time.perf_counter()
            _socket_to_file(content, Path(scratch) / "floor")
            floored = time.perf_counter()
            cost = Cost(client)
            sandbox.files.write("/tmp/bench", content)
            written = time.perf_counter()
            cpu["upload"] = cost.per(_BYTES >> 20)
            cost = Cost(client)
            middle = time.perf_counter()
            read = sandbox.files.read_bytes("/tmp/bench")
            ended = time.perf_counter()
            cpu["download"] = cost.per(_BYTES >> 20)
            if read != content:
                raise RuntimeError("what came back is not what was sent")
            for name, took_s in (
                ("floor", floored - started),
                ("upload", written - floored),
                ("download", ended - middle),
            ):
                best[name] = max(best[name], _BYTES / took_s)
    return {
        **{f"{name}_mib_s": round(value / 2**20, 1) for name, value in best.items()},
        **{f"{name} / floor": round(best[name] / best["floor"], 2) for name in ("upload", "download")},
        "cpu_ms_per_mib": cpu,
    }


def _socket_to_file(content: bytes, path: Path) -> None:
    """`cat > file` at the other end of a socket pair: what moving the bytes costs without any service."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        buffer = bytearray(_PIECE_BYTES)
        with path.open("wb", buffering=0) as file:
            while count := theirs.recv_into(buffer):
                file.write(memoryview(buffer)[:count])
        os._exit(0)
    theirs.close()
    ours.sendall(content)
    ours.close()
    os.waitpid(pid, 0)
