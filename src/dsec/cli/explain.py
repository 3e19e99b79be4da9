"""`dsec explain`: what would become of a create, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.completion import complete_environment
from dsec.cli.console import Json, clean, client, lay_out, parse_pairs, put_json, run_async, settings
from dsec.cli.options import (
    Cpu,
    Datasets,
    Disk,
    Egress,
    Memory,
    Name,
    Network,
    Substrate,
    TtlRunning,
    Volumes,
    egress_of,
)
from dsec.cli.pages import command
from dsec.cli.volumes import mounts

if TYPE_CHECKING:
    from dsec.wire.plans import CapVerdict, Explanation

_HINTS_MAX: Final = 3


def explain(
    environment: Annotated[
        str, typer.Argument(help="What it would start from.", autocompletion=complete_environment)
    ] = "base",
    backend: Substrate = "container",
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    volume: Volumes = None,
    dataset: Datasets = None,
    network: Network = "none",
    egress: Egress = None,
    name: Name = None,
    ttl_running: TtlRunning = None,
    snapshot: Annotated[str | None, typer.Option(metavar="NAME", help="From a snapshot.", show_default=False)] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="That the node must have. May be repeated.")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="That the node must have, such as pause. May be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what would become of a create now, and why. Nothing happens."""

    async def work() -> Explanation:
        from dsec.core.spec import Place

        place = None
        if label or feature:
            place = Place(labels=parse_pairs(label, "label"), features=tuple(feature or ()))
        async with client() as c:
            return await c.explain(
                environment,
                snapshot=snapshot,
                backend=backend,
                cpu=cpu,
                memory=memory,
                disk=disk,
                network=network,
                egress=egress_of(egress),
                name=name,
                ttl_running_s=ttl_running,
                volumes=mounts(volume, dataset),
                place=place,
            )

    found = run_async(work())
    if settings.json:
        put_json(found)
    else:
        for line in _lines(found):
            print(line)
    if not found.would_be_made:
        raise typer.Exit(1)


def _lines(found: Explanation) -> list[str]:
    lines = [f"in {found.project}: {'it would be made' if found.would_be_made else 'it would be refused'}"]
    if found.policy is not None:
        lines.append(f"policy: {found.policy.message}")
    if found.caps:
        rows = [(cap.cap, cap.project, *_figures(cap), "fits" if cap.fits else "no room") for cap in found.caps]
        lines += lay_out(("CAP", "OF", "USED", "UNDER WAY", "ASKED", "LIMIT", ""), rows)
    rows_of_nodes = [
        (
            node.node,
            f"{node.fullness:.0%}",
            "would be chosen" if node.chosen else "could take it" if node.fits else f"no: {node.text or node.reason}",
        )
        for node in found.nodes
    ]
    lines += lay_out(("NODE", "FULL", ""), rows_of_nodes)
    if not any(node.fits for node in found.nodes):
        hints = dict.fromkeys(node.hint for node in found.nodes if node.hint is not None)
        lines += [f"try: {clean(hint)}" for hint in list(hints)[:_HINTS_MAX]]
    return lines


def _figures(cap: CapVerdict) -> tuple[str, str, str, str]:
    from dsec.core.units import format_size

    def shown(value: float) -> str:
        return format_size(int(value)) if cap.cap.endswith("_bytes") else f"{value:g}"

    return shown(cap.used), shown(cap.reserved), shown(cap.asked), shown(cap.limit)


def register(main: typer.Typer) -> None:
    command(main, explain)
