"""Caps, counted at every project above a sandbox and never exceeded, however many replicas admit creates.

What sandboxes that live have is asked of the nodes; what is not among that yet is in slices, which replicas lease of
what is left (`slices`). A create is charged to its replica's slice at each capped project. Once its outcome is known
it is among what lives, or is not there: then it is no longer pending, and the slice is not filled up again but by a
lease that has counted what lives anew.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import CapacityError, InvalidArgumentError, QuotaError, UnavailableError
from dsec.core.limits import (
    ADMISSIONS_WAITING_MAX,
    IAM_RETRIES_MAX,
    RATE_WINDOW_S,
    SLICE_GRACE_S,
    SLICE_TTL_S,
)
from dsec.core.spec import SandboxSpec
from dsec.iam.secrets import new_id
from dsec.iam.slices import Amounts, Shared, Slice, Watched, added, portion, total
from dsec.wire.iam import CAPS, Caps, CapUse, Quota, amounts_of

RATE: Final = "creates_per_s"
_RETRY_S: Final = 1.0
_SCALE: Final = {"cpu": 1000}  # whole thousandths inside, cores outside

Holdings = Callable[[Sequence[str]], Awaitable[dict[str, dict[str, int]]]]
"""Project → cap → what the sandboxes of it and below that live now have; all whose creation anybody was told of."""


class SliceStore(Protocol):
    """One record for each capped project, changed by compare-and-set."""

    async def read(self, project: str) -> tuple[int, Shared]:
        """Its revision, 0 when it is not there."""
        ...

    async def write(self, project: str, shared: Shared, *, expect: int) -> int | None:
        """The new revision; None when it is not at `expect` any more."""
        ...

    async def remove(self, project: str) -> None: ...


class LocalSlices:
    """For replicas of one process. What it holds ends with the process, and so do the creates that it stands for."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, Shared]] = {}
        self._revision = 0  # of all of them together: one that was removed has none again

    async def read(self, project: str) -> tuple[int, Shared]:
        return self._records.get(project, (0, Shared()))

    async def write(self, project: str, shared: Shared, *, expect: int) -> int | None:
        if self._records.get(project, (0, Shared()))[0] != expect:
            return None
        self._revision += 1
        self._records[project] = (self._revision, shared)
        return self._revision

    async def remove(self, project: str) -> None:
        self._records.pop(project, None)


