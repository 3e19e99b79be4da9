"""The report behind `dsec doctor`: the machine, the environments, and each substrate's own probe."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsec import __version__
from dsec.backends.base import Capabilities, Probe
from dsec.core.errors import DsecError
from dsec.core.spec import NetworkMode, Substrate
from dsec.core.units import format_size
from dsec.node.fingerprint import DEGRADED, FANOTIFY_COST, MISSING, OK, fingerprint
from dsec.wire.records import DoctorReport, Finding

if TYPE_CHECKING:
    from dsec.backends.base import Backend
    from dsec.image.environments import StoreFacts
    from dsec.node.node import Node


async def examine(node: Node) -> DoctorReport:
    findings = await asyncio.to_thread(fingerprint, node.config)
    findings += await _environments(node)
    substrates: dict[str, str] = {}
    for substrate, backend in node.backends.items():
        substrates[str(substrate)], more = await of_backend(str(substrate), backend)
        findings += more
    return DoctorReport(node=node.id, version=__version__, findings=findings, substrates=substrates)


async def of_backend(substrate: str, backend: Backend) -> tuple[str, list[Finding]]:
    """ "ok" or the reason why not, and what there is to say of it."""
    probe = await backend.probe()
    able = backend.capabilities
    findings = [*_of_probe(substrate, probe), _disk_limit(able), _resource_view(able), *_network(able)]
    return "ok" if probe.usable else probe.reason or "not usable", findings


def _of_probe(substrate: str, probe: Probe) -> list[Finding]:
    # Containers are what a sandbox is unless something else is asked for.
    need = "needed" if substrate == Substrate.CONTAINER else "advised"
    head = Finding(
        what=f"substrate {substrate}",
        status=OK if probe.usable else MISSING,
        detail=probe.reason or ("usable" if probe.usable else "not usable"),
        hint=probe.hint,
        need=need,
        cost=None if probe.usable else f"no {substrate} sandbox can be made",
    )
    return [head, *(_of_fact(substrate, name, found, probe) for name, found in probe.facts.items())]


def _of_fact(substrate: str, name: str, found: str, probe: Probe) -> Finding:
    what = f"{substrate}: {name}"
    if (weak := probe.weak.get(name)) is None:
        return Finding(what=what, status=OK, detail=found, need="optional")
    return Finding(what=what, status=DEGRADED, detail=found, hint=weak.hint, need="advised", cost=weak.cost)


def _disk_limit(able: Capabilities) -> Finding:
    what = f"{able.substrate}: disk limit"
    if able.disk_limit is not None:
        return Finding(what=what, status=OK, detail=": ".join(filter(None, (able.disk_limit, able.disk_limit_reason))))
    return Finding(
        what=what,
        status=DEGRADED,
        detail=f"none: {able.disk_limit_reason}" if able.disk_limit_reason else "none",
        hint="[container] disk = 'auto' in the configuration, with e2fsprogs and loop devices, or a project quota; "
        "disk = 'tmpfs' keeps their files in memory, with a limit",
        cost="a create that asks for one is refused, and one sandbox can fill the disk down to the reserve",
    )


def _network(able: Capabilities) -> list[Finding]:
    what = f"{able.substrate}: network"
    if NetworkMode.PROXIED in able.networks:
        return [Finding(what=what, status=OK, detail="none, and proxied: a namespace was steered for trial")]
    if not able.network_reason:
        return []
    return [
        Finding(
            what=what,
            status=DEGRADED,
            detail=f"none only: {able.network_reason}",
            hint="Linux 5.9 or newer with BPF, a node that runs as root, and [node.egress] offered = true",
            need="optional",
            cost="a create that asks for network proxied is refused",
        )
    ]


def _resource_view(able: Capabilities) -> Finding:
    what = f"{able.substrate}: resource view"
    if able.resource_view == "live":
        return Finding(what=what, status=OK, detail="live: programs see their share, and what is free of it")
    if able.resource_view == "static":
        return Finding(
            what=what,
            status=OK,
            detail=f"static: programs see their share, all of it free; not live: {able.resource_view_reason}",
            hint="for a live view install lxcfs (apt install lxcfs) and restart the node with its launcher",
        )
    return Finding(
        what=what,
        status=DEGRADED,
        detail="host: nproc and /proc/meminfo show programs the whole machine; their limits hold all the same",
        hint="tell programs their share, for example make -j or pytest -n with a number",
    )


async def _environments(node: Node) -> list[Finding]:
    try:
        facts = await node.environments.describe()
    except DsecError as error:
        return [Finding(what="environments", status=MISSING, detail=error.message, hint=error.hint, need="needed")]
    return [of_environments(facts), *of_loader(facts)]


def of_loader(facts: StoreFacts | None) -> list[Finding]:
    """How the layers of stores are read that this node serves now; nothing while it serves none."""
    if facts is None or facts.front is None:
        return []
    if facts.front != "fanotify":
        return [Finding(what="loader", status=OK, detail=f"serves by {facts.front}", need="optional")]
    return [
        Finding(
            what="loader",
            status=DEGRADED,
            detail="serves by fanotify: a layer that is whole is read like a local file",
            hint="[storage] loader_front = 'fuse', then dsec down --destroy and dsec up",
            need="optional",
            cost=FANOTIFY_COST,
        )
    ]


def of_environments(facts: StoreFacts | None) -> Finding:
    if facts is None:
        return Finding(what="environments", status=OK, detail="this node has no store of them", need="optional")
    if facts.environments == 0:
        return no_environments()
    detail = f"{facts.environments} with {facts.layers} layers, {format_size(facts.layer_bytes)}, kept as {facts.kind}"
    if not facts.reason:
        return Finding(what="environments", status=OK, detail=detail, need="needed")
    return Finding(
        what="environments",
        status=DEGRADED,
        detail=f"{detail}: {facts.reason}",
        hint="apt install erofs-utils (1.8 or newer)" if "mkfs" in facts.reason else None,
        cost="layers take more room and files on the disk, and more memory",
    )


def no_environments() -> Finding:
    return Finding(
        what="environments",
        status=DEGRADED,
        detail="none yet",
        hint="dsec env build base --debian",
        need="needed",
        cost="there is nothing that a sandbox could start from",
    )
