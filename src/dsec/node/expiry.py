"""What happens when a sandbox's time may be over: it is looked at again, and ended, put to rest, or left."""

from __future__ import annotations

from dsec.core.clock import Clock
from dsec.core.errors import DsecError
from dsec.core.rungs import Rung
from dsec.core.states import EndCause, SandboxState
from dsec.node.supervisor import Supervisor
from dsec.observe import metrics
from dsec.observe.logs import get_logger

log = get_logger(__name__)


async def expire(sandbox: Supervisor, clock: Clock) -> None:
    """Ends it if its time is over, or has it take less of the node if nobody uses it; sees to being asked again. Raises
    what `destroy` and a pause raise."""
    due = sandbox.lifetime.next_deadline()
    if due is None or sandbox.ended or sandbox.state is SandboxState.DESTROYING:
        return
    moment, cause = due
    if moment > clock.monotonic_s():
        sandbox.arm()
    elif cause is not EndCause.TTL_RUNNING and await _is_kept_alive(sandbox):
        sandbox.lifetime.touch()
        sandbox.arm()
    elif isinstance(cause, Rung):
        await _rest(sandbox, cause)
    else:
        metrics.REAPS.labels(str(cause)).inc()
        await sandbox.destroy(cause)


async def _rest(sandbox: Supervisor, rung: Rung) -> None:
    """One that cannot be taken is not tried again before it is used and idle again."""
    try:
        if await sandbox.pausing.rest(rung):
            metrics.RESTS.labels(str(rung)).inc()
    except DsecError as error:
        log.warning("an idle sandbox could not be put to rest", sandbox=sandbox.id, rung=str(rung), error=error.message)
    finally:
        sandbox.arm()


async def _is_kept_alive(sandbox: Supervisor) -> bool:
    """By processes that no exec waits for: the agent and the shells of sessions do not count. Once it is paused they do
    nothing."""
    if not sandbox.row.spec.keepalive or sandbox.state is not SandboxState.RUNNING:
        return False
    try:
        usage = await (await sandbox.client()).usage()
    except DsecError:
        return False
    return usage.processes > usage.sessions + 1
