"""Where a new sandbox goes: which nodes can take it, which of a few is the least loaded, and why the others cannot.

Pure: nodes as they are known now, what is asked, and a source of randomness go in; a choice comes out. The node that is
chosen decides last, and what it refuses is placed again, on another one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dsec.core.ids import NodeId
from dsec.core.limits import CREATES_TOGETHER_MAX
from dsec.core.spec import SandboxSpec
from dsec.wire.iam import amounts_of
from dsec.wire.node import reaches

SAMPLE: Final = 4  # nodes that are compared: with figures of a moment ago, the least loaded of all gets every create
DRAWS: Final = 3  # times as many are drawn to find them, before all are looked at
IMAGE_WORTH: Final = 0.15  # of a node's fullness: what it is worth that the environment is there already
TOGETHER_PART: Final = 64  # of a node's room, at most that part is given away at once
GROUP_COST: Final = 0.25  # for each sandbox of the same group that is there: they spread
MAIN_POOL: Final = ""
_DIMENSIONS: Final = ("sandboxes", "memory_bytes", "cpu", "disk_bytes")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one sandbox needs of a node."""

    substrate: str
    amounts: Mapping[str, int]  # dimension → how much of it
    network: str = "none"
    features: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None  # name of its environment
    group: str | None = None  # those of one group spread over nodes
    apart: bool = False  # no two of the group on one node
    node: str | None = None  # only this one
    devices: frozenset[str] = frozenset()  # kinds
    project: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)  # labels of the sandbox


@dataclass(slots=True)
class Candidate:
    """A node as it is known now. `used` and `room`: dimension → how much; what has no room stated is not bounded."""

    id: NodeId
    substrates: Collection[str] = ()
    networks: Collection[str] = ("none",)
    features: Collection[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: Collection[str] = ()
    images: Collection[str] = ()
    pool: str = MAIN_POOL
    closed: str | None = None  # why it takes nothing new: cordoned, suspect, its disk is full
    remedy: str | None = None  # what would open it
    used: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)  # of group: how many are there


@dataclass(frozen=True, slots=True)
class Refusal:
    """`code`: node, closed, substrate, network, feature, device, label, size, apart, pool, or the dimension that is
    full."""

    code: str
    text: str
    hint: str | None = None
    ordered: bool = False  # by somebody, who alone takes it back


@dataclass(frozen=True, slots=True)
class Burst:
    """Above this fullness of the main pool, what has its environment in the pool already may go there."""

    pool: str
    above: float
    substrates: frozenset[str] | None = None  # only these
    labels: Mapping[str, str] = field(default_factory=dict)  # only sandboxes that have them
    projects: tuple[str, ...] = ()  # only these and those below; none: all

    def may_take(self, ask: Ask) -> bool:
        """Whatever the moment."""
        return (
            (self.substrates is None or ask.substrate in self.substrates)
            and all(ask.marks.get(name) == value for name, value in self.labels.items())
            and (not self.projects or any(reaches(project, ask.project) for project in self.projects))
        )

    def takes(self, ask: Ask, fullness: float) -> bool:
        return fullness >= self.above and self.may_take(ask)


POOL_LABEL: Final = "pool"  # of nodes


def pool_of(labels: Mapping[str, str], bursts: Iterable[Burst]) -> str:
    """A label makes a pool of its own only where a rule sends something there."""
    name = labels.get(POOL_LABEL, MAIN_POOL)
    return name if any(burst.pool == name for burst in bursts) else MAIN_POOL


class Overlay:
    """What one replica has placed and no node has told of yet. Nodes tell of their load with every reply."""

    __slots__ = ("_placed",)

    def __init__(self) -> None:
        self._placed: dict[NodeId, list[tuple[float, Mapping[str, int], str | None]]] = {}

    def add(self, node: NodeId, ask: Ask, now: float) -> None:
        self._placed.setdefault(node, []).append((now, ask.amounts, ask.group))

    def seen(self, node: NodeId, asked_at: float) -> None:
        """The node has told of its load as of `asked_at`: what was placed by then is in it, or was refused."""
        left = [item for item in self._placed.get(node, ()) if item[0] > asked_at]
        if left:
            self._placed[node] = left
        else:
            self._placed.pop(node, None)

    def of(self, node: NodeId, dimension: str) -> int:
        placed = self._placed.get(node)
        return sum(amounts.get(dimension, 0) for _, amounts, _ in placed) if placed else 0

    def in_group(self, node: NodeId, group: str) -> int:
        return sum(placed == group for _, _, placed in self._placed.get(node, ()))

    def __len__(self) -> int:
        return sum(map(len, self._placed.values()))


