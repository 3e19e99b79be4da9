"""`python -m bench`: container create and exec against a floor and against peers, taken in turn in one run.

Needs root and the environment given by --environment (default: base) in the state directory; runs services of its own.
Writes figures and pictures into docs/benchmarks.md and docs/benchmarks/, or, with --output, only the figures as JSON.

`python -m bench density --count N`: what each of many idle sandboxes costs, alone.
`python -m bench calls`: calls a second, beside a fresh interpreter in a sandbox and under bwrap; two projects at once.
`python -m bench calls-soak --count N`: calls, and what is left of them.
`python -m bench soak --count N`: creates, then execs, of which the last cost what the first did, alone.
`python -m bench burst`: many sandboxes at once of an environment in a far store, alone.
`python -m bench environments`: making layers, mounting them, sandboxes of 1, 5 and 61, ways of reading, alone.
`python -m bench snapshots`: for how long snapshots stop a sandbox, what they and forks take, alone.
`python -m bench vm`: microvms: booted, cloned, idle, used, alone.
`python -m bench swap`: what the host has back of those that nobody uses, and how fast they are there again, alone.
`python -m bench cluster`: creates a second, and what goes wrong, in a cluster whose nodes are simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dsec
from bench import (
    burst,
    calls,
    callsoak,
    cluster,
    density,
    environments,
    machine,
    peers,
    plots,
    report,
    snapshots,
    soak,
    swapping,
    transfers,
    vm,
)
from bench.cost import Cost
from bench.series import Measure, Series, interleave, timed
from bench.service import PrivateService, private_service
from dsec.binaries import find_binary
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.wire.api import STATE_DIR_ROOT

_DOCS = Path(__file__).resolve().parent.parent / "docs"
COLD = "dsec create + first exec"
WARM = "dsec create + first exec, from the warm pool"
BARE = "dsec create + first exec, nothing made ahead"
EXEC = "dsec exec true"
SPAWN = "posix_spawn + one loopback call"
# Enough that a burst of the bench finds some, and that what is made meanwhile is little.
_BARE = "prepared = 0"
_WARM = "[node.warm]\nspares_max = 8\nlow = 4\nhigh = 8"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # services and sandboxes of ours end, too
    for name, run in (
        ("calls", calls.main),
        ("calls-soak", callsoak.main),
        ("density", density.main),
        ("soak", soak.main),
        ("burst", burst.main),
        ("environments", environments.main),
        ("snapshots", snapshots.main),
        ("vm", vm.main),
        ("swap", swapping.main),
        ("cluster", cluster.main),
    ):
        if sys.argv[1:2] == [name]:
            run(sys.argv[2:])
            return
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sustained", type=int, default=1000, help="sandboxes of the sustained create and destroy run")
    parser.add_argument("--density", type=int, default=200, help="idle sandboxes of which memory and time are measured")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here, and no page")
    parser.add_argument("--page", type=Path, default=_DOCS / "benchmarks.md", help="put figures and pictures there")
    options = parser.parse_args()
    if not options.output:
        plots.check()
    result, create = measure(options)
    show(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        return
    pictures = options.page.parent / options.page.stem
    cost = {name: row["cpu_ms_each"] for name, row in result["sustained"].items()}
    plots.draw(pictures, create={name: one.milliseconds for name, one in create.items()}, cost=cost)
    report.write(options.page, pictures, result)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Series]]:
    """On services of the bench's own: one as everybody has it, one that makes nothing ahead, one that keeps spares."""
    environment, described = options.environment, machine.describe()
    with contextlib.ExitStack() as stack:
        layers = EnvironmentStore(options.state).resolve(Environment(environment)).layers
        rootfs = stack.enter_context(
            peers.mounted_layers(
                [(layer.kind, str(layer.meta), str(layer.blob) if layer.blob else None) for layer in layers]
            )
        )
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-")))
        cold = stack.enter_context(private_service(options.state))
        bare = stack.enter_context(private_service(options.state, _BARE))
        warm = stack.enter_context(private_service(options.state, _WARM))
        phases = Phases()
        create = measure_create(cold, bare, warm, environment, rootfs, scratch, options.rounds, phases)
        execs = measure_exec(cold.client, environment, options.rounds * 5)
        sustained = {
            "cold": measure_sustained(cold.client, environment, options.sustained),
            "one by one, from the warm pool": measure_warm(warm, environment, options.rounds * 2),
        }
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": described,
            "create": summarise(create, floor="floor", subjects=(COLD, BARE, WARM)),
            "phases": {name: one.summary() for name, one in phases.series.items()},
            "exec": summarise(execs, floor=SPAWN, subjects=(EXEC,)),
            "sustained": sustained,
            "density": density.measure(cold.client, environment, options.density),
            "transfers": transfers.measure(cold.client, environment),
            "import_ms": measure_import(),
        }
    return result, create


