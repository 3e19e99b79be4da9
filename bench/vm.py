"""`python -m bench vm`: microvms: booted, cloned, and cloned before anybody asks; how many a second, what each idle one
takes of memory, what a command, a pause, a snapshot and a fork cost. Emulated where the processor runs no guests: then
only ratios count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import dsec
from bench import machine, reporting
from bench.bare import Bare
from bench.memory import least, pss_bytes
from bench.series import Measure, Series, interleave, timed
from bench.service import PrivateService, private_service
from dsec.core.limits import MIB
from dsec.wire.api import STATE_DIR_ROOT

COLD = "template booted, and its first clone"
CLONE = "clone"
SPARE = "clone made before"
BARE = "of it, QEMU until its guest runs, bare"
EXEC = "exec true"
PAUSE = "pause"
RESUME = "resume, and exec true"
SNAPSHOT = "snapshot of disk and memory"
FROM = "created from it, and exec true"
FORK = "fork of a running one, and exec true"
DEEP = "deep pause"
WAKE = "resume after it, and exec true"
_MEMORY_MIB = 192
_TIMEOUT_S = 600.0
_AT_ONCE = 4
_QEMU = "qemu-system"
_MONITORS = (_QEMU, "firecracker")
WAYS = {
    "layers as disks": '[microvm]\nlayer_device = "blk"\npage_out = false',
    "layers as memory (pmem, DAX)": '[microvm]\nlayer_device = "pmem"\npage_out = false',
    "layers as disks, paused ones go to swap": '[microvm]\nlayer_device = "blk"\npage_out = true',
    "layers as memory, paused ones go to swap": '[microvm]\nlayer_device = "pmem"\npage_out = true',
}
READ = """python3 - <<'E'
import os
read = 0
for place, _, names in os.walk("/usr"):
    for name in sorted(names):
        path = os.path.join(place, name)
        if read < 64 << 20 and os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                read += len(file.read(8 << 20))
