"""Placement alone, in virtual time: a day of creates and ends on many nodes, chosen as replicas choose.

Replicas know loads by heartbeats of a second ago and by what they placed themselves, as in a cluster; the oracle knows
every load at every moment and looks at all nodes. What is told is how full the fullest node is beside the mean.
"""

from __future__ import annotations

import heapq
import math
import random
from typing import Any, Final

from dsec.cluster.placement import Ask, Candidate, Overlay, choose
from dsec.core.ids import NodeId, new_node_id

_BEAT_S: Final = 1.0
_REPLICAS: Final = 4
_SCALE: Final = 20  # one sandbox here stands for so many: a day has millions
_ASK: Final = Ask(substrate="container", amounts={"sandboxes": 1})


def day(nodes: int, live: int, *, hours: float, seed: int = 1) -> dict[str, Any]:
    """`live` in the mean; by the hour half and once more as many come, and each hour's first minute is a burst."""
    return {
        "nodes": nodes,
        "live": live,
        "hours": hours,
        "a_sandbox_stands_for": _SCALE,
        "as_replicas_choose": _Run(nodes, live // _SCALE, hours * 3600, seed).run(oracle=False),
        "oracle": _Run(nodes, live // _SCALE, hours * 3600, seed).run(oracle=True),
    }


class _Run:
    def __init__(self, nodes: int, live: int, until_s: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._room = 3 * live // nodes
        self._ids = [new_node_id() for _ in range(nodes)]
        self._used = dict.fromkeys(self._ids, 0)
        self._mean_s = 1_520.0
        self._rate = live / self._mean_s
        self._until_s = until_s
        self._ends: list[tuple[float, NodeId]] = []
        for number in range(live):
            self._place(self._ids[number % nodes], 0.0)

    def _place(self, node: NodeId, now: float) -> None:
        self._used[node] += 1
        heapq.heappush(self._ends, (now + self._rng.expovariate(1 / self._mean_s), node))

    def run(self, *, oracle: bool) -> dict[str, float]:
        replicas = [_Replica(self._ids, self._room, self._rng) for _ in range(_REPLICAS)]
        now, beat, turn, fullest, placed = 0.0, 0.0, 0, [], 0
        while now < self._until_s:
            now += self._rng.expovariate(self._rate_at(now))
            while self._ends and self._ends[0][0] <= now:
                self._used[heapq.heappop(self._ends)[1]] -= 1
            if now - beat >= _BEAT_S:
                beat = now
                for replica in replicas:
                    replica.hear(self._used, now)
                mean = sum(self._used.values()) / len(self._used)
                fullest.append(max(self._used.values()) / mean if mean else 1.0)
            if oracle:
                node = min(self._ids, key=self._used.__getitem__)
            else:
                turn += 1
                node = replicas[turn % _REPLICAS].choose(now)
            self._place(node, now)
            placed += 1
        fullest.sort()
        return {
            "placed": placed,
            "fullest_beside_mean_p50": round(fullest[len(fullest) // 2], 4),
            "fullest_beside_mean_p99": round(fullest[int(len(fullest) * 0.99)], 4),
        }

    def _rate_at(self, now: float) -> float:
        wave = 1 + 0.5 * math.sin(2 * math.pi * now / 86_400)
        return self._rate * wave * (8 if now % 3600 < 60 else 1)


class _Replica:
    def __init__(self, ids: list[NodeId], room: int, rng: random.Random) -> None:
        self._rng = rng
        self._overlay = Overlay()
        self._nodes = {
            id: Candidate(id, substrates=("container",), used={"sandboxes": 0}, room={"sandboxes": room}) for id in ids
        }

    def hear(self, used: dict[NodeId, int], now: float) -> None:
        for id, candidate in self._nodes.items():
            candidate.used = {"sandboxes": used[id]}
            self._overlay.seen(id, now)

    def choose(self, now: float) -> NodeId:
        found = choose(list(self._nodes.values()), _ASK, overlay=self._overlay, rng=self._rng)
        assert found is not None
        self._overlay.add(found.id, _ASK, now)
        return found.id