class Phases:
    """What a create, its first exec and the removal consist of, as the caller sees it."""

    def __init__(self) -> None:
        names = ("create", "create, within the node", "first exec", "destroy")
        self.series = {name: Series(name) for name in names}

    def add(self, **milliseconds: float) -> None:
        for series, value in zip(self.series.values(), milliseconds.values(), strict=True):
            series.milliseconds.append(value)


def measure_create(
    cold: PrivateService,
    bare: PrivateService,
    warm: PrivateService,
    environment: str,
    rootfs: Path,
    scratch: Path,
    rounds: int,
    phases: Phases,
) -> dict[str, Series]:
    """From the call to the answer of the first command, as the caller sees it; removal is not counted."""

    def from_pool() -> list[float]:
        warm.wait_warm(1)
        return [create_once(warm.client, environment, None)]

    for _ in range(2):  # a shape gets spares once it has been asked for twice
        create_once(warm.client, environment, None)
    measures: dict[str, Measure | None] = {
        "floor": peers.floor(find_binary("dsec-floor"), rootfs),
        COLD: lambda: [create_once(cold.client, environment, phases)],
        BARE: lambda: [create_once(bare.client, environment, None)],
        WARM: from_pool,
        "bwrap true": peers.bwrap(rootfs),
        "runc run true": peers.runc(rootfs, scratch),
    }
    return interleave({name: measure for name, measure in measures.items() if measure is not None}, rounds)


def create_once(client: dsec.Client, environment: str, phases: Phases | None) -> float:
    started = time.perf_counter()
    sandbox = client.create(environment)
    created = time.perf_counter()
    sandbox.exec(["true"], check=True)
    answered = time.perf_counter()
    sandbox.destroy()
    ended = time.perf_counter()
    if phases is not None:
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
                SPAWN: timed(spawn_and_call),
                EXEC: timed(lambda: sandbox.exec(["true"], check=True)),
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


def measure_warm(service: PrivateService, environment: str, count: int) -> dict[str, object]:
    """Create and destroy with a spare at hand each time; what making the next spare takes is in it."""
    client = service.client
    service.wait_warm(1)
    cost = Cost(client)
    started = time.perf_counter()
    for _ in range(count):
        client.create(environment).destroy()
        service.wait_warm(1)
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


def summarise(series: dict[str, Series], *, floor: str, subjects: tuple[str, ...]) -> dict[str, Any]:
    """Also how the subjects stand to the floor, and the others to the subjects: by their middle and by their least."""
    rows: dict[str, Any] = {name: one.summary() for name, one in series.items()}
    ratios = {f"{subject} / {floor}": _ratio(series[subject], series[floor]) for subject in subjects}
    for name, one in series.items():
        if name != floor and name not in subjects:
            ratios |= {f"{name} / {subject}": _ratio(one, series[subject]) for subject in subjects}
    rows["ratios"] = ratios
    return rows


def _ratio(above: Series, below: Series) -> dict[str, float]:
    return {
        "p50": round(above.p50 / below.p50, 2),
        "min": round(min(above.milliseconds) / min(below.milliseconds), 2),
    }


def show(result: dict[str, Any]) -> None:
    for part in ("create", "phases", "exec"):
        rows = result[part]
        for name, row in rows.items():
            text = "  ".join(f"{key} {value}" for key, value in row.items())
            print(f"{part:8} {name:34} {text}", file=sys.stderr)
    for part in ("sustained", "transfers", "import_ms"):
        print(f"{part:8} {result[part]}", file=sys.stderr)


if __name__ == "__main__":
    main()
