"""What replicas have leased of one cap: the record that they share, and when a slice of it may be taken back.

Pure. A slice is charged in full until its replica says otherwise, or has given no sign of life for so long that what it
admitted is counted among the sandboxes that live. Nothing here is a time of the clock, which may step: everybody
judges by how long they have seen a slice unchanged themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from dsec.core.limits import SLICE_GRACE_S, SLICE_TTL_S

FRACTION: Final = 100  # a slice is at most this part of what is left, unless one create needs more
Amounts = dict[str, int]


class Slice(msgspec.Struct, frozen=True):
    """`sign` changes with every sign of life."""

    amounts: Amounts
    sign: int


class Shared(msgspec.Struct, frozen=True):
    """Of one project: replica → its slice."""

    slices: dict[str, Slice] = {}


class Watched:
    """Since when one replica has seen the others' slices as they are."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], tuple[int, float]] = {}

    def silent(self, project: str, shared: Shared, now: float) -> set[str]:
        """Replicas whose slice may be taken back."""
        found = set()
        for replica, slice in shared.slices.items():
            sign, since = self._since.get((project, replica), (None, now))
            if sign != slice.sign:
                self._since[(project, replica)] = (slice.sign, now)
            elif now - since > SLICE_TTL_S + SLICE_GRACE_S:
                found.add(replica)
        for key in [key for key in self._since if key[0] == project and key[1] not in shared.slices]:
            del self._since[key]
        return found


def total(slices: Iterable[Slice], cap: str) -> int:
    return sum(slice.amounts.get(cap, 0) for slice in slices)


def portion(need: int, left: int) -> int | None:
    """How much to lease when `left` is left; None: not even what is needed."""
    return None if need > left else max(need, left // FRACTION)


def added(one: Mapping[str, int], other: Mapping[str, int]) -> Amounts:
    return {cap: one.get(cap, 0) + other.get(cap, 0) for cap in {**one, **other}}
