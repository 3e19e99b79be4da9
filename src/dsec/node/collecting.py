"""Collection: the plan of `storage.collect`, carried out on the node's disk, while sandboxes come and go."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from dsec.core.clock import Clock
from dsec.core.errors import DsecError
from dsec.core.faults import fault_point
from dsec.node.census import Known, Places, take_census
from dsec.node.config import CollectConfig
from dsec.observe.logs import get_logger
from dsec.storage.collect import Kind, Plan, Removal, Rules, plan_collection
from dsec.storage.layers import LayerStore
from dsec.storage.space import free_bytes
from dsec.storage.trees import remove_tree
from dsec.storage.volumes import REMOVED
from dsec.wire.collect import GcItem, GcReport

log = get_logger(__name__)

_STRAY_KEEP_S: Final = 3_600.0  # longer than any create, and any build's step between two files
_SHOWN_MAX: Final = 5_000  # items of one answer
_AGAIN_S: Final = 600.0  # between two collections because of too little room


class Collector:
    """One collection at a time. Layers go the way that they go at the node's start (`tidy`), which knows of leases and
    of builds that are just being named; everything else is looked at again before it goes."""

    def __init__(
        self,
        places: Places,
        config: CollectConfig,
        *,
        clock: Clock,
        known: Callable[[], Known],
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        self._places = places
        self._config = config
        self._clock = clock
        self._known = known
        self._tidy = tidy
        self._running = asyncio.Lock()
        self._automatic_at: float | None = None

    async def collect(self, *, dry_run: bool = False, want_bytes: int = 0) -> GcReport:
        """What went, or would go. What resists says why, and does not keep the rest."""
        async with self._running:
            known = self._known()  # before anything is looked at: what is made later is young
            plan = await asyncio.to_thread(self._plan, known, want_bytes)
            if dry_run:
                return _report(plan, {}, dry_run=True)
            failures = await asyncio.to_thread(self._remove, plan, known)
            if any(removal.kind in (Kind.LAYER, Kind.RECORD) for removal in plan.removals):
                await self._tidy()
            left = await asyncio.to_thread(self._left, plan, known)
            report = _report(plan, {**left, **failures}, dry_run=False)
            log.info("collected", items=len(plan.removals) - len(left), bytes=report.bytes)
            return report

    async def relieve(self) -> None:
        """Called now and then: collects when the disk has less room than it should have. Never raises."""
        short = self._config.free_bytes_min - free_bytes(self._places.state)
        now = self._clock.monotonic_s()
        if short <= 0 or (self._automatic_at is not None and now - self._automatic_at < _AGAIN_S):
            return
        self._automatic_at = now
        try:
            report = await self.collect(want_bytes=short)
        except (DsecError, OSError) as error:
            log.warning("the disk is short of room, and could not be collected", error=str(error))
            return
        if report.bytes < short:
            log.warning("the disk is short of room", short_bytes=short, collected_bytes=report.bytes)

    def _plan(self, known: Known, want_bytes: int) -> Plan:
        rules = Rules(
            now=self._clock.wall_s(),
            record_keep_s=self._config.record_keep_s,
            blob_keep_s=self._config.blob_keep_s,
            blob_bytes_max=self._config.blob_bytes_max,
            stray_keep_s=_STRAY_KEEP_S,
            want_bytes=want_bytes,
        )
        return plan_collection(take_census(self._places, known), rules)

    # ---- removing ------------------------------------------------------------------------------

    def _remove(self, plan: Plan, known: Known) -> dict[tuple[Kind, str], str]:
        failures: dict[tuple[Kind, str], str] = {}
        records = [removal for removal in plan.removals if removal.kind is Kind.RECORD]
        if records:
            self._remove_records(records, known)
        for removal in plan.removals:
            try:
                fault_point(f"collect.{removal.kind}")
                self._remove_one(removal)
            except (DsecError, OSError) as error:
                failures[removal.key] = str(error)
        return failures

    def _remove_records(self, records: list[Removal], known: Known) -> None:
        """While nobody names anything: what has become a part of an environment meanwhile stays."""
        with LayerStore(self._places.state).collecting():
            still = {removal.key for removal in self._plan_of_records(records, known)}
            for removal in records:
                fault_point("collect.records")
                if removal.key in still:
                    (self._places.environments / f"{removal.name}.json").unlink(missing_ok=True)

    def _plan_of_records(self, records: list[Removal], known: Known) -> list[Removal]:
        """Those of them that would go whatever their age."""
        plan = plan_collection(take_census(self._places, known), Rules(now=float("inf")))
        wanted = {removal.key for removal in records}
        return [removal for removal in plan.removals if removal.key in wanted]

    def _remove_one(self, removal: Removal) -> None:
        places, name = self._places, removal.name
        match removal.kind:
            case Kind.BUILD:
                (places.builds / f"{name}.json").unlink(missing_ok=True)
            case Kind.BLOB:
                algorithm, _, digest = name.partition(":")
                (places.blobs / algorithm / digest).unlink(missing_ok=True)
            case Kind.CHUNKS:
                _put_away(places.chunks / name)
            # Ids are never used twice: those that nobody knows now nobody will.
            case Kind.UPPER:
                _put_away(places.sandboxes / name)
            case Kind.OUTPUT:
                remove_tree(places.records / name)
            case Kind.SOCKET:
                (places.sockets / name).unlink(missing_ok=True)
            case Kind.DRAFT if not name.startswith("staging/"):
                remove_tree(places.state / name)
            case Kind.DRAFT:
                LayerStore(places.state).clean()  # looks at locks, one by one

    def _left(self, plan: Plan, known: Known) -> dict[tuple[Kind, str], str]:
        """What has been planned and is there all the same: it is in use by now."""
        there = {thing.key for thing in take_census(self._places, known)}
        return {removal.key: "it is in use by now" for removal in plan.removals if removal.key in there}


def _put_away(path: Path) -> None:
    """Out of the way by one rename, so that a half of it is never taken for the whole; then removed."""
    doomed = path.with_name(f"{REMOVED}{secrets.token_hex(6)}")
    try:
        os.rename(path, doomed)  # noqa: PTH104 - rename(2), and nothing more clever
    except FileNotFoundError:
        return
    remove_tree(doomed)


def _report(plan: Plan, errors: dict[tuple[Kind, str], str], *, dry_run: bool) -> GcReport:
    items = [
        GcItem(kind=str(r.kind), name=r.name, bytes=r.bytes, reason=r.reason, error=errors.get(r.key))
        for r in plan.removals
    ]
    return GcReport(
        dry_run=dry_run, items=items[:_SHOWN_MAX], bytes=sum(item.bytes for item in items if item.error is None)
    )
