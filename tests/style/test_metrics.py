"""Every metric is counted somewhere, and is named as Prometheus wants it."""

from __future__ import annotations

import re

from prometheus_client.metrics import MetricWrapperBase

from dsec.observe import metrics
from tests.style.tree import files_below


def declared() -> dict[str, MetricWrapperBase]:
    return {name: value for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)}


def test_every_metric_is_used() -> None:
    sources = [path.read_text(encoding="utf-8") for path in files_below("src/dsec", ".py") if path.name != "metrics.py"]

    unused = [name for name in declared() if not any(re.search(rf"\b{name}\b", text) for text in sources)]

    assert unused == []


def test_metrics_carry_the_prefix_and_base_units() -> None:
    names = [name.removesuffix("_total") for metric in declared().values() for name in [metric._name]]

    assert [name for name in names if not name.startswith("dsec_")] == []
    assert [name for name in names if re.search(r"_(ms|us|kb|mb|mib|minutes)$", name)] == []


def test_labels_hold_nothing_that_a_caller_chooses() -> None:
    chosen = {"sandbox", "exec", "project", "name", "path", "environment", "session", "user", "node", "token"}

    assert [name for name, metric in declared().items() if chosen & set(metric._labelnames)] == []
