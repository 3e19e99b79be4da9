"""What a failed launch was, and what is told of it."""

from __future__ import annotations

from dsec.backends.container.launcher import LauncherRefusal
from dsec.core.errors import DeadlineError, DsecError, LaunchError, Outcome
from dsec.observe.logs import get_logger
from dsec.wire.launch import LaunchFailure, LaunchPlan

log = get_logger(__name__)

# Steps that mount on what the image has, and what they meet where it has a link or a file instead.
_IMAGE_STEPS = frozenset({"etc", "binds", "proc", "mounts"})
_NO_DIRECTORY = frozenset({"ELOOP", "ENOTDIR", "EINVAL", "EISDIR", "EEXIST"})
_IMAGE_HINT = (
    "in the image /dev, /etc, /proc and /sys must be directories or missing, and /etc/hosts, /etc/hostname and "
    "/etc/resolv.conf no directories; a symbolic link in their place is not followed"
)


def launch_error(id: str, error: Exception) -> DsecError:
    if isinstance(error, LauncherRefusal):
        failure = error.failure
        return LaunchError(
            f"{id} could not be started: step {failure.step}: {failure.errno or ''} {failure.detail}".rstrip(),
            hint=_IMAGE_HINT if failure.step in _IMAGE_STEPS and failure.errno in _NO_DIRECTORY else None,
            sandbox=id,
            step=failure.step,
            detail={"errno": failure.errno} if failure.errno else None,
        )
    if isinstance(error, DeadlineError):
        return DeadlineError(f"{id} was not ready in time and has been removed", sandbox=id, outcome=Outcome.GONE)
    if isinstance(error, ProcessLookupError):
        return LaunchError(f"the agent of {id} ended as soon as it had started", sandbox=id, step="agent")
    if isinstance(error, DsecError):
        error.sandbox = id
        return error
    return LaunchError(f"{id} could not be started: {error}", sandbox=id, step="node")


def has_forgotten(failure: LaunchFailure) -> bool:
    """A plan names nothing that may be missing but filters and layers, which are registered."""
    return failure.step == "check" and failure.errno == "ENOENT"


def was_bad(plan: LaunchPlan, failure: LaunchFailure) -> bool:
    """What was prepared for it has died or been damaged, or its worker has died: nothing of it is left, and it can be
    made from nothing. Tells of it."""
    bad = bool(plan.named) and failure.errno is None
    if bad:
        log.warning("what was made ahead was of no use", name=plan.sandbox, sandbox=plan.named, why=failure.detail)
    return bad


def is_taken_back(plan: LaunchPlan, failure: LaunchFailure) -> bool:
    """The launcher that had prepared it was killed, and a worker of that one is not through with taking it back."""
    return bool(plan.named) and failure.step == "cgroups" and failure.errno == "EEXIST"
