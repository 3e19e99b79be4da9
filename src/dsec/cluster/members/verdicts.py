"""Which nodes are to be declared lost: a pure decision (ruling 30)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dsec.cluster.members.nodes import NodeState, NodeView
from dsec.core.ids import NodeId

# A node whose card has ended joins again within this if it only was slow, or the engine was.
GRACE_S: Final = 10.0
# More of them away together than this is an outage of the engine, or of the network between, and not of nodes.
OUTAGE_FRACTION: Final = 0.2


@dataclass(frozen=True, slots=True)
class Verdicts:
    lost: tuple[NodeId, ...] = ()
    frozen: bool = False  # so many are away that none is declared lost


def verdicts(nodes: Sequence[NodeView], *, now: float, engine_since: float | None) -> Verdicts:
    """`engine_since`: since when the engine has been there without a break; None: it is away."""
    counted = [node for node in nodes if node.state(now) not in (NodeState.RETIRED, NodeState.LOST)]
    away = [node for node in counted if node.state(now) == NodeState.AWAY and node.away_since is not None]
    if not away:
        return Verdicts()
    # One node alone may always be lost: in a small cluster it is more than the fraction.
    if engine_since is None or len(away) > max(1, OUTAGE_FRACTION * len(counted)):
        return Verdicts(frozen=True)
    over = [node.id for node in away if now - max(node.away_since or 0.0, engine_since) >= GRACE_S]
    return Verdicts(tuple(sorted(over)))
