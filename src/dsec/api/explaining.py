"""Why a create would be refused, or where it would go: pure, from what nodes and caps say."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from dsec.cluster.placement import (
    Ask,
    Burst,
    Candidate,
    Overlay,
    Refusal,
    ask_of,
    choose,
    fullness,
    pool_of,
    refusals,
    spilling,
)
from dsec.cluster.spreading import Spread
from dsec.core.ids import NodeId
from dsec.core.spec import SandboxSpec
from dsec.wire.iam import CapUse, amounts_of
from dsec.wire.plans import CapVerdict, CreatePlan, NodeVerdict

_NAMED_MAX: Final = 3
_SEED: Final = 0  # whoever asks twice is told the same
_THOUSANDTHS: Final = 1000
_RATE: Final = "creates_per_s"


def cap_verdict(use: CapUse, spec: SandboxSpec) -> CapVerdict:
    name = use.cap.rpartition(".")[2]
    asked = 1.0 if name == _RATE else float(amounts_of(spec)[name])
    if use.cap not in (name, f"{spec.substrate}.{name}"):
        asked = 0.0  # of another substrate
    if name == "cpu":
        asked /= _THOUSANDTHS
    fits = use.used + use.reserved + asked <= use.limit or asked == 0.0
    if name == "disk_bytes" and spec.disk_bytes is None and use.cap in (name, f"{spec.substrate}.{name}"):
        fits = False  # it must say how much
    return CapVerdict(
        project=use.project,
        cap=use.cap,
        limit=use.limit,
        used=use.used,
        reserved=use.reserved,
        asked=asked,
        fits=fits,
    )


def node_verdicts(
    plans: Sequence[CreatePlan],
    spec: SandboxSpec,
    project: str = "",
    bursts: Sequence[Burst] = (),
    closed: Mapping[NodeId, Refusal] | None = None,
) -> list[NodeVerdict]:
    """Placement proposes by what is known of the nodes, and each node has said what it would decide. `closed`: why
    nothing new goes to some, whatever they say, and whether or not they have said something."""
    closed = closed or {}
    ask, overlay = ask_of(spec, project), Overlay()
    nodes = {NodeId(plan.node): _candidate(plan, ask.image, bursts, closed.get(NodeId(plan.node))) for plan in plans}
    refused = spilling(list(nodes.values()), ask, overlay, bursts) | refusals(nodes.values(), ask, overlay)
    able = [nodes[NodeId(plan.node)] for plan in plans if plan.refused is None and NodeId(plan.node) not in refused]
    best = choose(able, ask, overlay=overlay, rng=random.Random(_SEED), bursts=bursts)
    found = []
    for plan in plans:
        node, why = nodes[NodeId(plan.node)], refused.get(NodeId(plan.node))
        reason = None if why is None else why.code
        text = None if why is None else why.text
        hint = None if why is None else why.hint
        if plan.refused is not None:  # the node knows more of itself than anybody else
            reason, text, hint = reason or plan.refused.code, plan.refused.message, plan.refused.hint
        found.append(
            NodeVerdict(
                node=plan.node,
                fits=reason is None,
                reason=reason,
                text=text,
                hint=hint,
                fullness=fullness([node], ask, overlay),
                chosen=best is node,
            )
        )
    for unasked in sorted(closed.keys() - nodes.keys()):
        gone = closed[unasked]
        found.append(NodeVerdict(node=unasked, fits=False, reason=gone.code, text=gone.text, hint=gone.hint))
    return found


def group_places(
    plans: Mapping[str, Sequence[CreatePlan]],
    specs: Mapping[str, SandboxSpec],
    project: str,
    bursts: Sequence[Burst] = (),
    closed: Mapping[NodeId, Refusal] | None = None,
    *,
    linked: bool,
) -> tuple[dict[str, str], str | None, str | None]:
    """Member → node; or the one that has none, and why. `plans`: what each node says of each member alone."""
    closed = closed or {}
    asks = {name: ask_of(spec, project) for name, spec in specs.items()}
    of_substrate = {asks[name].substrate: found for name, found in plans.items()}

    def nodes_for(ask: Ask) -> list[Candidate]:
        found = of_substrate[ask.substrate]
        return [_candidate(plan, ask.image, bursts, closed.get(NodeId(plan.node))) for plan in found]

    refused = {
        name: {NodeId(plan.node): plan.refused.message for plan in found if plan.refused is not None}
        for name, found in plans.items()
    }
    spread = Spread(asks, nodes_for, Overlay(), random.Random(_SEED), refused, bursts, linked)
    places = spread.places()
    if isinstance(places, dict):
        return {name: str(node) for name, node in places.items()}, None, None
    nodes, ask, beside = spread.why_not(places)
    reasons = spilling(nodes, ask, beside, bursts) | refusals(nodes, ask, beside)
    texts = {node: f"node {node}: {reason.text}" for node, reason in closed.items()}
    texts |= {node: reason.text for node, reason in reasons.items() if node not in closed} | refused[places]
    why = "; ".join(sorted(set(texts.values()))[:_NAMED_MAX])
    return {}, places, f"the group fits on no node, and over several there is none for {places}: {why}"


def caps_of_levels(levels: Iterable[Iterable[CapVerdict]]) -> list[CapVerdict]:
    """Of several, of whom some are asked for once others are there: creations a second are those of one level."""
    found = [list(level) for level in levels]
    lasting = [cap for level in found for cap in level if not cap.cap.endswith(_RATE)]
    rates: dict[tuple[str, str], CapVerdict] = {}
    for level in found:
        for cap in caps_together(cap for cap in level if cap.cap.endswith(_RATE)):
            most = rates.get((cap.project, cap.cap))
            if most is None or cap.asked > most.asked:
                rates[cap.project, cap.cap] = cap
    return [*caps_together(lasting), *rates.values()]


def caps_together(found: Iterable[CapVerdict]) -> list[CapVerdict]:
    """Of several that are asked for at once."""
    sums: dict[tuple[str, str], CapVerdict] = {}
    for one in found:
        before = sums.get((one.project, one.cap))
        asked = one.asked + (before.asked if before is not None else 0.0)
        # One that does not say how much it takes fits below no cap.
        fits = asked == 0.0 or one.used + one.reserved + asked <= one.limit
        says = one.fits or one.used + one.reserved + one.asked > one.limit
        fits = fits and says and (before is None or before.fits)
        sums[one.project, one.cap] = msgspec.structs.replace(one, asked=asked, fits=fits)
    return list(sums.values())


def _candidate(plan: CreatePlan, image: str | None, bursts: Sequence[Burst], closed: Refusal | None) -> Candidate:
    facts = plan.facts
    return Candidate(
        NodeId(plan.node),
        substrates=facts.substrates,
        networks=facts.networks,
        features=facts.features,
        labels=facts.labels,
        devices=facts.devices,
        pool=pool_of(facts.labels, bursts),
        closed=None if closed is None else closed.text,
        remedy=None if closed is None else closed.hint,
        images=(image,) if facts.has_environment and image is not None else (),
        used=facts.used,
        room=facts.room,
    )