@dataclass(slots=True)
class _Account:
    """Of one project, here. `granted` is what the shared record says of us; `pending` and `spent` are used of it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    granted: Amounts = field(default_factory=dict)
    pending: Amounts = field(default_factory=dict)
    spent: Amounts = field(default_factory=dict)
    leased_at: float = 0.0
    waiting: int = 0

    def spare(self, cap: str) -> int:
        return self.granted.get(cap, 0) - self.pending.get(cap, 0) - self.spent.get(cap, 0)

    def pend(self, amounts: Amounts) -> None:
        self.pending = added(self.pending, amounts)

    def settle(self, amounts: Amounts) -> None:
        self.pending = added(self.pending, {cap: -amount for cap, amount in amounts.items()})
        self.spent = added(self.spent, amounts)


class Charge:
    """What one create was charged, or several alike. Each ends by one of `settle` and `leave`, once."""

    __slots__ = ("_count", "_ledger", "_parts")

    def __init__(self, ledger: Ledger, parts: list[tuple[str, Amounts]], count: int = 1) -> None:
        """`parts`: of one of them."""
        self._ledger = ledger
        self._parts = parts
        self._count = count

    def settle(self, count: int | None = None) -> None:
        """Of so many, or all that are left: the sandbox is among those that live, or there is none."""
        for project, amounts in self._take(count):
            self._ledger.settle(project, amounts)

    def leave(self, count: int | None = None) -> None:
        """Nobody knows: it may still come. It counts until it is among those that live, if it is."""
        if parts := self._take(count):
            self._ledger.leave(parts)

    def _take(self, count: int | None) -> list[tuple[str, Amounts]]:
        taken = self._count if count is None else min(count, self._count)
        self._count -= taken
        if not taken:
            return []
        return [(project, {cap: one * taken for cap, one in amounts.items()}) for project, amounts in self._parts]


class Ledger:
    """One replica's.

    charge = await ledger.take(rules.quotas, spec)      # raises QuotaError
    try: create it
    finally: charge.settle()
    """

    def __init__(
        self,
        store: SliceStore,
        holdings: Holdings,
        *,
        clock: Clock | None = None,
        unknown_s: float = SLICE_GRACE_S,  # until a create without an answer is among the holdings, if ever
    ) -> None:
        self._unknown_s = unknown_s
        self._store = store
        self._holdings = holdings
        self._clock = clock or SystemClock()
        self._replica = new_id("rep")
        self._accounts: dict[str, _Account] = {}
        self._watched = Watched()
        self._later: list[tuple[float, int, list[tuple[str, Amounts]]]] = []
        self._number = 0
        self._tending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def take(self, quotas: Iterable[tuple[str, Quota]], spec: SandboxSpec, *, count: int = 1) -> Charge:
        """All of it at each of the projects, or nothing; `count` times what the spec asks for. Raises QuotaError,
        CapacityError, UnavailableError; InvalidArgumentError where disk is capped, and the sandbox has no limit."""
        asked = {cap: amount * count for cap, amount in (amounts_of(spec) | _rates(spec)).items()}
        parts: list[tuple[str, Amounts]] = []
        try:
            for project, quota in quotas:
                caps = caps_of(quota)
                _check_disk(spec, project, caps)
                need = {cap: asked[cap] for cap in caps if asked.get(cap)}
                if need:
                    await self._take_of(project, caps, need)
                    parts.append((project, need))
        except BaseException:
            for project, amounts in parts:
                self._accounts[project].pend({cap: -amount for cap, amount in amounts.items()})
            raise
        lasting = []
        for project, amounts in parts:
            rates = {cap: amount for cap, amount in amounts.items() if cap.endswith(RATE)}
            if rates:
                self.settle_later([(project, rates)], RATE_WINDOW_S)
            lasting.append((project, {cap: amount // count for cap, amount in amounts.items() if cap not in rates}))
        self._tend_soon()
        return Charge(self, lasting, count)

    async def uses(self, quotas: Iterable[tuple[str, Quota]]) -> list[CapUse]:
        """Every cap of these projects, with what there is of it."""
        self._settle_due()  # creations of more than a second ago count for nothing
        found = []
        bound = [(project, caps_of(quota)) for project, quota in quotas]
        held = await self._holdings([project for project, _ in bound]) if bound else {}
        for project, caps in bound:
            _, shared = await self._store.read(project)
            own = self._accounts.get(project)
            others = [slice for replica, slice in shared.slices.items() if replica != self._replica]
            for cap, limit in caps.items():
                reserved = total(others, cap) + (own.pending.get(cap, 0) if own is not None else 0)
                found.append(_use(project, cap, limit, held.get(project, {}).get(cap, 0), reserved))
        return found

    def settle(self, project: str, amounts: Amounts) -> None:
        account = self._accounts.get(project)
        if account is not None:
            account.settle(amounts)

    def settle_later(self, parts: list[tuple[str, Amounts]], after_s: float) -> None:
        self._number += 1
        heapq.heappush(self._later, (self._clock.monotonic_s() + after_s, self._number, parts))

    def leave(self, parts: list[tuple[str, Amounts]]) -> None:
        self.settle_later(parts, self._unknown_s)

    async def forget(self, project: str) -> None:
        """It is removed: what replicas have leased of it is nothing to a later one of this path."""
        await self._store.remove(project)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)

    # -- leasing -----------------------------------------------------------------------------------

    async def _take_of(self, project: str, caps: Amounts, need: Amounts) -> None:
        account = self._accounts.setdefault(project, _Account())
        if account.waiting >= ADMISSIONS_WAITING_MAX:
            raise CapacityError(f"{ADMISSIONS_WAITING_MAX} creates wait for {project}", retry_after_s=_RETRY_S)
        account.waiting += 1
        try:
            async with account.lock:
                self._settle_due()
                if self._is_void(account) or any(account.spare(cap) < amount for cap, amount in need.items()):
                    await self._lease(project, account, caps, need)
                account.pend(need)
        finally:
            account.waiting -= 1

    def _is_void(self, account: _Account) -> bool:
        """What has not been used in time may be somebody else's by now."""
        return self._clock.monotonic_s() - account.leased_at >= SLICE_TTL_S

    async def _lease(self, project: str, account: _Account, caps: Amounts, need: Amounts) -> None:
        """A slice with room for `need`. Raises QuotaError, and then nothing has changed."""
        for _ in range(IAM_RETRIES_MAX):
            began = self._clock.monotonic_s()
            revision, shared = await self._store.read(project)
            spent = dict(account.spent)
            # After the record: what another replica no longer holds in it is counted among this.
            held = (await self._holdings([project])).get(project, {})
            self._settle_due()
            silent = self._watched.silent(project, shared, self._clock.monotonic_s()) - {self._replica}
            others = {
                replica: slice
                for replica, slice in shared.slices.items()
                if replica != self._replica and replica not in silent
            }
            # What was settled while we asked may be among the answer, or not.
            own = added(account.pending, _less(account.spent, spent))
            granted = dict(own)
            for cap, amount in need.items():
                taken = total(others.values(), cap) + own.get(cap, 0)
                lives = 0 if cap.endswith(RATE) else held.get(cap, 0)
                more = portion(amount, caps[cap] - lives - taken)
                if more is None:
                    raise _refused(project, cap, limit=caps[cap], used=lives, reserved=taken, asked=amount)
                granted[cap] = own.get(cap, 0) + more
            others[self._replica] = Slice(granted, self._sign(shared))
            if await self._written(project, account, Shared(others), revision) is None:
                continue
            account.granted = granted
            # Meanwhile more may have been settled: what was pending then is charged, and is not to be had again.
            account.spent = _less(account.spent, spent)
            account.leased_at = began
            return
        raise UnavailableError("the quota is being changed by many at once", retry_after_s=_RETRY_S)

    async def _written(self, project: str, account: _Account, shared: Shared, revision: int) -> int | None:
        try:
            return await self._store.write(project, shared, expect=revision)
        except BaseException:
            account.leased_at = -math.inf  # nobody knows what the record says of us: nothing of it is used any more
            raise

    def _sign(self, shared: Shared) -> int:
        known = shared.slices.get(self._replica)
        return 1 if known is None else known.sign + 1

    # -- what time brings --------------------------------------------------------------------------

    def _settle_due(self) -> None:
        now = self._clock.monotonic_s()
        while self._later and self._later[0][0] <= now:
            for project, amounts in heapq.heappop(self._later)[2]:
                self.settle(project, amounts)

    async def tend(self) -> None:
        """Shrinks our slices to what is pending, and so shows that we live. Anything but QuotaError may be raised."""
        self._settle_due()
        for project, account in list(self._accounts.items()):
            async with account.lock:
                if self._accounts.get(project) is not account:
                    continue
                await self._shrink(project, account)
                if not account.granted and not account.waiting:
                    del self._accounts[project]

    async def _shrink(self, project: str, account: _Account) -> None:
        spent = account.spent
        kept = account.pending if self._is_void(account) else _less(account.granted, spent)
        kept = {cap: amount for cap, amount in kept.items() if amount > 0}
        if kept == account.granted and not self._is_void(account):
            return
        revision, shared = await self._store.read(project)
        slices = {replica: slice for replica, slice in shared.slices.items() if replica != self._replica}
        if kept:
            slices[self._replica] = Slice(kept, self._sign(shared))
        # Who reads the record from here on asks after that what lives, and what we have spent is among it.
        if await self._written(project, account, Shared(slices), revision) is not None:
            account.granted, account.spent = kept, _less(account.spent, spent)

    def _tend_soon(self) -> None:
        if self._timer is None and not self._closed and self._accounts:
            self._timer = asyncio.get_running_loop().call_later(SLICE_TTL_S / 3, self._begin_tending)

    def _begin_tending(self) -> None:
        self._timer = None
        if self._tending is None or self._tending.done():
            self._tending = asyncio.get_running_loop().create_task(self._tend_quietly())
        self._tending.add_done_callback(lambda _: self._tend_soon())

    async def _tend_quietly(self) -> None:
        try:
            await self.tend()
        except (CapacityError, UnavailableError):
            return  # the next turn comes


