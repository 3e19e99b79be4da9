"""Nodes as placement wants them, from what a replica knows of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, overload

from dsec.cluster.members.nodes import NodeView
from dsec.cluster.placement import MAIN_POOL, Ask, Burst, Candidate, Overlay, pool_of
from dsec.wire.records import NodeLoad

_HEARTBEAT_LAG_S: Final = 1.0


class Candidates(Sequence[Candidate]):
    """Made as they are looked at: of many nodes, a create looks at a few."""

    def __init__(
        self, views: Sequence[NodeView], ask: Ask, overlay: Overlay, now: float, bursts: Sequence[Burst]
    ) -> None:
        self._views = views
        self._bursts = bursts
        self._ask = ask
        self._overlay = overlay
        self._now = now
        self._made: dict[int, Candidate] = {}

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        found = self._made.get(place)
        if found is None:
            view = self._views[place]
            # What a heartbeat tells is a moment old when it comes.
            self._overlay.seen(view.id, view.loaded_at - _HEARTBEAT_LAG_S)
            found = self._made[place] = _candidate(view, self._ask, self._now, self._bursts)
        return found


def _candidate(view: NodeView, ask: Ask, now: float, bursts: Sequence[Burst]) -> Candidate:
    card, load = view.card, view.load or NodeLoad()
    assert card is not None
    used = {"sandboxes": load.sandboxes, "memory_bytes": load.memory_promised_bytes}
    room = {"sandboxes": load.sandboxes_max, "memory_bytes": load.memory_promised_bytes_max}
    return Candidate(
        view.id,
        substrates=card.substrates,
        networks=card.networks.get(ask.substrate, ()),
        features=card.features.get(ask.substrate, ()),
        labels=card.labels,
        devices=card.devices,
        images=card.images,
        pool=pool_of(card.labels, bursts) if bursts else MAIN_POOL,
        closed=(closed := view.closed(now)),
        remedy=None if closed is None else view.remedy(now),
        used=used,
        room={name: most for name, most in room.items() if most},  # 0: it has not said
    )
