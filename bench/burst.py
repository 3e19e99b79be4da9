"""`python -m bench burst`: many sandboxes at once, of an environment that the node has only in a far store.

On demand (with and without a trace) against pulling all of it first, and against all of it being here. Each sandbox
runs a few tools as an agent would. The store answers each request after 5 ms and gives 50 MB/s in all.
Needs root, and an environment of 500 MB or more with python3, git and gcc in the state directory, such as

    dsec env build tools --debian python3 python3-numpy python3-pytest gcc g++ git make cmake vim perl nodejs golang-go
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import dsec
from bench import machine, plots
from bench.cost import Cost
from bench.service import PrivateService, private_service
from bench.throttle import Store, throttled_store
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.storage.layers import LayerStore
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.wire.api import STATE_DIR_ROOT
from dsec.wire.environments import DirectorySource, StoreSource

_DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
_POLL_S: Final = 0.05
_PULL_S: Final = 600.0
_BYTES_MIN: Final = 500_000_000
# What an agent does first: looks around, runs a program, makes a commit, compiles a file.
TOOLS: Final = """
set -e
cd /tmp
export HOME=/tmp
ls /usr/bin >/dev/null
python3 -c 'import json, re, subprocess, argparse, pathlib; print(json.dumps(sorted(re.findall("a.", "abac"))))'
mkdir work
cd work
printf 'int main(void) { return 0; }\\n' > main.c
git init -q .
git add main.c
git -c user.name=a -c user.email=a@b commit -qm first
grep -c int main.c
gcc -c main.c
"""
PULL, PLAIN, TRACED, HERE, LOCAL = "all pulled first", "on demand", "on demand, with a trace", "all here", "made here"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench burst", description=__doc__)
    parser.add_argument("--environment", default="tools")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--bytes-per-second", type=float, default=50e6)
    parser.add_argument("--fronts", nargs="+", default=["fuse", "fanotify"])
    parser.add_argument("--output", type=Path, default=_DOCS / "benchmarks" / "burst.json")
    parser.add_argument("--store", type=Path, help="a directory for the store, kept for the next run")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args(arguments)
    if not options.no_picture:
        plots.check()
    result = measure(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not options.no_picture:
        plots.draw_burst(options.output.with_suffix(".png"), result)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "count": options.count,
        "latency_ms": options.latency_ms,
        "bytes_per_second": options.bytes_per_second,
        "runs": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-burst-", dir=options.state) as place:
        bench = Bench(options, Path(place))
        result["image"] = bench.publish()
        runs: dict[str, list[dict[str, Any]]] = {}
        for turn in range(options.rounds):
            for front in options.fronts:
                for name, one in bench.node(front):
                    runs.setdefault(f"{name} ({front})", []).append(one)
                    print(f"{turn} {name} ({front}): {one}", flush=True)
            one = bench.made_here()
            runs.setdefault(LOCAL, []).append(one)
            print(f"{turn} {LOCAL}: {one}", flush=True)
    result["runs"] = {name: _middle(each) for name, each in runs.items()}
    result["ratios"] = _ratios(result, options.fronts)
    print(json.dumps(result["ratios"], indent=1))
    return result


class Bench:
    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self.options = options
        self.store: Path = options.store or place / "store"
        self.empty = place / "nodes"
        self.empty.mkdir()
        self._hidden = self.store.with_name(self.store.name + "-traces")

    def publish(self) -> dict[str, Any]:
        """Into a directory, with a trace that one sandbox leaves; how large it is."""
        options = self.options
        layers = EnvironmentStore(options.state).resolve(Environment(options.environment)).layers
        size = sum(layer.blob.stat().st_size for layer in layers if layer.blob is not None)
        if size < _BYTES_MIN:
            raise SystemExit(f"bench: {options.environment} has {size} bytes; this wants {_BYTES_MIN} or more")
        if not self._hidden.exists():
            with private_service(options.state) as service:
                service.client.environments.push(options.environment, f"file://{self.store}")
            with private_service(self.empty) as service:
                self._attach(service, f"file://{self.store}")
                with service.client.create(options.environment) as sandbox:
                    sandbox.exec(["sh", "-c", TOOLS], check=True)
                service.client.environments.trace(options.environment)
            (self.store / "traces").rename(self._hidden)
        stored = sum(file.stat().st_size for file in (self.store / "data").rglob("*") if file.is_file())
        traced = sum(len(json.loads(file.read_text())["chunks"]) for file in self._hidden.iterdir())
        return {"layers": len(layers), "bytes": size, "stored_bytes": stored, "traced_chunks": traced}

    def node(self, front: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each on a node that has nothing, but `HERE`, which comes after and has all that is wanted."""
        yield PULL, self._far(front, first=_pull)[0]
        cold, here = self._far(front, again=True)
        yield PLAIN, cold
        if here is not None:
            yield HERE, here
        with self._traces():
            yield TRACED, self._far(front)[0]

    def made_here(self) -> dict[str, Any]:
        """Local files without a loader: what reads cost at least."""
        with private_service(self.options.state) as service:
            _warm_up(service)
            _forget_pages()
            return self._run(service, None, time.monotonic())

    def _far(
        self, front: str, *, first: Callable[[PrivateService], None] | None = None, again: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        options = self.options
        rate, latency = options.bytes_per_second, options.latency_ms
        settings = f'[storage]\nloader_front = "{front}"'
        with (
            throttled_store(self.store, latency_ms=latency, rate=rate) as store,
            private_service(self.empty, settings) as service,
        ):
            _warm_up(service)
            _forget_pages()
            began = time.monotonic()
            self._attach(service, store.url)
            if first is not None:
                first(service)
            done = self._run(service, store, began)
            if not again:
                return done, None
            service.remove_all()
            return done, self._run(service, None, time.monotonic())

    def _attach(self, service: PrivateService, url: str) -> None:
        name = self.options.environment
        service.client.environments.build(name, StoreSource(url=url, environment=name))

    def _run(self, service: PrivateService, store: Store | None, began: float) -> dict[str, Any]:
        cost = Cost(service.client)
        loader = _loader_ms(service)
        with _Fetches(store) as fetches:
            ends = asyncio.run(_burst(service.client.url, self.options.environment, self.options.count))
        done = time.monotonic()
        service.remove_all()  # what they have taken counts once they have ended
        spent = cost.per(self.options.count)
        return {
            "seconds": round(done - began, 3),
            "first_s": round(min(ends) - began, 3),
            "median_s": round(statistics.median(ends) - began, 3),
            "last_fetch_s": round(fetches.last - began, 3) if fetches.last else 0.0,
            "line_busy_s": round(fetches.bytes / self.options.bytes_per_second, 3),
            "fetched_bytes": fetches.bytes,
            "requests": fetches.requests,
            "disk_bytes": service.cache_bytes(),
            "cpu_ms_each": spent["all"],
            "loader_cpu_ms": round(_loader_ms(service) - loader),
        }

    @contextlib.contextmanager
    def _traces(self) -> Iterator[None]:
        self._hidden.rename(self.store / "traces")
        try:
            yield
        finally:
            (self.store / "traces").rename(self._hidden)


class _Fetches:
    """Looks at a store's counts while others fetch of it."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.last = 0.0
        self.bytes = self.requests = 0

    def __enter__(self) -> _Fetches:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._store is not None:
            last = self._ended.wait(_POLL_S)
            counts = self._store.counts()
            if counts["bytes"] != self.bytes:
                self.last = time.monotonic()
            self.bytes, self.requests = counts["bytes"], counts["requests"]
            if last:
                return


async def _burst(url: str, environment: str, count: int) -> list[float]:
    """When each was done."""

    async def one(client: dsec.AsyncClient) -> float:
        sandbox = await client.create(environment)
        await sandbox.exec(["sh", "-c", TOOLS], check=True)
        return time.monotonic()

    async with dsec.AsyncClient(url) as client:
        return await asyncio.gather(*(one(client) for _ in range(count)))


def _pull(service: PrivateService) -> None:
    """All chunks of all layers, by as many requests at once as a store is given."""
    loader = Loader(service.run_dir, service.state_dir / "cache", cache_bytes=1 << 40, front="auto")
    remote, layers = RemoteLayers(loader), LayerStore(service.state_dir)
    far = [layer for layer in map(layers.get, layers.digests()) if layer.remote is not None]
    for layer in far:
        remote.serve(layer)
        remote.prefetch(layer.digest)
    until = time.monotonic() + _PULL_S
    while any(stats.present < stats.chunks for stats in (remote.stats_of(layer.digest) for layer in far)):
        if time.monotonic() > until:
            raise SystemExit(f"bench: not all is here after {_PULL_S:g} s")
        time.sleep(_POLL_S)
    loader.close()


def _loader_ms(service: PrivateService) -> float:
    """Processor time of the loader's processes."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"dsec-loader") and os.fsencode(service.run_dir) in words:
                fields = stat.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def _warm_up(service: PrivateService) -> None:
    """The launcher runs, and code has been loaded; nothing of the image is there."""
    with tempfile.TemporaryDirectory() as tree:
        (Path(tree) / "file").touch()
        service.client.environments.build("empty", DirectorySource(path=tree))
    for _ in range(2):
        service.client.create("empty").destroy()


def _forget_pages() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose time is in the middle, and all times."""
    ordered = sorted(runs, key=lambda run: run["seconds"])
    return {**ordered[len(ordered) // 2], "all_seconds": [run["seconds"] for run in runs]}


def _ratios(result: dict[str, Any], fronts: list[str]) -> dict[str, float]:
    runs, stored = result["runs"], result["image"]["stored_bytes"]
    found = {}
    for front in fronts:
        pull = runs[f"{PULL} ({front})"]
        for name in (PLAIN, TRACED):
            one = runs[f"{name} ({front})"]
            found[f"{name} ({front}): times faster than {PULL}"] = round(pull["seconds"] / one["seconds"], 2)
            here = runs[f"{HERE} ({front})"]["seconds"]
            found[f"{name} ({front}): seconds more than {HERE}"] = round(one["seconds"] - here, 3)
            found[f"{name} ({front}): share of the bytes"] = round(one["fetched_bytes"] / stored, 3)
    return found
