"""One large file into a sandbox and out of it again."""

from __future__ import annotations

import os
import time

import dsec

_BYTES = 64 << 20


def measure(client: dsec.Client, environment: str, rounds: int = 3) -> dict[str, float]:
    """MiB a second, the best of some rounds; the content cannot be compressed, and is compared."""
    content = os.urandom(_BYTES)
    best = {"upload": 0.0, "download": 0.0}
    with client.create(environment, memory="1GiB") as sandbox:
        for _ in range(rounds):
            started = time.perf_counter()
            sandbox.files.write("/tmp/bench", content)
            written = time.perf_counter()
            read = sandbox.files.read_bytes("/tmp/bench")
            ended = time.perf_counter()
            if read != content:
                raise RuntimeError("what came back is not what was sent")
            best["upload"] = max(best["upload"], _BYTES / (written - started))
            best["download"] = max(best["download"], _BYTES / (ended - written))
    return {f"{name}_mib_s": round(value / 2**20, 1) for name, value in best.items()}
