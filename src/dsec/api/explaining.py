"""Why a create would be refused, or where it would go: pure, from what nodes and caps say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from dsec.cluster.placement import (
    Burst,
    Candidate,
    Overlay,
    ask_of,
    choose,
    fullness,
    pool_of,
    refusals,
    spilling,
)
from dsec.core.ids import NodeId
from dsec.core.spec import SandboxSpec
from dsec.wire.iam import CapUse, amounts_of
from dsec.wire.plans import CapVerdict, CreatePlan, NodeVerdict

_SEED: Final = 0  # whoever asks twice is told the same
_THOUSANDTHS: Final = 1000


def cap_verdict(use: CapUse, spec: SandboxSpec) -> CapVerdict:
    name = use.cap.rpartition(".")[2]
    asked = 1.0 if name == "creates_per_s" else float(amounts_of(spec)[name])
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
    closed: Mapping[str, str] | None = None,
) -> list[NodeVerdict]:
    """Placement proposes by what is known of the nodes, and each node has said what it would decide. `closed`: why
    nothing new goes to some, whatever they say."""
    closed = closed or {}
    ask, overlay = ask_of(spec, project), Overlay()
    nodes = {plan.node: _candidate(plan, ask.image, bursts, closed.get(plan.node)) for plan in plans}
    refused = spilling(list(nodes.values()), ask, overlay, bursts) | refusals(nodes.values(), ask, overlay)
    able = [nodes[plan.node] for plan in plans if plan.refused is None and NodeId(plan.node) not in refused]
    best = choose(able, ask, overlay=overlay, rng=random.Random(_SEED), bursts=bursts)
    found = []
    for plan in plans:
        node, why = nodes[plan.node], refused.get(NodeId(plan.node))
        reason = None if why is None else why.code
        text = None if why is None else why.text
        hint: str | None = None
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
    return found


def _candidate(plan: CreatePlan, image: str | None, bursts: Sequence[Burst], closed: str | None) -> Candidate:
    facts = plan.facts
    return Candidate(
        NodeId(plan.node),
        substrates=facts.substrates,
        networks=facts.networks,
        features=facts.features,
        labels=facts.labels,
        devices=facts.devices,
        pool=pool_of(facts.labels, bursts),
        closed=closed,
        images=(image,) if facts.has_environment and image is not None else (),
        used=facts.used,
        room=facts.room,
    )
