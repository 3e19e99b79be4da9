"""`python -m bench snapshots`: for how long a sandbox stands still for a snapshot of what it has written, how long that
takes in all, and what forks of it cost.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import dsec
from bench import machine
from bench.service import private_service
from dsec.core.limits import MIB
from dsec.wire.api import STATE_DIR_ROOT

_FILE_BYTES = 16 * 1024  # of one of many
_FORKS = (1, 10, 100)
# One large file, then many small ones: what a frozen sandbox waits for is the number of entries, not their size.
_FILL = """
set -e; mkdir -p /var/bench
head -c {bytes} /dev/urandom > /var/bench/large
i=0; while [ $i -lt {files} ]; do
  [ $((i % 100)) -ne 0 ] || mkdir /var/bench/$((i / 100))
  head -c {each} /var/bench/large > /var/bench/$((i / 100))/$i; i=$((i + 1))
done
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench snapshots", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], help="of what is written, in MiB; 1024 too")
    parser.add_argument("--forks", type=int, nargs="+", default=list(_FORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    with private_service(options.state) as service:
        result = {
            "snapshots": [
                measure(service.client, options.environment, size * MIB, many=many, rounds=options.rounds)
                for size in options.sizes
                for many in (False, True)
            ],
            "forks": [fork(service.client, options.environment, count) for count in options.forks],
        }
    show(result)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")


def measure(client: dsec.Client, environment: str, size: int, *, many: bool, rounds: int) -> dict[str, Any]:
    """Of a sandbox that has written `size` bytes, half of them in small files if `many`; nothing runs in it."""
    files = size // 2 // _FILE_BYTES if many else 0
    frozen, taken = [], []
    with client.create(environment) as sandbox:
        script = _FILL.format(bytes=size - files * _FILE_BYTES, files=files, each=_FILE_BYTES)
        sandbox.exec(script, check=True, timeout_s=600)
        for _ in range(rounds):
            began = time.perf_counter()
            snapshot = sandbox.snapshot()
            taken.append(time.perf_counter() - began)
            frozen.append(snapshot.info.frozen_ms)
            snapshot.remove()
    return {"bytes": size, "files": files + 1, "frozen_ms": min(frozen), "frozen_ms_max": max(frozen), "s": min(taken)}


def fork(client: dsec.Client, environment: str, count: int) -> dict[str, Any]:
    """Of a sandbox that has written 10 MiB."""
    with client.create(environment, memory="64MiB") as sandbox:
        sandbox.exec(_FILL.format(bytes=10 * MIB, files=0, each=0), check=True, timeout_s=600)
        began = time.perf_counter()
        forks = sandbox.fork(count)
        took = time.perf_counter() - began
        for made in forks:
            made.destroy()
    return {"count": count, "s": took, "ms_each": took / count * 1000}


def show(result: dict[str, Any]) -> None:
    print(f"{'written':>10} {'files':>8} {'stands still':>14} {'at most':>10} {'snapshot':>10}")
    for row in result["snapshots"]:
        frozen = f"{row['frozen_ms']:>11.1f} ms {row['frozen_ms_max']:>7.1f} ms"
        print(f"{row['bytes'] / MIB:>6.0f} MiB {row['files']:>8} {frozen} {row['s']:>8.2f} s")
    print(f"\n{'forks':>10} {'in all':>10} {'each':>12}")
    for row in result["forks"]:
        print(f"{row['count']:>10} {row['s']:>8.2f} s {row['ms_each']:>9.1f} ms")