def ask_of(spec: SandboxSpec, project: str = "") -> Ask:
    amounts = amounts_of(spec)
    place = spec.place
    features = {
        name for name, wanted in (("disk", spec.disk_bytes is not None), ("volumes", bool(spec.volumes))) if wanted
    }
    return Ask(
        substrate=str(spec.substrate),
        amounts={name: amounts[name] for name in _DIMENSIONS if amounts[name]},
        network=str(spec.network),
        features=frozenset(features if place is None else {*features, *place.features}),
        labels={} if place is None else place.labels,
        image=spec.environment.base,
        group=None if place is None else place.group,
        apart=place is not None and place.apart,
        node=None if place is None else place.node,
        devices=frozenset() if place is None else frozenset(place.devices),
        project=project,
        marks=spec.labels,
    )


def shape_of(spec: SandboxSpec) -> object:
    """Equal for those that any node takes or refuses alike, but for their groups."""
    ask = ask_of(spec)
    return (
        ask.substrate, ask.network, ask.features, ask.image, ask.group, ask.apart, ask.node,
        frozenset(ask.amounts.items()), frozenset(ask.labels.items()), ask.devices, frozenset(ask.marks.items()),
    )  # fmt: skip


def why_not(node: Candidate, ask: Ask, overlay: Overlay) -> Refusal | None:
    """None: it can take it. The lasting reasons come before those that pass."""
    if ask.node is not None and node.id != ask.node:
        return Refusal("node", f"another node was asked for: {ask.node}")
    if ask.substrate not in node.substrates:
        return Refusal("substrate", f"it does not offer {ask.substrate}")
    if ask.network not in node.networks:
        return Refusal("network", f"its {ask.substrate} sandboxes do not have network mode {ask.network}")
    if not ask.features.issubset(node.features):
        missing = ", ".join(sorted(ask.features.difference(node.features)))
        return Refusal("feature", f"it lacks {missing}")
    if lacking := sorted(ask.devices.difference(node.devices)):
        return Refusal("device", f"it has no device of kind {', '.join(lacking)}")
    for name, value in ask.labels.items():
        if node.labels.get(name) != value:
            return Refusal("label", f"its label {name} is {node.labels.get(name)!r}, not {value!r}")
    for dimension, amount in ask.amounts.items():
        if amount > node.room.get(dimension, amount):
            return Refusal("size", f"{amount} {dimension} are more than the {node.room[dimension]} that it has at all")
    if node.closed is not None:
        return Refusal("closed", node.closed, node.remedy)
    if ask.apart and ask.group is not None and _of_group(node, ask.group, overlay):
        return Refusal("apart", f"one of the group {ask.group!r} is there already")
    for dimension, amount in ask.amounts.items():
        room = node.room.get(dimension)
        if room is not None:
            used = node.used.get(dimension, 0) + overlay.of(node.id, dimension)
            if used + amount > room:
                return Refusal(dimension, f"{used} of {room} {dimension} are taken, and {amount} more were asked for")
    return None


def cost(node: Candidate, ask: Ask, overlay: Overlay) -> float:
    """How full it would be, in the fullest of the dimensions asked; its environment and its group count, too."""
    fullest = 0.0
    for dimension, amount in ask.amounts.items():
        room = node.room.get(dimension)
        if room:
            fullest = max(fullest, (node.used.get(dimension, 0) + overlay.of(node.id, dimension) + amount) / room)
    if ask.image is not None and ask.image not in node.images:
        fullest += IMAGE_WORTH
    if ask.group is not None:
        fullest += GROUP_COST * _of_group(node, ask.group, overlay)
    return fullest


def choose(
    nodes: Sequence[Candidate],
    ask: Ask,
    *,
    overlay: Overlay,
    rng: random.Random,
    tried: Collection[NodeId] = (),
    bursts: Iterable[Burst] = (),
) -> Candidate | None:
    """The best of a few that can take it, drawn at random. None: not one can, and `refusals` says why."""
    bursts = () if ask.node is not None else tuple(bursts)  # who names a node has chosen its pool
    main = [node for node in nodes if node.pool == MAIN_POOL] if bursts else nodes
    found = _draw(main, ask, overlay, rng, tried)
    if bursts and (found is None or cost(found, ask, overlay) >= min(burst.above for burst in bursts)):
        full = fullness([node for node in main if node.closed is None], ask, overlay)
        pools = {burst.pool for burst in bursts if burst.takes(ask, full)}
        spill = [node for node in nodes if node.pool in pools and node.pool != MAIN_POOL and ask.image in node.images]
        found = _draw(spill, ask, overlay, rng, tried) or found
    return found