def _less(one: Amounts, other: Amounts) -> Amounts:
    return {cap: amount - other.get(cap, 0) for cap, amount in one.items()}


def caps_of(quota: Quota) -> Amounts:
    """Cap → its limit, as whole numbers."""
    found: Amounts = {}
    parts: list[tuple[str, Caps]] = [("", quota), *((f"{name}.", caps) for name, caps in quota.substrates.items())]
    for prefix, caps in parts:
        for name in CAPS:
            limit: Any = getattr(caps, name)
            if limit is not None:
                found[prefix + name] = int(limit * _SCALE.get(name, 1))
    return found


def _rates(spec: SandboxSpec) -> Amounts:
    return {RATE: 1, f"{spec.substrate}.{RATE}": 1}


def _check_disk(spec: SandboxSpec, project: str, caps: Amounts) -> None:
    if spec.disk_bytes is None and ("disk_bytes" in caps or f"{spec.substrate}.disk_bytes" in caps):
        raise InvalidArgumentError(
            f"{project} has a cap on disk, so a sandbox must say how much it may write",
            hint='such as disk="10GiB"',
            detail={"project": project, "cap": "disk_bytes"},
        )


def _use(project: str, cap: str, limit: int, used: int, reserved: int) -> CapUse:
    scale = _SCALE.get(cap.rpartition(".")[2], 1)
    return CapUse(project=project, cap=cap, limit=limit / scale, used=used / scale, reserved=reserved / scale)


def _refused(project: str, cap: str, *, limit: int, used: int, reserved: int, asked: int) -> QuotaError:
    scale = _SCALE.get(cap.rpartition(".")[2], 1)
    given = {"limit": limit, "used": used, "reserved": reserved, "asked": asked}
    shown = {name: value / scale for name, value in given.items()}
    rate = cap.endswith(RATE)
    fits = used + asked <= limit  # without what is only reserved
    others = f" and {shown['reserved']:g} under way" if reserved else ""
    return QuotaError(
        f"{project} has a cap of {shown['limit']:g} on {cap}: {shown['used']:g} are used{others}, "
        f"and {shown['asked']:g} more were asked for",
        hint="try again in a moment"
        if rate or fits
        else f"destroy some, or have the cap raised: dsec quota set {project}",
        retry_after_s=_RETRY_S if rate or fits else None,
        detail={"project": project, "cap": cap, **shown},
    )
