"""A create that no node takes: why, of which node, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dsec.cluster.members.nodes import NodeState, NodeView
from dsec.cluster.placement import Ask, Refusal
from dsec.core.errors import CapacityError, DsecError, UnsupportedError
from dsec.core.ids import NodeId

_LASTING: Final = frozenset(("node", "substrate", "network", "feature", "device", "label"))
_TEXTS_MAX: Final = 3
_NAMED_MAX: Final = 5
_AGAIN_S: Final = 1.0


def closed_nodes(views: Iterable[NodeView], now: float) -> dict[NodeId, Refusal]:
    """Those that may serve again, and take nothing new now."""
    found = {}
    for view in views:
        state, text = view.state(now), view.closed(now)
        gone = state == NodeState.RETIRED or (state == NodeState.LOST and view.buried) or view.member is None
        if text is not None and not gone:
            found[view.id] = Refusal("closed", text, view.remedy(now), ordered=view.ordered)
    return found


def no_node(
    reasons: Mapping[NodeId, Refusal], ask: Ask, tried: set[NodeId], closed: Mapping[NodeId, Refusal]
) -> DsecError:
    """`reasons`: of those that placement looks at. `closed`: of these and others, as `closed_nodes` says."""
    if ask.node is not None and reasons and ask.node not in reasons and not tried:
        return UnsupportedError(
            f"node {ask.node}, which was asked for, is not in this cluster",
            hint="`dsec cluster nodes` lists its nodes",
        )
    text = f"no node takes a new {ask.substrate} sandbox now"
    if causes := _causes(dict(closed) | dict(reasons), ask):
        text += f": {'; '.join(causes)}"
    if reasons and not tried and all(reason.code in _LASTING for reason in reasons.values()):
        return UnsupportedError(text, hint="`dsec explain` with the same options says why, node by node")
    if reasons and not tried and all(reason.code in (*_LASTING, "size") for reason in reasons.values()):
        return CapacityError(text, hint="ask for less", detail={"never": True})
    hint = None if reasons or closed else "`dsec cluster nodes` lists the nodes; `dsec node` on a machine makes it one"
    if not tried and all(reason.code in (*_LASTING, "closed") for reason in reasons.values()):
        shut = [*reasons.values(), *closed.values()]
        hint = next((reason.hint for reason in shut if reason.hint is not None), hint)
    stays = bool(closed) and not tried and _all_ordered(closed) and _none_opens(reasons, closed)
    again_s = None if stays else _AGAIN_S
    return CapacityError(text + (f"; {len(tried)} have refused it" if tried else ""), hint=hint, retry_after_s=again_s)


def _none_opens(reasons: Mapping[NodeId, Refusal], closed: Mapping[NodeId, Refusal]) -> bool:
    return all(reason.code in _LASTING or node in closed for node, reason in reasons.items())


def _all_ordered(closed: Mapping[NodeId, Refusal]) -> bool:
    """Nobody who tries again finds them open, before an operator has said so."""
    return all(reason.ordered for reason in closed.values())


def _causes(reasons: Mapping[NodeId, Refusal], ask: Ask) -> list[str]:
    """The few that say most: what could take it comes before what never could."""
    nodes: dict[tuple[str, str], list[NodeId]] = {}
    for node, reason in reasons.items():
        if ask.node in (None, node) or len(reasons) == 1:
            nodes.setdefault((reason.code, reason.text), []).append(node)
    found = sorted(nodes, key=lambda cause: (cause[0] in _LASTING, cause[0] == "closed", cause[1]))[:_TEXTS_MAX]
    return [text + (f" ({named(nodes[code, text])})" if code == "closed" else "") for code, text in found]


def named(nodes: Iterable[NodeId]) -> str:
    found = sorted(nodes)
    more = len(found) - _NAMED_MAX
    text = ", ".join(found[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return f"node {text}" if len(found) == 1 else f"nodes {text}"


def only_there(
    image: str | None, views: Iterable[NodeView], tried: set[NodeId], closed: Mapping[NodeId, Refusal]
) -> CapacityError | None:
    """Of an environment that the nodes asked lack: nodes that take nothing new have it."""
    having = [
        view.id
        for view in views
        if view.id in closed and view.id not in tried and view.card is not None and image in view.card.images
    ]
    if not having:
        return None
    first = closed[having[0]]
    text = f"environment {image!r} is on {named(having)} only, and nothing new goes there: {first.text}"
    again_s = None if _all_ordered({node: closed[node] for node in having}) else _AGAIN_S
    return CapacityError(text, hint=first.hint, retry_after_s=again_s)


def maybe_there(error: DsecError, tried: set[NodeId], closed: Mapping[NodeId, Refusal]) -> None:
    """Says beside an error that what was not found may be on nodes that were not asked."""
    left = {node: reason for node, reason in closed.items() if node not in tried}
    if left:
        texts = [f"node {node}: {left[node].text}" for node in sorted(left)[:_TEXTS_MAX]]
        error.hint = f"it may be where nothing new goes now ({'; '.join(texts)}); {error.hint or 'ask again later'}"
