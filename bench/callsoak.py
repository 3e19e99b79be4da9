"""`python -m bench calls-soak --count 100000`: calls without end, and what is left of them.

After each tenth: processes, cgroups and mounts of places, descriptors, memory, files. Ends with 1 when something grows
from the first tenth, when caches are full, to the last.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import dsec
from bench.accounting import Fleet, descriptors, resident_bytes, slab_bytes
from bench.density import find_fleet
from bench.service import PrivateService, private_service
from dsec.wire.api import STATE_DIR_ROOT

_PLACES: Final = 4  # kept, so that what each of them holds can be compared
_GROWTH_MAX: Final = 0.1  # of memory, from the first tenth to the last
_QUIET_S: Final = 3.0  # for what is cleaned up late
# A bit of everything that a call may leave.
_CODES: Final = (
    "print(1)",
    "open('/tmp/left', 'w').write('x' * 10_000); open('left', 'w').write('x')",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
    "raise SystemExit(3)",
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench calls-soak", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    options = parser.parse_args(arguments)
    settings = (
        f"[calls]\nplaces_max = {_PLACES}\n[calls.pools.kept]\nplaces_min = {_PLACES}\n"
        f'environment = "{options.environment}"\ntype = "python"\n'
        # Places are given up and made anew in each tenth, also in the first, so that what that costs is there before.
        f"calls_max = {max(50, options.count // 160)}\n"
    )
    with private_service(options.state, settings) as service:
        found, rate = soak(service, options.environment, options.count)
    for tenth in found:
        print(json.dumps(tenth))
    grown = growth(found[0], found[-1])
    print(f"{options.count} calls, {rate} a second; grown: {grown or 'nothing'}")
    if grown:
        raise SystemExit(1)


def soak(service: PrivateService, environment: str, count: int) -> tuple[list[dict[str, Any]], float]:
    client = service.client
    with client.create(environment):  # by which the service's processes and cgroups are found
        fleet = find_fleet(client)
        requests = [dsec.make_call("python", code, environment=environment) for code in _CODES]
        tenth = max(len(requests), count // 10)
        found, took_s = [], 0.0
        for _ in range(10):
            began = time.perf_counter()
            results = client.call_many([requests[n % len(requests)] for n in range(tenth)], concurrency=2 * _PLACES)
            took_s += time.perf_counter() - began
            wrong = [r for r in results if not isinstance(r, dsec.CallResult) or r.status not in ("finished", "error")]
            if wrong:
                raise SystemExit(f"bench: {len(wrong)} calls failed, such as {wrong[0]}")
            found.append(look(service, fleet))
    return found, round(10 * tenth / took_s, 1)


def look(service: PrivateService, fleet: Fleet) -> dict[str, Any]:
    """While nobody calls, and every place is there."""
    until = time.monotonic() + 60
    time.sleep(_QUIET_S)
    while (pool := service.client.call_pools()[0]).idle < _PLACES:
        if time.monotonic() > until:
            raise SystemExit(f"bench: places are not kept: {pool}")
        time.sleep(0.1)
    lists = [file for file in fleet.cgroup.glob("sbx_*/**/cgroup.procs") if file.exists()]
    pids = [int(pid) for file in lists for pid in file.read_text().split()]
    mounts = {pid: Path(f"/proc/{pid}/mountinfo").read_text().count("\n") for pid in [fleet.launcher, *pids]}
    return {
        "calls": pool.calls,
        "given up": pool.retired,
        "processes": len(pids),
        "cgroups": len(lists),
        "mounts": sum(mounts.values()),
        "descriptors": {"service": descriptors(fleet.service), "launcher": descriptors(fleet.launcher)},
        "service KiB": resident_bytes(fleet.service) // 1024,
        "launcher KiB": resident_bytes(fleet.launcher) // 1024,
        "places KiB": sum(resident_bytes(pid) for pid in pids) // 1024,
        "slab KiB": slab_bytes() // 1024,
        "files": sum(1 for _ in (service.state_dir / "sandboxes").rglob("*")),
    }


def growth(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """What there is more of than at first. Slab is the whole machine's, so it is only shown."""
    exact = [name for name in ("processes", "cgroups", "mounts", "files") if last[name] > first[name]]
    more = [name for name, count in last["descriptors"].items() if count > first["descriptors"][name] + _PLACES]
    sizes = ("service KiB", "launcher KiB", "places KiB")
    return exact + more + [name for name in sizes if last[name] > first[name] * (1 + _GROWTH_MAX)]
