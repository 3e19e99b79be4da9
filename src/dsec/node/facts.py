"""What placement must know of this node, and whether a sandbox may be here at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from dsec.backends.base import Backend, Capabilities, Keeps
from dsec.core.errors import UnsupportedError
from dsec.core.spec import SandboxSpec, Substrate
from dsec.node.admission import Room, memory_promised_max
from dsec.wire.peers import RELAYS
from dsec.wire.plans import NodeFacts


def features_of(able: Capabilities, *, relays: bool = False) -> frozenset[str]:
    """Abilities by name, as `place.features` asks for them. `relays`: there are other nodes, and links lead to them."""
    found = {
        "pause": able.pause,
        "snapshot": able.snapshot is not Keeps.NOTHING,
        "fork": able.fork is not Keeps.NOTHING,
        "disk": able.disk_limit is not None,
        "volumes": able.volumes,
        "devices": able.devices,
        "memory-limit": able.memory_limit,
        "cpu-limit": able.cpu_limit,
        "pids-limit": able.pids_limit,
        "survives-node": able.survives_node,
        RELAYS: relays,
    }
    return frozenset(name for name, has in found.items() if has)


def check_place(
    spec: SandboxSpec, backend: Backend, labels: Mapping[str, str], node: str, kinds: Callable[[], Collection[str]]
) -> None:
    """Raises UnsupportedError: the sandbox is for another node."""
    if spec.place is None:
        return
    if spec.place.node not in (None, node):
        raise UnsupportedError(f"the sandbox is to be on node {spec.place.node}, and this is {node}")
    missing = sorted(set(spec.place.features) - features_of(backend.capabilities))
    if missing:
        raise UnsupportedError(f"{spec.substrate} sandboxes on this node lack {', '.join(missing)}")
    if lacking := sorted(set(spec.place.devices).difference(kinds() if spec.place.devices else ())):
        raise UnsupportedError(f"this node has no device of kind {', '.join(lacking)}")
    for name, value in spec.place.labels.items():
        if labels.get(name) != value:
            raise UnsupportedError(f"the label {name} of this node is {labels.get(name)!r}, not {value!r}")


def facts_of(
    spec: SandboxSpec,
    backends: Mapping[Substrate, Backend],
    room: Room,
    labels: Mapping[str, str],
    *,
    has_environment: bool,
    devices: Collection[str] = (),
    relays: bool = False,
) -> NodeFacts:
    backend = backends.get(spec.substrate)
    able = None if backend is None else backend.capabilities
    return NodeFacts(
        substrates=tuple(sorted(map(str, backends))),
        networks=() if able is None else tuple(sorted(map(str, able.networks))),
        features=() if able is None else tuple(sorted(features_of(able, relays=relays))),
        labels=dict(labels),
        devices=tuple(devices),
        has_environment=has_environment,
        used={"sandboxes": room.sandboxes, "memory_bytes": room.memory_promised_bytes},
        room={
            "sandboxes": room.sandboxes_max,
            "memory_bytes": memory_promised_max(room.memory_total_bytes, room.memory_overcommit),
        },
    )
