"""A sandbox as callers see it: records made from what the node knows."""

from __future__ import annotations

from dsec.backends.base import Capabilities, InstanceUsage
from dsec.core.ids import NodeId
from dsec.core.spec import SandboxSpec
from dsec.node.accounting import UsageMeter
from dsec.node.exectable import ExecTable
from dsec.node.rows import SandboxRow
from dsec.wire.errors import gone_error as gone_error  # beside the other shapes of a sandbox
from dsec.wire.records import Metrics, Sandbox


def view_of(
    row: SandboxRow, *, node: NodeId, now: float, idle_since: float | None, execs: ExecTable, meter: UsageMeter
) -> Sandbox:
    """One that has not ended; `now` is wall time."""
    spec = row.spec
    frozen_s = row.frozen_s + (now - row.paused_at if row.paused_at is not None else 0.0)
    return Sandbox(
        id=row.id,
        state=row.state,
        node=node,
        substrate=str(spec.substrate),
        environment="+".join(spec.environment.names()),
        project=row.project,
        created_at=row.created_at,
        cpu=spec.cpu,
        memory_bytes=spec.memory_bytes,
        disk_bytes=spec.disk_bytes,
        pids_max=spec.pids_max,
        network=str(spec.network),
        egress=None if spec.egress is None else list(spec.egress),
        name=spec.name,
        job=spec.job,
        member=spec.member,
        labels=spec.labels,
        user=row.user,
        workdir=row.workdir,
        ttl_running_s=row.ttl_running_s,
        ttl_idle_s=row.ttl_idle_s,
        idle_since=idle_since,
        asleep=row.asleep,
        incarnation=row.incarnation,
        execs_live=execs.live_count,
        cause=row.end_cause,
        cause_detail=row.end_detail,
        create_ms=row.create_ms,
        usage=meter.record(lived_s=now - row.created_at, frozen_s=frozen_s, output_bytes=sum(execs.output_bytes())),
    )


def metrics_of(
    spec: SandboxSpec,
    usage: InstanceUsage,
    *,
    limited: Capabilities,
    at: float,
    execs_live: int,
    output: tuple[int, int],
) -> Metrics:
    """`output` is recorded and dropped bytes. A limit that is not enforced here is not told as one."""
    recorded, dropped = output
    return Metrics(
        at=at,
        cpu_s=usage.cpu_s,
        memory_bytes=usage.memory_bytes,
        memory_peak_bytes=usage.memory_peak_bytes,
        memory_limit_bytes=spec.memory_bytes if limited.memory_limit else None,
        oom_kills=usage.oom_kills,
        pids=usage.pids,
        pids_limit=spec.pids_max if limited.pids_limit else None,
        disk_used_bytes=usage.disk_used_bytes,
        disk_limit_bytes=spec.disk_bytes if limited.disk_limit else None,
        cpu_pressure_s=usage.cpu_pressure_s,
        memory_pressure_s=usage.memory_pressure_s,
        execs_live=execs_live,
        output_recorded_bytes=recorded,
        output_dropped_bytes=dropped,
    )
