"""The report behind `dsec doctor`: the machine, the environments, and each substrate's own probe."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsec import __version__
from dsec.backends.base import Capabilities, Probe
from dsec.core.errors import DsecError
from dsec.core.units import format_size
from dsec.node.fingerprint import DEGRADED, MISSING, OK, fingerprint
from dsec.wire.records import DoctorReport, Finding

if TYPE_CHECKING:
    from dsec.node.node import Node


async def examine(node: Node) -> DoctorReport:
    findings = await asyncio.to_thread(fingerprint, node.config)
    findings.append(await _environments(node))
    substrates: dict[str, str] = {}
    for substrate, backend in node.backends.items():
        probe = await backend.probe()
        substrates[str(substrate)] = "ok" if probe.usable else probe.reason or "not usable"
        findings.extend(_of_probe(str(substrate), probe))
        findings.append(_disk_limit(backend.capabilities))
        findings.append(_resource_view(backend.capabilities))
    return DoctorReport(node=node.id, version=__version__, findings=findings, substrates=substrates)


def _of_probe(substrate: str, probe: Probe) -> list[Finding]:
    head = Finding(
        what=f"substrate {substrate}",
        status=OK if probe.usable else MISSING,
        detail=probe.reason or ("usable" if probe.usable else "not usable"),
        hint=probe.hint,
    )
    return [
        head,
        *(Finding(what=f"{substrate}: {name}", status=OK, detail=found) for name, found in probe.facts.items()),
    ]


def _disk_limit(able: Capabilities) -> Finding:
    what = f"{able.substrate}: disk limit"
    if able.disk_limit is not None:
        return Finding(what=what, status=OK, detail=able.disk_limit)
    return Finding(
        what=what,
        status=DEGRADED,
        detail="none: a create that asks for one is refused, and one sandbox can fill the disk down to the reserve",
        hint="set disk = 'tmpfs' in the section for containers, which keeps their files in memory",
    )


def _resource_view(able: Capabilities) -> Finding:
    what = f"{able.substrate}: resource view"
    if able.resource_view != "host":
        return Finding(what=what, status=OK, detail=able.resource_view)
    return Finding(
        what=what,
        status=DEGRADED,
        detail="host: nproc and /proc/meminfo show programs the whole machine; their limits hold all the same",
        hint="tell programs their share, for example make -j or pytest -n with a number",
    )


async def _environments(node: Node) -> Finding:
    try:
        facts = await node.environments.describe()
    except DsecError as error:
        return Finding(what="environments", status=MISSING, detail=error.message, hint=error.hint)
    if facts is None:
        return Finding(what="environments", status=DEGRADED, detail="this node has no store of them")
    detail = (
        f"{facts.environments} with {facts.layers} layers, {format_size(facts.layer_bytes)}, kept as {facts.kind}"
        f"{': ' + facts.reason if facts.reason else ''}"
    )
    status = DEGRADED if facts.reason else OK
    return Finding(what="environments", status=status, detail=detail)
