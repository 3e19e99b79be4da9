"""Where the members of a group go: all to one node, where links cost least, else to few. Pure, as `placement`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsec.cluster.placement import MAIN_POOL, Ask, Burst, Candidate, Overlay, choose, cost, why_not
from dsec.core.ids import NodeId
from dsec.wire.peers import RELAYS


@dataclass
class Spread:
    """`nodes_for`: all nodes as candidates for what has the substrate of an ask. `refused`: by whom each member was,
    before."""

    asks: Mapping[str, Ask]
    nodes_for: Callable[[Ask], Sequence[Candidate]]
    overlay: Overlay
    rng: random.Random
    refused: Mapping[str, Collection[NodeId]] = field(default_factory=dict)
    bursts: Sequence[Burst] = ()
    linked: bool = False
    _known: dict[str, Sequence[Candidate]] = field(default_factory=dict)  # substrate → nodes for it
    _planned: Overlay = field(init=False)

    def __post_init__(self) -> None:
        self._planned = _Upon(self.overlay)

    def places(self) -> dict[str, NodeId] | str:
        """Of each member, on one node where that can be; or one that no node takes beside the others."""
        node = self.whole()
        return self.several() if node is None else dict.fromkeys(self.asks, node)

    def whole(self) -> NodeId | None:
        """One node that takes all. None: there is no such node, or some of them are to be apart."""
        if any(found > 1 for group, found in self._of_groups().items() if group in self._apart()):
            return None
        first = next(iter(self.asks.values()))
        amounts: Counter[str] = Counter()
        for ask in self.asks.values():
            amounts.update(ask.amounts)
        together = replace(
            first, amounts=amounts, features=frozenset(), labels={}, devices=frozenset(), group=None, node=None
        )
        able = self._nodes_for_each()
        nodes = [node for node in self._nodes_for(together) if node.id in able]
        found = choose(nodes, together, overlay=self.overlay, rng=self.rng, bursts=self.bursts)
        return None if found is None else found.id

    def several(self) -> dict[str, NodeId] | str:
        """Of each member; or one that no node takes beside the others."""
        planned = self._planned
        places: dict[str, NodeId] = {}
        for name in self._hardest_first():
            node = self._place(name, planned, set(places.values()))
            if node is None:
                return name
            planned.add(node, self.asks[name], 0.0)
            places[name] = node
        return {name: places[name] for name in self.asks}

    def why_not(self, name: str) -> tuple[Sequence[Candidate], Ask, Overlay]:
        """What `refusals` needs to say so of the one that `several` gave: beside the others."""
        ask = self._ask(name)
        return self._nodes_for(ask), ask, self._planned

    def _place(self, name: str, planned: Overlay, mine: Collection[NodeId]) -> NodeId | None:
        ask, tried = self._ask(name), self.refused.get(name, ())
        nodes = self._nodes_for(ask)
        if ask.group is None:
            near = [node for node in nodes if node.id in mine and node.id not in tried and node.pool == MAIN_POOL]
            fits = [node for node in near if why_not(node, ask, planned) is None]
            if fits:
                return min(fits, key=lambda node: cost(node, ask, planned)).id
        found = choose(nodes, ask, overlay=planned, rng=self.rng, tried=tried, bursts=self.bursts)
        return None if found is None else found.id

    def _nodes_for(self, ask: Ask) -> Sequence[Candidate]:
        if ask.substrate not in self._known:
            self._known[ask.substrate] = self.nodes_for(ask)
        return self._known[ask.substrate]

    def _ask(self, name: str) -> Ask:
        ask = self.asks[name]
        # A node refuses one that is not to be apart, too, when the other is.
        features = ask.features | {RELAYS} if self.linked else ask.features
        return replace(ask, features=features, apart=ask.group in self._apart())

    def _hardest_first(self) -> list[str]:
        def key(name: str) -> tuple[int, list[int]]:
            ask = self._ask(name)
            fits = sum(why_not(node, ask, self.overlay) is None for node in self._nodes_for(ask))
            return fits, [-ask.amounts.get(dimension, 0) for dimension in ("memory_bytes", "cpu")]

        return sorted(self.asks, key=key)

    def _of_groups(self) -> Counter[str]:
        return Counter(ask.group for ask in self.asks.values() if ask.group is not None)

    def _apart(self) -> set[str | None]:
        return {ask.group for ask in self.asks.values() if ask.apart}

    def _nodes_for_each(self) -> set[NodeId]:
        """Those that could take any of the members, were it alone."""
        refused = {node for nodes in self.refused.values() for node in nodes}
        able: set[NodeId] | None = None
        for ask in self.asks.values():
            fits = {node.id for node in self._nodes_for(ask) if why_not(node, ask, self.overlay) is None}
            able = fits if able is None else able & fits
            if not able:
                return set()
        return (able or set()) - refused


class _Upon(Overlay):
    """What is planned, upon what was placed."""

    __slots__ = ("_below",)

    def __init__(self, below: Overlay) -> None:
        super().__init__()
        self._below = below

    def of(self, node: NodeId, dimension: str) -> int:
        return super().of(node, dimension) + self._below.of(node, dimension)

    def in_group(self, node: NodeId, group: str) -> int:
        return super().in_group(node, group) + self._below.in_group(node, group)
