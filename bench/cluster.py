"""A cluster of simulated nodes: real NATS, API replicas and watcher; nodes that only say that they have sandboxes.

`python -m bench cluster`: starts one or three NATS servers, replicas, a watcher and `--nodes` nodes with `--live`
sandboxes between them, on loopback. Then come creates at `--base` a second, and bursts of `--burst` offered at
`--burst-rate`, and beside them what goes wrong: a replica and a part of the nodes are killed and started again, nodes
refuse. What is told: creates for each second of a replica's processor, how long they took, what each process spent and
weighs, how even the nodes are, and whether every acknowledged create is there once.

`--hours`: besides, placement alone in virtual time, against an oracle that knows every load at every moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import dsec
from bench import machine, placing, simload, simnodes
from dsec.core.errors import DeadlineError
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers
from dsec.wire.iam import Quota

_PROJECT: Final = "/sim"
_READY_S: Final = 300.0
_SAMPLE_S: Final = 0.5
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=160)
    parser.add_argument("--live", type=int, default=380_000, help="sandboxes that there are when it begins")
    parser.add_argument("--replicas", type=int, default=1, help="API processes")
    parser.add_argument("--servers", type=int, default=1, choices=(1, 3), help="of NATS")
    parser.add_argument("--base", type=float, default=250.0, help="creates a second between bursts")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each stretch between bursts")
    parser.add_argument("--bursts", type=int, default=1)
    parser.add_argument("--burst", type=int, default=32_000)
    parser.add_argument("--burst-rate", type=float, default=5_000.0)
    parser.add_argument("--batch", type=int, default=500, help="creates in a request of a burst")
    parser.add_argument("--connections", type=int, default=512, help="of the load to each replica")
    parser.add_argument("--create-ms", type=float, default=15.0, help="what a create takes on a node, in the middle")
    parser.add_argument("--refuse", type=float, default=0.005, help="part of creates that a node refuses")
    parser.add_argument("--processes", type=int, default=4, help="that the simulated nodes are in")
    parser.add_argument("--faults", action="store_true", help="kill a replica, and a process of nodes, during the load")
    parser.add_argument("--hours", type=float, default=24.0, help="of placement in virtual time")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    result = {"machine": machine.describe(), "asked": {k: str(v) for k, v in vars(options).items() if k != "output"}}
    with tempfile.TemporaryDirectory(prefix="dsec-sim-") as scratch:
        result |= _run(options, Path(scratch))
    if options.hours:
        result["placement"] = placing.day(options.nodes, options.live, hours=options.hours)
    show(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def _run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        servers = NatsServers.started(scratch / "engine", count=options.servers)
        stack.callback(servers.end)
        cluster = stack.enter_context(cluster_processes(scratch, servers))
        names = [f"api{number}" for number in range(options.replicas)]
        for name in names:
            cluster.start_api(name)
        cluster.start_watcher("watcher")
        nodes = stack.enter_context(_nodes(options, scratch, servers, cluster))
        for name in names:
            _prepare(cluster.socket(name), options.nodes * 3 * (options.live // options.nodes))
        with dsec.Client(f"unix:{cluster.socket(names[0])}") as client:
            client.projects.create(_PROJECT)
            _set_quota(client, Quota(sandboxes=2 * options.live))
        watched = _Watched(
            {
                **{name: lambda name=name: cluster.processes[name].pid for name in (*names, "watcher")},
                **{f"nats{n}": lambda n=n: servers.pid(n) for n in range(options.servers)},
                **{f"nodes{n}": lambda n=n: nodes.processes[n].pid for n in range(options.processes)},
            }
        )
        stack.enter_context(watched)
        faults = _faults(options, cluster, nodes, names) if options.faults else []
        report = _load(options, scratch / "report", [cluster.socket(name) for name in names], faults)
        time.sleep(2.0)  # heartbeats tell how full nodes are
        return {
            "phases": [_phase(phase, watched, names) for phase in report.phases],
            "weights": watched.weights(),
            "exactly_once": _exactly_once(report, scratch / "journals", cluster),
            "balance": _balance(scratch / "journals"),
        }


class _Nodes:
    def __init__(self, plans: list[bytes], log: Path) -> None:
        self._plans = plans
        self._log = log
        self.processes: list[subprocess.Popen[bytes]] = [self._start(number) for number in range(len(plans))]

    def wait(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise SystemExit(f"bench: simulated nodes do not start: {self._log.read_text()[-2_000:]}")

    def again(self, number: int) -> None:
        """Killed, away for longer than it takes to be suspect, and started again."""
        self.processes[number].kill()
        self.processes[number].wait()
        time.sleep(6.0)
        self.processes[number] = self._start(number)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.simnodes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert process.stdin is not None
        process.stdin.write(self._plans[number])
        process.stdin.close()
        return process

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


@contextlib.contextmanager
def _nodes(
    options: argparse.Namespace, scratch: Path, servers: NatsServers, cluster: ClusterProcesses
) -> Iterator[_Nodes]:
    identities = []
    for number in range(options.nodes):
        identities.append(str(scratch / f"node{number}"))
        servers.keys.issue_node(Path(identities[-1]))
    (scratch / "journals").mkdir()
    each = options.live // options.nodes
    plans = [
        msgspec.json.encode(
            simnodes.Plan(
                servers=servers.urls,
                identities=tuple(identities[part :: options.processes]),
                journals=str(scratch / "journals"),
                preload=each,
                sandboxes_max=3 * each,
                create_s=options.create_ms / 1000,
                refuse=options.refuse,
                seed=1_000 * part,
            )
        )
        for part in range(options.processes)
    ]
    nodes = _Nodes(plans, scratch / "nodes.log")
    try:
        nodes.wait()
        yield nodes
    finally:
        nodes.end()


def _prepare(socket: Path, room: int) -> None:
    """Returns when the replica knows what room all nodes have."""
    with dsec.Client(f"unix:{socket}") as client:
        until = time.monotonic() + _READY_S
        while (load := client.health().load) is None or load.sandboxes_max < room:
            if time.monotonic() > until:
                raise SystemExit("bench: the nodes do not become members")
            time.sleep(0.5)


def _set_quota(client: dsec.Client, quota: Quota) -> None:
    """All nodes are asked what they hold, at once, and over connections that there are not yet."""
    until = time.monotonic() + _READY_S
    while True:
        try:
            client.projects.set_quota(_PROJECT, quota)
            return
        except DeadlineError:
            if time.monotonic() > until:
                raise


def _load(
    options: argparse.Namespace, report: Path, sockets: list[Path], faults: list[threading.Timer]
) -> simload.Report:
    base = simload.Phase(name="base", rate=options.base, count=int(options.base * options.seconds))
    phases = [base]
    for number in range(options.bursts):
        phases.append(
            simload.Phase(name=f"burst{number}", rate=options.burst_rate, count=options.burst, batch=options.batch)
        )
        phases.append(msgspec.structs.replace(base, name=f"base{number}"))
    plan = simload.Plan(
        sockets=tuple(map(str, sockets)),
        report=str(report),
        phases=tuple(phases),
        project=_PROJECT,
        connections=options.connections,
        lives_s=options.live / options.base,
    )
    for fault in faults:
        fault.start()
    subprocess.run([sys.executable, "-m", "bench.simload"], input=msgspec.json.encode(plan), check=True)
    for fault in faults:
        fault.join()
    return msgspec.json.decode(Path(plan.report).read_bytes(), type=simload.Report)


def _faults(
    options: argparse.Namespace, cluster: ClusterProcesses, nodes: _Nodes, names: list[str]
) -> list[threading.Timer]:
    def replica() -> None:
        cluster.kill(names[-1])
        cluster.start_api(names[-1])

    def part_of_nodes() -> None:
        nodes.again(0)

    return [
        threading.Timer(options.seconds * 0.3, replica),
        threading.Timer(options.seconds * 0.6, part_of_nodes),
        threading.Timer(options.seconds + 1.0, replica),  # in the burst
    ]


class _Watched:
    """Processor time of each process twice a second. One that was started again goes on where the last one ended."""

    def __init__(self, pids: Mapping[str, Any]) -> None:
        self._pids = pids
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._ended: Counter[str] = Counter()
        self._last: dict[str, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            found = {}
            for name, pid_of in self._pids.items():
                with contextlib.suppress(KeyError, OSError, IndexError):
                    pid = pid_of()
                    spent = _cpu_s(pid)
                    before = self._last.get(name)
                    if before is not None and before[0] != pid:
                        self._ended[name] += before[1]
                    self._last[name] = (pid, spent)
                found[name] = self._ended[name] + self._last.get(name, (0, 0.0))[1]
            self._samples.append((time.time(), found))

    def between(self, begin: float, end: float) -> dict[str, float]:
        before = [spent for at, spent in self._samples if at <= begin] or [self._samples[0][1]]
        after = [spent for at, spent in self._samples if at >= end] or [self._samples[-1][1]]
        return {name: after[0][name] - before[-1][name] for name in self._pids}

    def weights(self) -> dict[str, float]:
        """MiB in memory of each."""
        found = {}
        for name, pid_of in self._pids.items():
            pages = int(Path(f"/proc/{pid_of()}/statm").read_text().split()[1])
            found[name] = round(pages * _PAGE / 2**20, 1)
        return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _phase(phase: simload.PhaseReport, watched: _Watched, names: list[str]) -> dict[str, Any]:
    spent = watched.between(phase.began_at, phase.ended_at)
    took = phase.ended_at - phase.began_at
    api_s = sum(spent[name] for name in names)
    groups: Counter[str] = Counter()
    for name, seconds in spent.items():
        groups[name.rstrip("0123456789")] += seconds
    return {
        **simload.as_dict(phase),
        "a_second": round(phase.created / took, 1),
        "for_each_api_cpu_s": round(phase.created / api_s, 1) if api_s else None,
        "cpu_us_a_create": {name: round(1e6 * value / max(phase.created, 1), 1) for name, value in groups.items()},
    }


def _journals(directory: Path) -> Iterator[tuple[str, list[simnodes.Held]]]:
    for path in sorted(directory.iterdir()):
        yield path.name, [msgspec.json.decode(line, type=simnodes.Held) for line in path.read_bytes().splitlines()]


def _exactly_once(report: simload.Report, journals: Path, cluster: ClusterProcesses) -> dict[str, int]:
    made: dict[str, list[str]] = {}
    for _, lines in _journals(journals):
        for held in lines:
            if held.ends_at:
                made.setdefault(held.key, []).append(held.id)
    acknowledged = dict(report.acknowledged)
    return {
        "acknowledged": len(acknowledged),
        "lost": sum(id not in made.get(key, ()) for key, id in acknowledged.items()),
        "doubled": sum(len(ids) > 1 for ids in made.values()),
        "made_and_not_acknowledged": sum(key not in acknowledged for key in made),
    }


def _balance(journals: Path) -> dict[str, float]:
    """Of what was placed during the load: each node's share beside the mean."""
    placed = [sum(held.ends_at > 0 for held in lines) for _, lines in _journals(journals)]
    mean = sum(placed) / len(placed)
    return {"mean": round(mean, 1), "most": round(max(placed) / mean, 3), "least": round(min(placed) / mean, 3)}


def show(result: dict[str, Any]) -> None:
    for phase in result["phases"]:
        print(
            f"cluster  {phase['name']:10} {json.dumps({k: v for k, v in phase.items() if k != 'name'})}",
            file=sys.stderr,
        )
    for name in ("weights", "exactly_once", "balance", "placement"):
        if name in result:
            print(f"cluster  {name:10} {json.dumps(result[name])}", file=sys.stderr)
