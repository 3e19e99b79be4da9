"""Collecting what a node needs no more: shared by node, API, SDK and CLI."""

from __future__ import annotations

import msgspec


class GcRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Remove what nothing needs. `dry_run`: only say what it would be."""

    dry_run: bool = False


class GcItem(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # record | build | layer | blob | chunks | upper | output | socket | draft
    name: str
    bytes: int
    reason: str
    error: str | None = None  # why it is still there


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What went, or with `dry_run` would go. Of many thousands only the first are named; `bytes` counts all."""

    dry_run: bool
    items: list[GcItem] = []
    bytes: int = 0  # of those that went, or would
