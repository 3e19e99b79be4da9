"""Figures in words: a page that is written anew by each run of `make bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


def write(page: Path, pictures: Path, result: Mapping[str, Any]) -> None:
    """Puts the figures between the marks of the page, and as JSON beside the pictures."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"bench: {page} has no marks for the figures")
    page.write_text(f"{before}{begin}\n{in_words(result)}\n{end}{after}", encoding="utf-8")
    pictures.mkdir(parents=True, exist_ok=True)
    (pictures / "figures.json").write_text(json.dumps(result, indent=1) + "\n")


def in_words(result: Mapping[str, Any]) -> str:
    machine, create = result["machine"], result["create"]
    lines = [
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, kernel {machine['kernel']}, "
        f"Python {machine['python']}, load {machine['load_1m']} when it began, {result['date']}.",
        "",
        "| | n | min ms | p50 ms | p95 ms |",
        "| --- | --- | --- | --- | --- |",
        *_rows(create),
        *_rows(result["phases"], "… "),
        *_rows(result["exec"]),
        "",
        "| ratio | p50 | min |",
        "| --- | --- | --- |",
        *(f"| {name} | {ratio['p50']} | {ratio['min']} |" for name, ratio in create["ratios"].items()),
        *(f"| {name} | {ratio['p50']} | {ratio['min']} |" for name, ratio in result["exec"]["ratios"].items()),
        "",
        "| create and destroy | a second | ms of processor time each | service | launcher, sandboxes | caller |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_sustained(name, row) for name, row in result["sustained"].items()),
        "",
        f"Upload {result['transfers']['upload_mib_s']} MiB/s, download {result['transfers']['download_mib_s']} MiB/s; "
        f"`import dsec` {result['import_ms']} ms.",
        "",
        "![How long a create takes](benchmarks/create.png)",
        "![Create and first command](benchmarks/ratios.png)",
        "![Who spends the processor time](benchmarks/cpu.png)",
    ]
    return "\n".join(lines)


def _rows(part: Mapping[str, Any], mark: str = "") -> list[str]:
    return [
        f"| {mark}{name} | {row['n']} | {row['min_ms']} | {row['p50_ms']} | {row['p95_ms']} |"
        for name, row in part.items()
        if name != "ratios"
    ]


def _sustained(name: str, row: Mapping[str, Any]) -> str:
    cost = row["cpu_ms_each"]
    parts = (cost["all"], cost["service"], cost["launcher and sandboxes"], cost["caller"])
    return f"| {name} | {row['per_second']} | {' | '.join(str(part) for part in parts)} |"
