"""`python -m bench environments`: what layers cost: to make, to mount, below a sandbox, to read in each way.

Needs root and the environment given by --environment in the state directory. Writes JSON, and a picture beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import stat
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench import machine, peers, plots
from bench.series import Measure, interleave
from bench.service import private_service
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.make import make_layer
from dsec.storage.layers import LayerLocation, LayerStore
from dsec.storage.loader import Loader
from dsec.storage.mounts import mount_erofs
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.places import DirectoryPlace
from dsec.storage.store.publish import attach_layer, publish_layer, sealed_digest
from dsec.wire.api import STATE_DIR_ROOT
from dsec.wire.environments import OciSource
from dsec.wire.loader import LoaderOp, PrefetchArgs

_DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
LAYERS: Final = (1, 5, 61)
_PULL_S: Final = 600.0
_RANDOM_READS: Final = 4_000
_READ_ROUNDS: Final = 5
_SEQUENTIAL_BYTES: Final = 200 << 20


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench environments", description=__doc__)
    parser.add_argument("--environment", default="tools")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=_DOCS / "benchmarks" / "environments.json")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args(arguments)
    if not options.no_picture:
        plots.check()
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine.describe()}
    layer = _largest(options)
    with tempfile.TemporaryDirectory(prefix="bench-environments-", dir=options.state) as name:
        place = Path(name)
        result["conversion"] = conversion(layer, place)
        result["mount"] = mounting(place, options.rounds)
        result["create"] = creating(place, options.rounds)
        result["reading"] = reading(layer, place)
    print(json.dumps(result, indent=1))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not options.no_picture:
        plots.draw_environments(options.output.with_suffix(".png"), result)


def _largest(options: argparse.Namespace) -> LayerLocation:
    layers = EnvironmentStore(options.state).resolve(Environment(options.environment)).layers
    return max(layers, key=lambda layer: layer.blob.stat().st_size if layer.blob else 0)


def conversion(layer: LayerLocation, place: Path) -> dict[str, Any]:
    """The tree of a layer made a layer, and that cut into chunks for a store."""
    with peers.mounted_layers([(layer.kind, str(layer.meta), str(layer.blob))]) as tree:
        layers = LayerStore(place / "made")
        _forget_pages()
        began = time.perf_counter()
        with layers.staging() as work, make_layer(layers, tree, work, lambda event: None) as held:
            made = time.perf_counter()
            (digest,) = held.digests
        publish_layer(layers, digest, DirectoryPlace(place / "store"))
        published = time.perf_counter()
    found = layers.get(digest)
    assert found.blob is not None
    return {
        "entries": layers.record(digest).entries,
        "make_s": round(made - began, 2),
        "publish_s": round(published - made, 2),
        "metadata_bytes": found.meta.stat().st_size,
        "data_bytes": found.blob.stat().st_size,
        "store_bytes": sum(file.stat().st_size for file in (place / "store").rglob("*") if file.is_file()),
    }


def mounting(place: Path, rounds: int) -> dict[str, Any]:
    """So many layers mounted one after another; a node does it once for each layer, not for each sandbox."""
    layers = LayerStore(place / "small")
    digests = []
    for number in range(max(LAYERS)):
        tree = place / "tree"
        tree.mkdir(exist_ok=True)
        (tree / "file").write_text(str(number))
        with layers.staging() as work, make_layer(layers, tree, work, lambda event: None) as held:
            digests += held.digests
    found = [layers.get(digest) for digest in digests]

    def mount(count: int) -> list[float]:
        began = time.perf_counter()
        tops = [mount_erofs(layer.meta, layer.blob) for layer in found[:count]]
        elapsed = time.perf_counter() - began
        for top in tops:
            os.close(top)
        return [elapsed * 1000]

    measures: dict[str, Measure] = {f"{count} layers": _of(mount, count) for count in LAYERS}
    return {name: series.summary() for name, series in interleave(measures, rounds).items()}


def creating(place: Path, rounds: int) -> dict[str, Any]:
    """Sandboxes over so many layers: the call and the removal, as the caller sees them."""
    (place / "nodes").mkdir()
    with private_service(place / "nodes") as service:
        for count in LAYERS:
            layout = place / f"image{count}"
            write_image(layout, count)
            service.client.environments.build(f"layers{count}", OciSource(path=str(layout)))
        removals: dict[int, list[float]] = {count: [] for count in LAYERS}

        def create(count: int) -> list[float]:
            began = time.perf_counter()
            sandbox = service.client.create(f"layers{count}")
            created = time.perf_counter()
            sandbox.destroy()
            removals[count].append((time.perf_counter() - created) * 1000)
            return [(created - began) * 1000]

        measures: dict[str, Measure] = {f"{count} layers": _of(create, count) for count in LAYERS}
        found = interleave(measures, rounds)
        return {
            name: {**series.summary(), "destroy_p50_ms": round(statistics.median(removals[count]), 3)}
            for (name, series), count in zip(found.items(), LAYERS, strict=True)
        }


def reading(layer: LayerLocation, place: Path) -> dict[str, Any]:
    """The same files read by each way in turn, all chunks on the disk, no page in memory; the best of each."""
    ways = {
        "local file": (None, True),
        "FUSE": ("fuse", True),
        "fanotify, marked": ("fanotify", False),
        "fanotify, whole": ("fanotify", True),
    }
    with contextlib.ExitStack() as stack:
        tops = {}
        for name, (front, whole) in ways.items():
            blob = layer.blob
            if front is not None:
                blob = stack.enter_context(_far(layer, place, front, whole=whole))
            tops[name] = mount_erofs(layer.meta, blob)
            stack.callback(os.close, tops[name])
        files = _largest_files(tops["local file"])
        runs = [{name: _read_figures(top, files) for name, top in tops.items()} for _ in range(_READ_ROUNDS)]
    return {
        name: {
            "sequential_mb_s": max(run[name][0] for run in runs),
            "random_4k_us": min(run[name][1] for run in runs),
        }
        for name in ways
    }


@contextlib.contextmanager
def _far(layer: LayerLocation, place: Path, front: str, *, whole: bool) -> Iterator[Path]:
    """The file by which a loader serves a layer of which all chunks, or all but the last, are in its cache."""
    node = Path(tempfile.mkdtemp(prefix="node-", dir=place))
    (node / "run").mkdir()
    loader = Loader(node / "run", node / "cache", cache_bytes=1 << 40, front=front)
    remote = RemoteLayers(loader)
    try:
        name = sealed_digest(LayerStore(place / "made"), layer.digest)
        there = attach_layer(LayerStore(node), name, DirectoryPlace(place / "store"))
        path = remote.serve(there)
        wanted = remote.stats_of(name).chunks - (not whole)
        args = PrefetchArgs(digest=name, chunks=() if whole else tuple(range(wanted)), whole=whole)
        loader.request(LoaderOp.PREFETCH, args, dict)
        until = time.monotonic() + _PULL_S
        while remote.stats_of(name).present < wanted:
            if time.monotonic() > until:
                raise SystemExit(f"bench: not all is here after {_PULL_S:g} s")
            time.sleep(0.05)
        yield Path(path)
    finally:
        loader.shutdown()


def _read_figures(top: int, files: list[tuple[str, int]]) -> tuple[float, float]:
    """MB/s of large files one after another, and microseconds of a small read somewhere in the largest."""
    _forget_pages()
    began = time.perf_counter()
    done = 0
    for name, size in files:
        with open(os.open(name, os.O_RDONLY, dir_fd=top), "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        done += size
        if done >= _SEQUENTIAL_BYTES:
            break
    sequential = done / (time.perf_counter() - began) / 1e6
    _forget_pages()
    name, size = files[0]
    chance = random.Random(0)
    with open(os.open(name, os.O_RDONLY, dir_fd=top), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        began = time.perf_counter()
        for _ in range(_RANDOM_READS):
            os.pread(file.fileno(), 4096, chance.randrange(size // 4096) * 4096)
        each = (time.perf_counter() - began) / _RANDOM_READS * 1e6
    return round(sequential), round(each, 1)


def _largest_files(top: int) -> list[tuple[str, int]]:
    found = []
    for parent, _, names, fd in os.fwalk(".", dir_fd=top):
        for name in names:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                found.append((f"{parent}/{name}", info.st_size))
    return sorted(found, key=lambda one: -one[1])


def write_image(directory: Path, layers: int) -> None:
    """An OCI layout of so many layers, each with a file of its own."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{media}", "digest": f"sha256:{digest}", "size": len(content)}

    tars = [_tar(number) for number in range(layers)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"),
        "layers": [put(tar, "layer.v1.tar") for tar in tars],
    }
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def _tar(number: int) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        entry = tarfile.TarInfo(f"usr/share/bench/layer{number}")
        content = f"layer {number}\n".encode()
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return output.getvalue()


def _of(measure: Any, count: int) -> Measure:
    return lambda: list(measure(count))


def _forget_pages() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
