"""`python -m bench calls`: calls a second and their times, beside a fresh interpreter in a sandbox and under bwrap.

All are taken in turn in one run. The rate is that of a burst with as many calls under way as `--concurrency` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import dsec
from bench import machine, peers
from bench.series import Measure, interleave, timed
from bench.service import private_service
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.wire.api import STATE_DIR_ROOT

_PYTHON = "print(1)"
_IMPORTING = "import json, decimal, statistics, unittest; print(1)"
_CPP = '#include <cstdio>\nint main() { int a, b; if (scanf("%d %d", &a, &b) == 2) printf("%d", a + b); }'
_CASES = [(f"{number} 1", str(number + 1)) for number in range(10)]
PYTHON, IMPORTING, JUDGE = "call python", "call python, modules preloaded", "call c++, compile and 10 runs"
FRESH, BWRAP = "python3 -c in a sandbox (exec)", "python3 -c under bwrap"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench calls", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--count", type=int, default=3000, help="calls of the burst")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    settings = '[calls]\npreload = ["json", "decimal", "statistics", "unittest"]\n'
    with private_service(options.state, settings) as service, service.client.create(options.environment) as sandbox:
        result = measure(service.client, sandbox, options)
    for name, figures in result.items():
        print(f"{name:<40}{json.dumps(figures)}")
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")


def measure(client: dsec.Client, sandbox: dsec.Sandbox, options: argparse.Namespace) -> dict[str, Any]:
    environment = options.environment

    def call(type: str, code: str, **more: Any) -> None:
        result = client.call(type, code, environment=environment, **more)
        if not result.ok:
            raise SystemExit(f"bench: a call ended with {result.status}: {result.stderr[-500:]}")

    measures: dict[str, Measure] = {
        PYTHON: timed(lambda: call("python", _PYTHON)),
        IMPORTING: timed(lambda: call("python", _IMPORTING)),
        JUDGE: timed(lambda: call("cpp", _CPP, cases=_CASES)),
        FRESH: timed(lambda: sandbox.exec(["python3", "-c", _PYTHON], check=True)),
    }
    layers = EnvironmentStore(options.state).resolve(Environment(environment)).layers
    with peers.mounted_layers(
        [(layer.kind, str(layer.meta), str(layer.blob) if layer.blob else None) for layer in layers]
    ) as rootfs:
        bwrap = peers.bwrap(rootfs, ("python3", "-c", _PYTHON))
        if bwrap is not None:
            measures[BWRAP] = bwrap
        series = interleave(measures, options.rounds)
    found: dict[str, Any] = {name: one.summary() for name, one in series.items()}
    found["ratio to a fresh interpreter"] = round(series[FRESH].p50 / series[PYTHON].p50, 2)
    found["burst"] = burst(client, environment, options.count, options.concurrency)
    return found


def burst(client: dsec.Client, environment: str, count: int, concurrency: int) -> dict[str, float]:
    request = dsec.make_call("python", _PYTHON, environment=environment)
    client.call_many([request] * concurrency * 4, concurrency=concurrency)
    began = time.perf_counter()
    results = client.call_many([request] * count, concurrency=concurrency)
    took_s = time.perf_counter() - began
    done = [result for result in results if isinstance(result, dsec.CallResult) and result.ok]
    if len(done) < count:
        raise SystemExit(f"bench: {count - len(done)} of {count} calls failed")
    times = sorted(result.queued_s + result.took_s for result in done)
    return {
        "calls": count,
        "per_second": round(count / took_s, 1),
        "p50_ms": round(statistics.median(times) * 1e3, 2),
        "p99_ms": round(times[int(0.99 * count)] * 1e3, 2),
    }
