"""Creates of a job's sandboxes: the job must be there and run, before and after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from dsec.cluster.jobs.table import Jobs
from dsec.cluster.rpc import Rpc
from dsec.core.errors import ConflictError, NotFoundError, Outcome
from dsec.core.ids import node_of, parse_sandbox_id
from dsec.wire.codec import pack
from dsec.wire.jobs import JobRow, JobState
from dsec.wire.node import Caller, Method
from dsec.wire.records import Sandbox, SandboxRef

_DESTROY_S: Final = 60.0


async def made_in_job(
    jobs: Jobs, rpc: Rpc, name: str | None, caller: Caller, make: Callable[[], Awaitable[Sandbox]]
) -> Sandbox:
    """What `make` makes. Raises NotFoundError for a job that is not there, ConflictError for one that does not run;
    also when it was stopped meanwhile, and then the sandbox is gone."""
    if name is None:
        return await make()
    row = jobs.known(caller.project, name) or await jobs.get(caller.project, name)
    if row.state is not JobState.RUNNING:
        raise _refused(row)
    sandbox = await make()
    now = await _row_of(jobs, caller.project, name)
    if now is None or now.id != row.id or now.state is JobState.STOPPED:
        # Its stop may have been carried out before the sandbox was there.
        id = parse_sandbox_id(sandbox.id)
        await rpc.call(node_of(id), Method.DESTROY, pack(SandboxRef(id)), caller=caller, timeout_s=_DESTROY_S)
        error = _refused(msgspec.structs.replace(row, state=JobState.STOPPED))
        error.outcome = Outcome.GONE
        raise error
    return sandbox


async def _row_of(jobs: Jobs, project: str, name: str) -> JobRow | None:
    """None: it was removed."""
    known = jobs.known(project, name)
    if known is not None:
        return known
    try:
        return await jobs.get(project, name)
    except NotFoundError:
        return None


def _refused(row: JobRow) -> ConflictError:
    hint = "resume it first" if row.state is JobState.PAUSED else "make another one"
    return ConflictError(f"job {row.name} is {row.state} and takes no new sandboxes", hint=hint)
