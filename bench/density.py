"""`python -m bench density`: many idle sandboxes at once; what each costs, and whether each answers.

What the kernel uses is the difference of the whole machine before and after, so it must be otherwise quiet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dsec
from bench import machine
from bench.accounting import (
    TABLES,
    Fleet,
    descriptors,
    file_systems,
    memory_of,
    mounts,
    table_kib,
    table_kib_of,
    time_of,
    turns,
)
from bench.service import private_service
from dsec.wire.api import STATE_DIR_ROOT

FEW = 10  # sandboxes beside which the first creates are measured
PROBES = 100  # creates of which the cost is taken, beside few and beside all
IDLE_S = 20.0
# Idle beside 3,200, on a machine that never had more: the kernel's tables do not shrink before a reboot.
KIB_EACH_MAX = 650.0
_AT_ONCE = 8
_CGROUPS = Path("/sys/fs/cgroup")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench density", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    with private_service(options.state) as service:
        result = measure(service.client, options.environment, max(options.count, FEW + 1))
    show(result)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")


def find_fleet(client: dsec.Client) -> Fleet:
    """Of the service that the client talks to."""
    health = client.health()
    run_dir = Path(client.url.removeprefix("unix://")).parent
    return fleet_at(health.node, service=health.pid, launcher=int((run_dir / "launch.pid").read_text()))


def fleet_at(node: str, *, service: int, launcher: int) -> Fleet:
    """Raises LookupError when the node has no cgroup2 directory yet: it makes one for its first sandbox."""
    found = [*_CGROUPS.glob(f"*/{node}"), *_CGROUPS.glob(f"*/*/{node}")]
    trees = [directory for directory in found if (directory / "cgroup.events").exists()]
    if not trees:
        raise LookupError(f"no cgroup2 directory of node {node}")
    return Fleet(service, launcher, trees[0])


def measure(
    client: dsec.Client,
    environment: str,
    count: int,
    *,
    idle_s: float = IDLE_S,
    probes: int = PROBES,
    few: int = FEW,
) -> dict[str, Any]:
    """Makes `count` sandboxes, looks at them, uses each, removes them."""
    with fleet_of(client, environment, few) as first:
        fleet = find_fleet(client)
        probe_creates(client, fleet, environment, probes)  # caches
        at_few = probe_creates(client, fleet, environment, probes)
        table = table_kib()
        memory = memory_of(fleet)
        held = _descriptors(fleet)
        added = count - few
        started = time.perf_counter()
        with fleet_of(client, environment, added) as rest:
            took = time.perf_counter() - started
            time.sleep(2.0)  # what the kernel frees late
            grown = memory_of(fleet).per(memory, added)
            tables = tables_of(fleet, table)
            fresh = round(grown["sum"] - grown[TABLES] + tables["needed"], 1)
            at_all = probe_creates(client, fleet, environment, probes)
            idle = idle_cost(fleet, idle_s)
            descriptors_each = {name: round((now - held[name]) / added, 2) for name, now in _descriptors(fleet).items()}
            mounts_each = mounts(fleet.agents()[0])
            started = time.perf_counter()
            answered = sum(answers(client, [*first, *rest]))
            answering = time.perf_counter() - started
            time.sleep(2.0)
            used = memory_of(fleet).per(memory, added)
            fresh_used = round(used["sum"] - used[TABLES] + tables_of(fleet, table)["needed"], 1)
            listing = list_cost(client)
    return {
        "sandboxes": count,
        "answered": answered,
        "created_per_second": round(added / took, 1),
        "answered_per_second": round(count / answering, 1),
        "listed_ms": listing,
        "memory_kib_each": grown,
        "memory_kib_each_after_a_command": used,
        # The same on a machine that has just been started: with tables for what there is, not for what there once was.
        "memory_kib_each_fresh": {"idle": fresh, "after_a_command": fresh_used},
        "tables_kib": tables,
        "create_cpu_ms": {"beside_few": at_few, "beside_all": at_all},
        "create_cpu_ratio": round(at_all["all"] / at_few["all"], 2),
        "idle": idle,
        "descriptors_each": descriptors_each,
        "mounts_each": mounts_each,
    }


def tables_of(fleet: Fleet, before: float | None) -> dict[str, Any]:
    """Of a memory cgroup: what its table of file systems took before there were sandboxes, takes now, would have to."""
    found = file_systems(fleet.agents())
    return {"before": before, "now": table_kib(), "file_systems": found, "needed": table_kib_of(found)}


def _descriptors(fleet: Fleet) -> dict[str, int]:
    return {"service": descriptors(fleet.service), "launcher": descriptors(fleet.launcher)}


def list_cost(client: dsec.Client) -> float:
    """All of them, page by page."""
    started = time.perf_counter()
    client.list()
    return round((time.perf_counter() - started) * 1000, 1)


@contextmanager
def fleet_of(client: dsec.Client, environment: str, count: int) -> Iterator[list[dsec.Sandbox]]:
    made: list[dsec.Sandbox] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            # Kept by who makes them: when one fails, the others are still to be removed.
            for _ in pool.map(lambda _: made.append(client.create(environment)), range(count)):
                pass
            yield made
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            with ThreadPoolExecutor(_AT_ONCE) as removing:
                list(removing.map(lambda sandbox: sandbox.destroy(), made))


def probe_creates(client: dsec.Client, fleet: Fleet, environment: str, count: int) -> dict[str, float]:
    """Milliseconds of processor time of one create, by who spent them. Removing is not in it."""
    before = time_of(fleet)
    made = [client.create(environment) for _ in range(count)]
    spent = time_of(fleet).since(before)
    for sandbox in made:
        sandbox.destroy()
    return {name: round(seconds * 1000 / count, 3) for name, seconds in spent.items()}


def idle_cost(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Of the whole fleet while nobody asks for anything, in thousandths of a processor."""
    everybody = [fleet.service, fleet.launcher, *fleet.agents()]
    turned = turns(everybody)
    before = time_of(fleet)
    started = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - started
    spent = time_of(fleet).since(before)
    return {
        **{f"{name}_milli_cpu": round(value / elapsed * 1000, 3) for name, value in spent.items()},
        "turns_per_second": round((turns(everybody) - turned) / elapsed, 1),
    }


def answers(client: dsec.Client, sandboxes: list[dsec.Sandbox]) -> list[bool]:
    def one(sandbox: dsec.Sandbox) -> bool:
        return sandbox.exec(["echo", sandbox.id]).stdout.strip() == sandbox.id

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, sandboxes))


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for key, figure in rows:
            print(f"density  {name:22} {key:30} {figure}", file=sys.stderr)
