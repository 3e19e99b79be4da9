"""Peers and floors that start a container of the same root file system: dsec-floor, bwrap, runc."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.series import Measure, timed

_RUN_S = 60.0


@contextlib.contextmanager
def mounted_layers(layers: list[tuple[str, str, str | None]]) -> Iterator[Path]:
    """The layers (kind, meta, blob; lowest first) as one read-only tree, mounted for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-")))
        trees: list[Path] = []
        for number, (kind, meta, blob) in enumerate(layers):
            if kind == "directory":
                trees.append(Path(meta))
                continue
            tree = scratch / str(number)
            tree.mkdir()
            # An EROFS on a block device wants its data on one too, so both files get a loop device.
            options = "ro" if blob is None else f"ro,device={stack.enter_context(_loop_device(blob))}"
            device = stack.enter_context(_loop_device(meta))
            subprocess.run(["mount", "-t", "erofs", "-o", options, device, str(tree)], check=True)
            stack.callback(subprocess.run, ["umount", str(tree)], check=True)
            trees.append(tree)
        if len(trees) == 1:
            yield trees[0]
            return
        joined = scratch / "all"
        joined.mkdir()
        lower = ":".join(str(tree) for tree in reversed(trees))
        subprocess.run(["mount", "-t", "overlay", "-o", f"ro,lowerdir={lower}", "overlay", str(joined)], check=True)
        stack.callback(subprocess.run, ["umount", str(joined)], check=True)
        yield joined


@contextlib.contextmanager
def _loop_device(file: str) -> Iterator[str]:
    made = subprocess.run(["losetup", "--read-only", "--find", "--show", file], capture_output=True, check=True)
    device = made.stdout.decode().strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def floor(program: Path, rootfs: Path, repetitions: int = 5) -> Measure:
    """clone3 with all namespaces, id map, cgroups, overlay, pivot, exec, first reply, kill, wait; no daemon, no API."""

    def run() -> list[float]:
        done = subprocess.run(
            [str(program), "--rootfs", str(rootfs), "-n", str(repetitions)],
            capture_output=True,
            check=True,
            timeout=_RUN_S,
        )
        return [value / 1000 for value in json.loads(done.stdout)["total_us"]]

    return run


def bwrap(rootfs: Path, program_in: tuple[str, ...] = ("true",)) -> Measure | None:
    """A namespace sandbox without limits, id range or network set-up, as people use it bare."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    command = [program, "--unshare-all", "--ro-bind", str(rootfs), "/", "--proc", "/proc", "--dev", "/dev"]
    command += program_in
    return timed(lambda: subprocess.run(command, check=True, capture_output=True, timeout=_RUN_S))


class Runc:
    """`runc run` of a bundle made once: cold start of one command."""

    def __init__(self, program: str, rootfs: Path, scratch: Path):
        self._program = program
        self._scratch = scratch
        self._count = 0
        subprocess.run([program, "spec", "--bundle", str(scratch)], check=True)
        path = scratch / "config.json"
        config = json.loads(path.read_text())
        config["process"]["args"] = ["true"]
        config["process"]["terminal"] = False
        config["process"]["rlimits"] = []
        config["root"] = {"path": str(rootfs), "readonly": True}
        config["linux"]["resources"]["memory"] = {"limit": 1 << 30}
        path.write_text(json.dumps(config))

    def run(self) -> None:
        self._count += 1
        name = f"dsec-bench-{os.getpid()}-{self._count}"
        command = [self._program, "--root", str(self._scratch / "state"), "run", "--bundle", str(self._scratch), name]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_RUN_S)


def runc(rootfs: Path, scratch: Path) -> Measure | None:
    program = shutil.which("runc")
    return timed(Runc(program, rootfs, scratch).run) if program else None
