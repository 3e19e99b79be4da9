"""docs/reference/metrics.md"""

from __future__ import annotations

from dsec.observe import metrics
from tools.reference.text import NOTE


def page() -> str:
    rows = []
    for metric in metrics.REGISTRY.collect():
        declared = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in _labels(declared)) or "none"
        rows.append(f"| `{declared}` | {metric.type} | {labels} | {metric.documentation} |")
    return "\n".join(
        [
            "# Metrics",
            "",
            NOTE,
            "",
            "In the Prometheus text format. Labels hold words of ours only; ids of sandboxes, execs and projects are",
            "in the logs.",
            "",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
            *sorted(rows),
            "",
        ]
    )


def _labels(name: str) -> tuple[str, ...]:
    for metric in vars(metrics).values():
        if getattr(metric, "_name", None) in (name, name.removesuffix("_total")):
            return tuple(metric._labelnames)
    raise LookupError(name)
