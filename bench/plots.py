"""Figures as pictures. Needs matplotlib, which is in the extra `bench`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")


def check() -> None:
    """Before anything is measured: an hour of figures must not end in a missing package."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("bench: pictures need matplotlib: .venv/bin/pip install -e .[bench], or give --output")


def draw(directory: Path, *, create: Mapping[str, Sequence[float]], cost: Mapping[str, Mapping[str, float]]) -> None:
    """`create`: milliseconds by name. `cost`: name → process → milliseconds of processor time of one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    _distribution(pyplot, directory / "create.png", create)
    _bars(pyplot, directory / "ratios.png", create)
    _stacks(pyplot, directory / "cpu.png", cost)


def draw_burst(path: Path, result: Mapping[str, Any]) -> None:
    """Time until all were done, the part of it in which something was fetched, and what was fetched."""
    pyplot = _pyplot()
    names = list(result["runs"])[::-1]
    runs = [result["runs"][name] for name in names]
    figure, (times, fetched) = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(names) + 1.6), sharey=True)
    times.barh(names, [run["seconds"] for run in runs], color=_COLOURS[0], label="until all were done")
    times.barh(
        names, [run["last_fetch_s"] for run in runs], height=0.4, color=_COLOURS[1], label="until the last chunk came"
    )
    times.set_xlabel("seconds")
    times.set_title(f"{result['count']} sandboxes at once")
    times.legend()
    fetched.barh(names, [run["fetched_bytes"] / 1e6 for run in runs], color=_COLOURS[2])
    fetched.axvline(result["image"]["stored_bytes"] / 1e6, color="#888888", linestyle="--", label="all of the image")
    fetched.set_xlabel("MB fetched, compressed")
    fetched.legend()
    _save(pyplot, figure, path)


def draw_environments(path: Path, result: Mapping[str, Any]) -> None:
    """Creates by number of layers, and reading by each way."""
    pyplot = _pyplot()
    figure, (creates, reads, small) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    creates.bar(list(result["create"]), [row["p50_ms"] for row in result["create"].values()], color=_COLOURS[0])
    creates.set_title("Create, ms (p50)")
    ways = list(result["reading"])
    for axes, key, title in ((reads, "sequential_mb_s", "Reading, MB/s"), (small, "random_4k_us", "4 KiB read, µs")):
        axes.barh(ways[::-1], [result["reading"][way][key] for way in ways[::-1]], color=_COLOURS[2])
        axes.set_title(title)
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _distribution(pyplot: Any, path: Path, create: Mapping[str, Sequence[float]]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for (name, values), colour in zip(create.items(), _COLOURS, strict=False):
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name, color=colour)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of runs that took no longer")
    axes.set_title("From nothing to the first command's exit status")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    _save(pyplot, figure, path)


def _bars(pyplot: Any, path: Path, create: Mapping[str, Sequence[float]]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    names = list(create)[::-1]
    middles = [sorted(create[name])[len(create[name]) // 2] for name in names]
    axes.barh(names, middles, color=[_COLOURS[list(create).index(name) % len(_COLOURS)] for name in names])
    for index, value in enumerate(middles):
        axes.text(value, index, f" {value:.1f} ms", va="center")
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds, p50")
    axes.set_title("Create and first command")
    _save(pyplot, figure, path)


def _stacks(pyplot: Any, path: Path, cost: Mapping[str, Mapping[str, float]]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    parts = [part for part in next(iter(cost.values())) if part != "all"]
    left = [0.0] * len(cost)
    for part, colour in zip(parts, _COLOURS, strict=False):
        values = [cost[name][part] for name in cost]
        axes.barh(list(cost), values, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("milliseconds of processor time of one create and destroy")
    axes.set_title("Who spends it")
    axes.legend()
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