def choose_all(
    nodes: Sequence[Candidate],
    ask: Ask,
    count: int,
    *,
    overlay: Overlay,
    now: float,
    rng: random.Random,
    bursts: Iterable[Burst] = (),
) -> list[tuple[NodeId, int]]:
    """Where so many alike go, a few together at each; it is in the overlay then. Fewer than `count` when no node takes
    more: `refusals` says why."""
    found: list[tuple[NodeId, int]] = []
    most = 1 if ask.group is not None else CREATES_TOGETHER_MAX  # those of a group spread
    while count:
        few = min(most, count)
        node = choose(nodes, _times(ask, few), overlay=overlay, rng=rng, bursts=bursts)
        if node is None:
            if few == 1:
                break
            most = few // 2
            continue
        few = min(few, _share(node, ask))
        overlay.add(node.id, _times(ask, few), now)
        found.append((node.id, few))
        count -= few
    return found


def _times(ask: Ask, count: int) -> Ask:
    return replace(ask, amounts={dimension: count * one for dimension, one in ask.amounts.items()})


def _share(node: Candidate, ask: Ask) -> int:
    """How many at once do not make it much fuller than the others."""
    parts = (node.room[name] // (TOGETHER_PART * one) for name, one in ask.amounts.items() if name in node.room)
    return max(min(parts, default=1), 1)


def _draw(
    nodes: Sequence[Candidate], ask: Ask, overlay: Overlay, rng: random.Random, tried: Collection[NodeId]
) -> Candidate | None:
    fits: list[Candidate] = []
    for place in _places(len(nodes), rng):
        node = nodes[place]
        if node.id not in tried and why_not(node, ask, overlay) is None:
            fits.append(node)
            if len(fits) == SAMPLE:
                break
    if not fits and len(nodes) > SAMPLE * DRAWS:
        every = [node for node in nodes if node.id not in tried and why_not(node, ask, overlay) is None]
        fits = every if len(every) <= SAMPLE else rng.sample(every, SAMPLE)
    return min(fits, key=lambda node: cost(node, ask, overlay), default=None)


def _places(count: int, rng: random.Random) -> Iterator[int]:
    """Different ones at random, SAMPLE * DRAWS at most, drawn as they are asked for."""
    if count <= SAMPLE * DRAWS:
        yield from rng.sample(range(count), count)
        return
    drawn: set[int] = set()
    while len(drawn) < SAMPLE * DRAWS:
        place = int(rng.random() * count)
        if place not in drawn:
            drawn.add(place)
            yield place


def fullness(nodes: Iterable[Candidate], ask: Ask, overlay: Overlay) -> float:
    """Of all of them together, in the fullest of the dimensions asked."""
    nodes = tuple(nodes)
    fullest = 0.0 if nodes else 1.0
    for dimension in ask.amounts:
        room = sum(node.room.get(dimension, 0) for node in nodes)
        used = sum(node.used.get(dimension, 0) + overlay.of(node.id, dimension) for node in nodes)
        if room:
            fullest = max(fullest, used / room)
    return fullest


def spilling(nodes: Sequence[Candidate], ask: Ask, overlay: Overlay, bursts: Iterable[Burst]) -> dict[NodeId, Refusal]:
    """Why nodes of other pools do not take it now, though they could."""
    full = fullness([node for node in nodes if node.pool == MAIN_POOL and node.closed is None], ask, overlay)
    rules = tuple(bursts)
    return {node.id: found for node in nodes if (found := _why_not_there(node, ask, full, rules)) is not None}


def _why_not_there(node: Candidate, ask: Ask, full: float, bursts: Sequence[Burst]) -> Refusal | None:
    if node.pool == MAIN_POOL or ask.node is not None:
        return None
    rules = [burst for burst in bursts if burst.pool == node.pool and burst.may_take(ask)]
    if not rules:
        return Refusal("pool", f"no rule sends this sandbox to the pool {node.pool!r}")
    if not any(burst.takes(ask, full) for burst in rules):
        above = min(burst.above for burst in rules)
        return Refusal(
            "pool", f"the pool {node.pool!r} takes it once the others are {above:.0%} full, and now they are {full:.0%}"
        )
    if ask.image not in node.images:
        return Refusal("pool", f"the pool {node.pool!r} takes what has its environment there, and {ask.image!r} is not")
    return None


def refusals(nodes: Iterable[Candidate], ask: Ask, overlay: Overlay) -> dict[NodeId, Refusal]:
    """Why each of those that cannot take it cannot."""
    return {node.id: found for node in nodes if (found := why_not(node, ask, overlay)) is not None}


def _of_group(node: Candidate, group: str, overlay: Overlay) -> int:
    return node.groups.get(group, 0) + overlay.in_group(node.id, group)
