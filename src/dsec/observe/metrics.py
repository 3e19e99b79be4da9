"""Every metric, declared once. Labels hold words of ours only, never what a caller or a sandbox has chosen.

`sandbox`, `exec`, `project` and the like are in the logs: as labels they would make a time series each.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY: Final = CollectorRegistry(auto_describe=True)

# From a clone of a warm container to a cold environment that is fetched first.
_CREATE_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

SANDBOXES: Final = Gauge("dsec_sandboxes", "Sandboxes of this node now.", ["substrate", "state"], registry=REGISTRY)
CREATES: Final = Counter("dsec_creates_total", "Creates that gave a running sandbox.", ["substrate"], registry=REGISTRY)
CREATE_FAILURES: Final = Counter(
    "dsec_create_failures_total",
    "Creates that failed and left nothing, by the step that failed and the code of the error.",
    ["substrate", "step", "code"],
    registry=REGISTRY,
)
CREATE_SECONDS: Final = Histogram(
    "dsec_create_seconds",
    "From the request's arrival at the node to a sandbox that answers.",
    ["substrate"],
    buckets=_CREATE_BUCKETS_S,
    registry=REGISTRY,
)
SNAPSHOT_FROZEN_SECONDS: Final = Histogram(
    "dsec_snapshot_frozen_seconds",
    "For how long sandboxes stood still for snapshots and forks.",
    buckets=_CREATE_BUCKETS_S,
    registry=REGISTRY,
)
WARM_SPARES: Final = Gauge("dsec_warm_spares", "Spares that wait to be claimed.", ["substrate"], registry=REGISTRY)
WARM_HITS: Final = Counter(
    "dsec_warm_hits_total", "Creates that found a spare of their shape.", ["substrate"], registry=REGISTRY
)
WARM_MISSES: Final = Counter(
    "dsec_warm_misses_total", "Creates that found no spare, where spares are made.", ["substrate"], registry=REGISTRY
)
WARM_FAILURES: Final = Counter(
    "dsec_warm_failures_total", "Spares that could not be made.", ["substrate"], registry=REGISTRY
)
CALLS: Final = Counter(
    "dsec_calls_total", "Calls that were run, by what came of them.", ["type", "status"], registry=REGISTRY
)
CALL_PLACES: Final = Gauge("dsec_call_places", "Containers for calls of this node now.", registry=REGISTRY)
EGRESS_BYTES: Final = Counter(
    "dsec_egress_bytes_total", "Bytes forwarded for sandboxes, as far as it was looked at.", ["way"], registry=REGISTRY
)
EGRESS_DENIED: Final = Counter(
    "dsec_egress_denied_total", "Names and connections that sandboxes asked for and may not reach.", registry=REGISTRY
)
EGRESS_ATTACH_FAILURES: Final = Counter(
    "dsec_egress_attach_failures_total", "Times that a sandbox could not be attached to its network.", registry=REGISTRY
)
ENDS: Final = Counter(
    "dsec_ends_total", "Sandboxes that have ended, by cause.", ["substrate", "cause"], registry=REGISTRY
)
EXECS: Final = Counter("dsec_execs_total", "Execs started.", ["substrate"], registry=REGISTRY)
OUTPUT_RECORDED_BYTES: Final = Counter(
    "dsec_output_recorded_bytes_total", "Output of execs that was written to the node's record.", registry=REGISTRY
)
OUTPUT_DROPPED_BYTES: Final = Counter(
    "dsec_output_dropped_bytes_total", "Output of execs that was above its budget and is lost.", registry=REGISTRY
)
AGENT_VIOLATIONS: Final = Counter(
    "dsec_agent_violations_total",
    "Times that an agent broke the protocol and its sandbox was failed for it.",
    registry=REGISTRY,
)
RESTS: Final = Counter(
    "dsec_idle_rests_total",
    "Idle sandboxes that were made to take less of the node, by rung: pause, page_out, sleep.",
    ["rung"],
    registry=REGISTRY,
)
REAPS: Final = Counter(
    "dsec_reaps_total",
    "What the reaper ended, by reason: ttl_running, ttl_idle, leftover.",
    ["reason"],
    registry=REGISTRY,
)
API_REQUESTS: Final = Counter(
    "dsec_api_requests_total",
    "Requests answered, by route and status; 499: the client went away first.",
    ["route", "status"],
    registry=REGISTRY,
)

CREATES_QUEUED: Final = Gauge("dsec_creates_queued", "Creates that wait for room at this replica.", registry=REGISTRY)
CREATES_QUEUE_FULL: Final = Counter(
    "dsec_creates_queue_full_total", "Creates that were refused as too many waited already.", registry=REGISTRY
)
RESUMES_WAITING: Final = Gauge("dsec_resumes_waiting", "Resumes that wait for memory at this node.", registry=REGISTRY)
NODES: Final = Gauge("dsec_nodes", "Nodes of the cluster, as a watcher sees them.", ["state"], registry=REGISTRY)
NODES_LOST: Final = Counter("dsec_nodes_lost_total", "Nodes that a watcher has declared lost.", registry=REGISTRY)
NODE_FLOODS: Final = Counter(
    "dsec_node_floods_total",
    "Times that a node was not listened to for a minute, as it sent far too much.",
    registry=REGISTRY,
)
NODE_MESSAGES_DROPPED: Final = Counter(
    "dsec_node_messages_dropped_total", "Messages of nodes that were above their measure.", registry=REGISTRY
)
JOB_LEASES_MISSED: Final = Counter(
    "dsec_job_leases_missed_total", "Leases of jobs that were over.", ["on_missed"], registry=REGISTRY
)


def render() -> bytes:
    """All metrics in the Prometheus text format; its content type is `CONTENT_TYPE`."""
    return generate_latest(REGISTRY)
