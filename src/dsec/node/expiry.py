"""What happens when a sandbox's time may be over: it is looked at again, and ended or left."""

from __future__ import annotations

from dsec.core.clock import Clock
from dsec.core.errors import DsecError
from dsec.core.states import EndCause, SandboxState
from dsec.node.supervisor import Supervisor
from dsec.observe import metrics


async def expire(sandbox: Supervisor, clock: Clock) -> None:
    """Ends it if its time is over; otherwise sees to being asked again. Raises what `destroy` raises."""
    due = sandbox.lifetime.next_deadline()
    if due is None or sandbox.ended or sandbox.state is SandboxState.DESTROYING:
        return
    moment, cause = due
    if moment > clock.monotonic_s():
        sandbox.arm()
    elif cause is EndCause.TTL_IDLE and sandbox.row.spec.keepalive and await _has_background(sandbox):
        sandbox.lifetime.touch()
        sandbox.arm()
    else:
        metrics.REAPS.labels(str(cause)).inc()
        await sandbox.destroy(cause)


async def _has_background(sandbox: Supervisor) -> bool:
    """Processes that no exec waits for: the agent and the shells of sessions do not count."""
    try:
        usage = await (await sandbox.client()).usage()
    except DsecError:
        return False
    return usage.processes > usage.sessions + 1
