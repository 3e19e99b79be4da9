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
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef

_DESTROY_S: Final = 60.0


async def made_in_job(
    jobs: Jobs, rpc: Rpc, body: CreateRequest, caller: Caller, make: Callable[[CreateRequest], Awaitable[Sandbox]]
) -> Sandbox:
    """What `make` makes of the request, in which the job's id is set here. Raises NotFoundError for a job that is not
    there, ConflictError for one that does not run; also when it was stopped meanwhile, and then the sandbox is gone."""
    wanted, row = await entered(jobs, body, caller)
    sandbox = await make(wanted)
    if row is not None:
        await check_runs(jobs, rpc, row, caller, sandbox)
    return sandbox


async def entered(jobs: Jobs, body: CreateRequest, caller: Caller) -> tuple[CreateRequest, JobRow | None]:
    """The request with the job's id, and the job; None: it is of no job. Raises NotFoundError, ConflictError."""
    name = body.spec.job
    if name is None:
        return _with_id(body, None), None
    # What is known here may be of the job before this one of the name, which another replica has made.
    row = await jobs.get(caller.project, name)
    if row.state is not JobState.RUNNING:
        raise _refused(row)
    return _with_id(body, row.id), row


async def check_runs(jobs: Jobs, rpc: Rpc, row: JobRow, caller: Caller, sandbox: Sandbox) -> None:
    """Raises ConflictError when the job was stopped meanwhile: then the sandbox is gone."""
    if not _goes_on(row, jobs.known(caller.project, row.name)) and not _goes_on(row, await _row_of(jobs, row)):
        # Its stop may have been carried out before the sandbox was there.
        id = parse_sandbox_id(sandbox.id)
        await rpc.call(node_of(id), Method.DESTROY, pack(SandboxRef(id)), caller=caller, timeout_s=_DESTROY_S)
        error = _refused(msgspec.structs.replace(row, state=JobState.STOPPED))
        error.outcome = Outcome.GONE
        raise error


def _with_id(body: CreateRequest, id: str | None) -> CreateRequest:
    """Whatever the caller has said."""
    if body.spec.job_id == id:
        return body
    return msgspec.structs.replace(body, spec=msgspec.structs.replace(body.spec, job_id=id))


def _goes_on(row: JobRow, now: JobRow | None) -> bool:
    return now is not None and now.id == row.id and now.state is not JobState.STOPPED


async def _row_of(jobs: Jobs, row: JobRow) -> JobRow | None:
    """None: it was removed."""
    try:
        return await jobs.get(row.project, row.name)
    except NotFoundError:
        return None


def _refused(row: JobRow) -> ConflictError:
    hint = "resume it first" if row.state is JobState.PAUSED else "make another one"
    return ConflictError(f"job {row.name} is {row.state} and takes no new sandboxes", hint=hint)
