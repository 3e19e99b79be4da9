"""`python -m bench`: container create and exec against a floor and against peers, taken in turn in one run.

Needs root, a running (or startable) `dsec up`, and the environment given by --environment (default: base).
Writes a table to stderr and the figures as JSON to stdout, or to --output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dsec
from bench import machine, peers, transfers
from bench.cost import Cost
from bench.series import Measure, Series, interleave, timed
from dsec.binaries import find_binary
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.wire.api import STATE_DIR_ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory of the service")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sustained", type=int, default=200, help="sandboxes of the sustained create and destroy run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(dsec.Client())
        layers = EnvironmentStore(options.state).resolve(Environment(options.environment)).layers
        rootfs = stack.enter_context(
            peers.mounted_layers(
                [(layer.kind, str(layer.meta), str(layer.blob) if layer.blob else None) for layer in layers]
            )
        )
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-")))
        phases = Phases()
        create = measure_create(client, options.environment, rootfs, scratch, options.rounds, phases)
        execs = measure_exec(client, options.environment, options.rounds * 5)
        result = {
            "machine": machine.describe(),
            "create": summarise(create, floor="floor", subject="dsec create + first exec"),
            "phases": {name: one.summary() for name, one in phases.series.items()},
            "exec": summarise(execs, floor="posix_spawn + one loopback call", subject="dsec exec true"),
            "sustained": measure_sustained(client, options.environment, options.sustained),
            "transfers": transfers.measure(client, options.environment),
            "import_ms": measure_import(),
        }
    show(result)
    text = json.dumps(result, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)


class Phases:
    """What a create, its first exec and the removal consist of, as the caller sees it."""

    def __init__(self) -> None:
        names = ("create", "create, within the node", "first exec", "destroy")
        self.series = {name: Series(name) for name in names}

    def add(self, **milliseconds: float) -> None:
        for series, value in zip(self.series.values(), milliseconds.values(), strict=True):
            series.milliseconds.append(value)


def measure_create(
    client: dsec.Client, environment: str, rootfs: Path, scratch: Path, rounds: int, phases: Phases
) -> dict[str, Series]:
    """From the call to the answer of the first command, as the caller sees it; removal is not counted."""
    measures: dict[str, Measure | None] = {
        "floor": peers.floor(find_binary("dsec-floor"), rootfs),
        "dsec create + first exec": lambda: [create_once(client, environment, phases)],
        "bwrap true": peers.bwrap(rootfs),
        "runc run true": peers.runc(rootfs, scratch),
    }
    return interleave({name: measure for name, measure in measures.items() if measure is not None}, rounds)


def create_once(client: dsec.Client, environment: str, phases: Phases) -> float:
    started = time.perf_counter()
    sandbox = client.create(environment)
    created = time.perf_counter()
    sandbox.exec(["true"], check=True)
    answered = time.perf_counter()
    sandbox.destroy()
    ended = time.perf_counter()
    phases.add(
        create=(created - started) * 1000,
        node=sandbox.info.create_ms or 0.0,
        exec=(answered - created) * 1000,
        destroy=(ended - answered) * 1000,
    )
    return (answered - started) * 1000


def measure_exec(client: dsec.Client, environment: str, rounds: int) -> dict[str, Series]:
    with client.create(environment) as sandbox:

        def spawn_and_call() -> None:
            subprocess.run(["/bin/true"], check=True)
            client.health()

        return interleave(
            {
                "posix_spawn + one loopback call": timed(spawn_and_call),
                "dsec exec true": timed(lambda: sandbox.exec(["true"], check=True)),
            },
            rounds,
            warmup=10,
        )


def measure_sustained(client: dsec.Client, environment: str, count: int) -> dict[str, object]:
    """Create and destroy, eight at a time."""
    from concurrent.futures import ThreadPoolExecutor

    def one(_: int) -> None:
        client.create(environment).destroy()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(16)))  # connections and caches
        cost = Cost(client)
        started = time.perf_counter()
        list(pool.map(one, range(count)))
        elapsed = time.perf_counter() - started
    return {
        "sandboxes": count,
        "seconds": round(elapsed, 2),
        "per_second": round(count / elapsed, 1),
        "cpu_ms_each": cost.per(count),
    }


def measure_import() -> float:
    program = "import time; t = time.perf_counter(); import dsec; print((time.perf_counter() - t) * 1000)"
    runs = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(7)
    ]
    return round(sorted(runs)[len(runs) // 2], 1)


def summarise(series: dict[str, Series], *, floor: str, subject: str) -> dict[str, object]:
    rows: dict[str, object] = {name: one.summary() for name, one in series.items()}
    base, own = series[floor], series[subject]
    rows["ratios"] = {
        f"{subject} / {floor}": round(own.p50 / base.p50, 2),
        **{
            f"{name} / {subject}": round(one.p50 / own.p50, 2) for name, one in series.items() if one not in (base, own)
        },
    }
    return rows


def show(result: dict[str, object]) -> None:
    for part in ("create", "phases", "exec"):
        rows = result[part]
        assert isinstance(rows, dict)
        for name, row in rows.items():
            text = "  ".join(f"{key} {value}" for key, value in row.items())
            print(f"{part:8} {name:34} {text}", file=sys.stderr)
    for part in ("sustained", "transfers", "import_ms"):
        print(f"{part:8} {result[part]}", file=sys.stderr)


if __name__ == "__main__":
    main()
