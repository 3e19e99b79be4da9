"""States of a sandbox and the moves between them."""

from __future__ import annotations

import enum


class SandboxState(enum.StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    DESTROYING = "destroying"
    GONE = "gone"  # ended on purpose: destroyed, or its time to live was over
    FAILED = "failed"  # ended by a fault; `cause` says which


_MOVES: dict[SandboxState, frozenset[SandboxState]] = {
    SandboxState.CREATING: frozenset({SandboxState.RUNNING, SandboxState.DESTROYING, SandboxState.FAILED}),
    SandboxState.RUNNING: frozenset({SandboxState.PAUSING, SandboxState.DESTROYING, SandboxState.FAILED}),
    SandboxState.PAUSING: frozenset(
        {SandboxState.PAUSED, SandboxState.RUNNING, SandboxState.DESTROYING, SandboxState.FAILED}
    ),
    SandboxState.PAUSED: frozenset({SandboxState.RESUMING, SandboxState.DESTROYING, SandboxState.FAILED}),
    SandboxState.RESUMING: frozenset(
        {SandboxState.RUNNING, SandboxState.PAUSED, SandboxState.DESTROYING, SandboxState.FAILED}
    ),
    SandboxState.DESTROYING: frozenset({SandboxState.GONE, SandboxState.FAILED}),
    SandboxState.GONE: frozenset(),
    SandboxState.FAILED: frozenset(),
}

ENDED = frozenset({SandboxState.GONE, SandboxState.FAILED})


def may_move(old: SandboxState, new: SandboxState) -> bool:
    return new in _MOVES[old]


class EndCause(enum.StrEnum):
    """Why a sandbox ended (tombstone), in words that programs can rely on."""

    DESTROYED = "destroyed"
    TTL_RUNNING = "ttl_running"
    TTL_IDLE = "ttl_idle"
    LAUNCH_FAILED = "launch_failed"
    OOM = "oom"  # the kernel killed the agent for memory
    SANDBOX_FAULT = "sandbox_fault"  # the agent died or broke the protocol
    PLATFORM_FAILURE = "platform_failure"
    NODE_REBOOTED = "node_rebooted"
    NODE_LOST = "node_lost"
    NODE_RETIRED = "node_retired"