print(read)
E"""
_WARM = "[node.warm]\nspares_max = 4\nlow = 2\nhigh = 4"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench vm", description=__doc__)
    parser.add_argument("--environment", default="base")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, nargs="+", default=[1, 10, 40], help="how many idle ones are weighed")
    parser.add_argument("--compare", type=int, metavar="COUNT", help="only weigh so many, by each way to save memory")
    parser.add_argument("--reporting", action="store_true", help="only weigh what a guest frees, reported or not")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    if options.reporting:
        freed = reporting.weigh_both()
        reporting.show(freed)
        if options.output:
            options.output.write_text(json.dumps({"machine": machine.describe(), "freed": freed}, indent=2) + "\n")
        return
    if options.compare:
        weighed = [weigh(options, name, settings) for name, settings in WAYS.items()]
        show_ways(weighed)
        if options.output:
            options.output.write_text(json.dumps({"machine": machine.describe(), "ways": weighed}, indent=2) + "\n")
        return
    with ExitStack() as stack:
        plain = stack.enter_context(private_service(options.state))
        warm = stack.enter_context(private_service(options.state, _WARM))
        result = {
            "starts": starts(plain, warm, options.environment, options.rounds),
            "use": use(plain, options.environment, options.rounds * 4),
            "saved": saved(plain, options.environment, options.rounds),
            "a_second": a_second(plain, options.environment, options.rounds * 4),
            "idle": [idle(plain, options.environment, count) for count in options.idle],
        }
    show(result)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")


def create(service: PrivateService, environment: str, memory_mib: int = _MEMORY_MIB) -> dsec.Sandbox:
    return service.client.create(environment, backend="microvm", memory=f"{memory_mib}MiB", timeout_s=_TIMEOUT_S)


def starts(plain: PrivateService, warm: PrivateService, environment: str, rounds: int) -> dict[str, Any]:
    """Until a first command has ended. Each template is of another size, so that it has to be made. What none of it can
    be faster than under QEMU: its start."""
    sizes = itertools.count(_MEMORY_MIB + 2, 2)
    use_once(plain, environment)  # images of layers, and the template of all clones
    for _ in range(2):  # who is asked for once may never be again
        use_once(warm, environment)

    def spare() -> list[float]:
        warm.wait_warm(1)
        return [use_once(warm, environment)]

    with create(plain, environment) as like:
        measures: dict[str, Measure] = {
            COLD: lambda: [use_once(plain, environment, next(sizes))],
            CLONE: lambda: [use_once(plain, environment)],
            SPARE: spare,
        }
        pid, name = next((pid, Path(f"/proc/{pid}/comm").read_text()) for pid in monitors(plain))
        if name.startswith(_QEMU):
            bare = Bare(pid)
            measures[BARE] = lambda: [bare.measure()]
        found = interleave(measures, rounds, warmup=1)
        like.exec("true", check=True)  # its template is as it was
    return summaries(found)


def use_once(service: PrivateService, environment: str, memory_mib: int = _MEMORY_MIB) -> float:
    """Milliseconds until its first command has ended. Its end is not counted."""
    began = time.perf_counter()
    with create(service, environment, memory_mib) as sandbox:
        sandbox.exec("true", check=True)
        return (time.perf_counter() - began) * 1000


def use(service: PrivateService, environment: str, rounds: int) -> dict[str, Any]:
    with create(service, environment) as sandbox:

        def resumed() -> None:
            sandbox.resume()
            sandbox.exec("true", check=True)

        found = {name: Series(name) for name in (EXEC, PAUSE, RESUME)}
        for _ in range(rounds):
            found[EXEC].milliseconds += timed(lambda: sandbox.exec("true", check=True))()
            found[PAUSE].milliseconds += timed(sandbox.pause)()
            found[RESUME].milliseconds += timed(resumed)()
    return summaries(found)


def saved(service: PrivateService, environment: str, rounds: int) -> dict[str, Any]:
    """Of one in which a program has run. `frozen_ms`: for how long it stood still for a snapshot."""
    found = {name: Series(name) for name in (SNAPSHOT, FROM, FORK, DEEP, WAKE)}
    frozen = []
    with create(service, environment) as sandbox:
        sandbox.exec("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done", check=True)

        def goes_on(snapshot: str) -> None:
            with service.client.create(snapshot=snapshot) as made:
                made.exec("true", check=True)

        def forked() -> None:
            with sandbox.fork(1)[0] as made:
                made.exec("true", check=True)

        def woken() -> None:
            sandbox.resume()
            sandbox.exec("true", check=True)

        for _ in range(rounds):
            began = time.perf_counter()
            snapshot = sandbox.snapshot()
            found[SNAPSHOT].milliseconds.append((time.perf_counter() - began) * 1000)
            frozen.append(snapshot.info.frozen_ms)
            found[FROM].milliseconds += timed(partial(goes_on, snapshot.id))()
            found[FORK].milliseconds += timed(forked)()
            snapshot.remove()
            found[DEEP].milliseconds += timed(partial(sandbox.pause, deep=True))()
            found[WAKE].milliseconds += timed(woken)()
    return {**summaries(found), "frozen_ms": [round(value, 1) for value in frozen]}


def a_second(service: PrivateService, environment: str, count: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        made = list(pool.map(lambda _: create(service, environment), range(count)))
        took = time.perf_counter() - began
        list(pool.map(lambda sandbox: sandbox.destroy(), made))
    return round(count / took, 2)


def idle(service: PrivateService, environment: str, count: int) -> dict[str, Any]:
    """Before they have run anything, and after one command. PSS shares what several map; what the kernel keeps for them
    is not in it."""
    with ExitStack() as stack:
        made = [stack.enter_context(create(service, environment)) for _ in range(count)]
        unused = [pss_bytes(pid) for pid in monitors(service)]
        for sandbox in made:
            sandbox.exec("true", check=True)
        weights = [pss_bytes(pid) for pid in monitors(service)]
    return {
        "count": len(weights),
        "unused_each_mib": round(sum(unused) / MIB / count, 1),
        "pss_mib": round(sum(weights) / MIB, 1),
        "each_mib": round(sum(weights) / MIB / count, 1),
    }


def weigh(options: argparse.Namespace, name: str, settings: str) -> dict[str, Any]:
    """Guests that have each read the same files: what they take, and what is left of it while they are paused."""
    count, environment = options.compare, options.environment
    with ExitStack() as stack:
        service = stack.enter_context(private_service(options.state, settings))
        use_once(service, environment)
        guests = [stack.enter_context(create(service, environment)) for _ in range(count)]
        began = time.perf_counter()
        read = [guest.exec(READ, check=True, timeout_s=_TIMEOUT_S).stdout for guest in guests]
        took_s = time.perf_counter() - began
        running = sum(pss_bytes(pid) for pid in monitors(service))
        for guest in guests:
            guest.pause()
        paused = least(lambda: sum(pss_bytes(pid) for pid in monitors(service)))
        again = [timed(lambda guest=guest: resumed(guest))()[0] for guest in guests]
    return {
        "way": name,
        "count": count,
        "read_mib_each": round(int(read[0]) / MIB, 1),
        "read_s": round(took_s, 2),
        "running_mib": round(running / MIB, 1),
        "paused_mib": round(paused / MIB, 1),
        "again_ms": round(sorted(again)[len(again) // 2], 1),
    }


def resumed(guest: dsec.Sandbox) -> None:
    guest.resume()
    guest.exec("true", check=True)


def monitors(service: PrivateService) -> Iterator[int]:
    """Of this service: they are in its cgroups."""
    mark = service.run_dir.name
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark in (directory / "cgroup").read_text()
            if ours and (directory / "comm").read_text().startswith(_MONITORS):
                yield int(directory.name)
        except OSError:
            continue  # it has just ended


def summaries(found: dict[str, Series]) -> dict[str, Any]:
    return {name: series.summary() for name, series in found.items()}


def show_ways(weighed: list[dict[str, Any]]) -> None:
    for row in weighed:
        each = row["running_mib"] / row["count"], row["paused_mib"] / row["count"]
        print(
            f"{row['way']:<44} {each[0]:>7.1f} MiB each after {row['read_mib_each']} MiB were read in {row['read_s']} s"
        )
        print(f"{'':<44} {each[1]:>7.1f} MiB paused, {row['again_ms']} ms until it answers again")


def show(result: dict[str, Any]) -> None:
    cold = result["starts"][COLD]["p50_ms"]
    saved = {name: row for name, row in result["saved"].items() if name != "frozen_ms"}
    for name, row in {**result["starts"], **result["use"], **saved}.items():
        ratio = f"{row['p50_ms'] / cold:>8.3f} of a cold boot" if name in saved or name in result["starts"] else ""
        print(f"{name:<40} {row['p50_ms']:>9.1f} ms [{row['min_ms']:.1f} to {row['max_ms']:.1f}]{ratio}")
    print(f"{'stood still for each snapshot':<40} {', '.join(map(str, result['saved']['frozen_ms']))} ms")
    print(f"{'clones a second, ' + str(_AT_ONCE) + ' at once':<40} {result['a_second']:>9.1f}")
    for row in result["idle"]:
        unused = f"{row['unused_each_mib']} each before they have run anything"
        print(f"{str(row['count']) + ' idle':<40} {row['pss_mib']:>9.1f} MiB, {row['each_mib']} each; {unused}")
