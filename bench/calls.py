"""`python -m bench calls`: calls a second and their times, beside interpreters that are started anew.

All are taken in turn in one run. The rate is that of a burst with as many calls under way as `--concurrency` says. Two
projects that always have more under way than there are places show what fairness is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import dsec
from bench import machine, peers
from bench.series import Measure, interleave, timed
from bench.service import PrivateService, private_service
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.wire.api import STATE_DIR_ROOT

_PYTHON = "print(1)"
_IMPORTING = "import json, decimal, statistics, unittest; print(1)"
_NUMPY = "import numpy; print(numpy.arange(10).sum())"
_BUSY = "import time\nend = time.perf_counter() + {seconds}\nwhile time.perf_counter() < end: pass"
_CPP = '#include <cstdio>\nint main() { int a, b; if (scanf("%d %d", &a, &b) == 2) printf("%d", a + b); }'
_CASES = [(f"{number} 1", str(number + 1)) for number in range(10)]
PYTHON, IMPORTING, JUDGE = "call python", "call python, modules preloaded", "call c++, compile and 10 runs"
NUMPY, NUMPY_FRESH = "call python, numpy preloaded", "python3 -c with numpy in a sandbox (exec)"
FRESH, BWRAP = "python3 -c in a sandbox (exec)", "python3 -c under bwrap"
STATELESS = "python3 -c in a sandbox of its own (create, exec, destroy)"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench calls", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--numpy", default="tools", help="environment with numpy; it is left out when it is not there")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--count", type=int, default=3000, help="calls of the burst")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--fair-s", type=float, default=20.0, help="how long two projects compete, each time")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    modules = '["json", "decimal", "statistics", "unittest"]'
    settings = (
        f"[calls]\npreload = {modules}\n"
        f'[calls.pools.numpy]\nenvironment = "{options.numpy}"\ntype = "python"\npreload = ["numpy"]\n'
    )
    with private_service(options.state, settings) as service, service.client.create(options.environment) as sandbox:
        result = measure(service.client, sandbox, options)
        result["two projects, calls alike"] = fairness(service, options, busy_s=(0.002, 0.002), callers=(48, 12))
        result["two projects, one's calls are longer"] = fairness(
            service, options, busy_s=(0.005, 0.05), callers=(16, 16)
        )
    for name, figures in result.items():
        print(f"{name:<62}{json.dumps(figures)}")
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")


def measure(client: dsec.Client, sandbox: dsec.Sandbox, options: argparse.Namespace) -> dict[str, Any]:
    environment = options.environment

    def call(type: str, code: str, environment: str = environment, **more: Any) -> None:
        result = client.call(type, code, environment=environment, **more)
        if not result.ok:
            raise SystemExit(f"bench: a call ended with {result.status}: {result.stderr[-500:]}")

    def stateless() -> None:
        with client.create(environment) as own:
            own.exec(["python3", "-c", _PYTHON], check=True)

    measures: dict[str, Measure] = {
        PYTHON: timed(lambda: call("python", _PYTHON)),
        IMPORTING: timed(lambda: call("python", _IMPORTING)),
        JUDGE: timed(lambda: call("cpp", _CPP, cases=_CASES)),
        FRESH: timed(lambda: sandbox.exec(["python3", "-c", _PYTHON], check=True)),
        STATELESS: timed(stateless),
    }
    store = EnvironmentStore(options.state)
    layers = store.resolve(Environment(environment)).layers
    with peers.mounted_layers(
        [(layer.kind, str(layer.meta), str(layer.blob) if layer.blob else None) for layer in layers]
    ) as rootfs:
        bwrap = peers.bwrap(rootfs, ("python3", "-c", _PYTHON))
        if bwrap is not None:
            measures[BWRAP] = bwrap
        series = interleave(measures, options.rounds)
    found: dict[str, Any] = {name: one.summary() for name, one in series.items()}
    for peer in (FRESH, STATELESS, BWRAP):
        if peer in series:
            found[f"times as fast as {peer}"] = round(series[peer].p50 / series[PYTHON].p50, 2)
    if any(known.name == options.numpy for known in client.environments.list()):
        with client.create(options.numpy) as other:
            pair = {
                NUMPY: timed(lambda: call("python", _NUMPY, options.numpy)),
                NUMPY_FRESH: timed(lambda: other.exec(["python3", "-c", _NUMPY], check=True)),
            }
            found |= {name: one.summary() for name, one in interleave(pair, options.rounds).items()}
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


def fairness(
    service: PrivateService, options: argparse.Namespace, *, busy_s: tuple[float, float], callers: tuple[int, int]
) -> dict[str, Any]:
    """What two projects get, when each has so many callers that call without a pause, for code of so many seconds."""
    tokens = [service.client.tokens.create("bench", project=f"/{name}").token for name in ("one", "other")]
    calls, seconds = asyncio.run(_compete(str(service.socket), options, tokens, busy_s, callers))
    return {
        "callers": callers,
        "code_s": busy_s,
        "calls": calls,
        "place_seconds": [round(one, 2) for one in seconds],
        "apart": round(max(seconds) / min(seconds) - 1, 4),
    }


async def _compete(
    socket: str, options: argparse.Namespace, tokens: list[str], busy_s: tuple[float, float], callers: tuple[int, int]
) -> tuple[list[int], list[float]]:
    calls, seconds = [0, 0], [0.0, 0.0]
    counting = asyncio.Event()
    over = asyncio.Event()

    async def work(index: int, client: dsec.AsyncClient) -> None:
        code = _BUSY.format(seconds=busy_s[index])
        while not over.is_set():
            result = await client.call("python", code, environment=options.environment)
            if counting.is_set() and not over.is_set():
                calls[index] += 1
                seconds[index] += result.took_s

    clients = [dsec.AsyncClient(f"unix://{socket}", token) for token in tokens]
    async with clients[0], clients[1], asyncio.TaskGroup() as group:
        for index, client in enumerate(clients):
            for _ in range(callers[index]):
                group.create_task(work(index, client))
        await asyncio.sleep(2.0)  # places are made, and costs of calls become known
        counting.set()
        await asyncio.sleep(options.fair_s)
        over.set()
    return calls, seconds
