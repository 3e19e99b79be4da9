"""The same thing thousands of times: what the last ones cost beside the first, and what is left of them.

As ruling "flat" has it: processor seconds of the last tenth over those of the first, and the kernel's slab. Memory of
processes is compared from the end of the first tenth on, when caches are full.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import dsec
from bench.accounting import Fleet, at_rest, descriptors, resident_bytes, slab_bytes, started_at, time_of
from bench.density import find_fleet
from bench.service import private_service
from dsec.wire.api import STATE_DIR_ROOT

_AT_ONCE = 8


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench soak", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    options = parser.parse_args(arguments)
    with private_service(options.state) as service:
        for what in (creates, execs):
            show(what(service.client.url, options.environment, options.count))


def creates(url: str, environment: str, count: int) -> dict[str, Any]:
    with dsec.Client(url) as client, client.create(environment):
        fleet = find_fleet(client)

        def one(_: int) -> None:
            client.create(environment).destroy()

        found, rate = _in_tenths(fleet, one, count)
        first, last = found[0], found[-1]
        return {
            "creates": count,
            "per_second": rate,
            "cpu_ms_first": first["cpu_ms"],
            "cpu_ms_last": last["cpu_ms"],
            "cpu_ratio": round(last["cpu_ms"] / first["cpu_ms"], 3),
            "slab_change": _change(first["slab"], last["slab"]),
            "service_change": _change(first["service"], last["service"]),
            "launcher_change": _change(first["launcher"], last["launcher"]),
            "descriptors_change": {
                name: last[f"{name} descriptors"] - first[f"{name} descriptors"] for name in ("service", "launcher")
            },
        }


def execs(url: str, environment: str, count: int) -> dict[str, Any]:
    with dsec.Client(url) as client, client.create(environment) as sandbox:
        fleet = find_fleet(client)
        # Others may have sandboxes here, too: ours is the newest.
        agent = max(fleet.agents(), key=started_at)

        def one(_: int) -> None:
            sandbox.exec(["true"], check=True)

        found, rate = _in_tenths(fleet, one, count, agent=agent)
        first, last = found[0], found[-1]
        return {
            "execs": count,
            "per_second": rate,
            "cpu_ratio": round(last["cpu_ms"] / first["cpu_ms"], 3),
            "agent_change": _change(first["agent"], last["agent"]),
            "service_change": _change(first["service"], last["service"]),
            "descriptors_change": {
                name: last[f"{name} descriptors"] - first[f"{name} descriptors"] for name in ("service", "agent")
            },
        }


def _in_tenths(fleet: Fleet, one: Any, count: int, *, agent: int | None = None) -> tuple[list[dict[str, Any]], float]:
    """What there is after each tenth, and what each of it took; and how many were done in a second."""
    watched = {"service": fleet.service, "launcher": fleet.launcher, **({"agent": agent} if agent else {})}
    found = []
    took = 0.0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(one, range(50)))  # connections
        for _ in range(10):
            began, before = time.perf_counter(), time_of(fleet)
            list(pool.map(one, range(count // 10)))
            spent = time_of(fleet).since(before)
            took += time.perf_counter() - began
            held = {f"{name} descriptors": at_rest(partial(descriptors, pid)) for name, pid in watched.items()}
            found.append(
                {
                    "cpu_ms": round(spent["all"] * 1000 / (count // 10), 3),
                    "slab": slab_bytes(),
                    **{name: resident_bytes(pid) for name, pid in watched.items()},
                    **held,
                }
            )
    return found, round(count / took, 1)


def _change(before: float, after: float) -> float:
    return round(after / before - 1, 4)


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        print(f"soak     {name:22} {value}", file=sys.stderr)
