"""Every error that a caller can act on.

DsecError                          outcome says what the world looks like now
├── InvalidArgumentError           the request was wrong; nothing happened
│   └── LimitError                 a size, count or rate above a stated bound
├── AuthError                      who you are was not shown
├── ForbiddenError                 known, but not allowed
├── NotFoundError                  no such thing (or not yours)
│   ├── SandboxNotFoundError
│   ├── ExecNotFoundError
│   ├── EnvironmentNotFoundError
│   ├── SessionNotFoundError
│   ├── VolumeNotFoundError
│   └── PathNotFoundError          a path inside a sandbox
├── ConflictError                  the thing exists, is in use, or is in another state
│   ├── IdempotencyError           the key was used for a different request
│   └── SandboxStateError          not possible in the sandbox's present state
├── GoneError                      it was there and has ended; the tombstone says why
│   └── NodeRetiredError           the node that the id names is gone for good
├── UnsupportedError               this substrate, host or build cannot do it
├── CapacityError                  refused for lack of room; retry_after_s says when to try again
│   ├── QuotaError                 a cap of the project, or of one above it, leaves no room
│   └── ResumeNoMemoryError        the node has no memory for a paused sandbox just now
├── DeadlineError                  not done within the time given
├── PlatformError                  we failed, not the command
│   ├── UnavailableError           the service or node cannot be reached
│   ├── SandboxError               something about one sandbox
│   │   ├── LaunchError            never became ready; nothing is left
│   │   ├── SandboxFaultError      the sandbox's inside broke the platform's rules or its agent died
│   │   └── FreezeTimeoutError     it did not stop within its deadline
│   ├── ProtocolError              a peer sent what the contract does not allow
│   ├── StorageError               a store, layer or disk failed
│   └── HostError                  the machine lacks or refused something
├── FileError                      a file operation inside a sandbox failed, with its errno
└── CommandError                   a command failed and the caller had asked for check=True
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar


class Outcome(enum.StrEnum):
    """What the world looks like after an error."""

    UNCHANGED = "unchanged"
    GONE = "gone"
    UNKNOWN = "unknown"


class DsecError(Exception):
    """Base of all errors of dsec. `str(e)` is for people, the attributes are for programs."""

    code: ClassVar[str] = "internal"
    outcome: Outcome = Outcome.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        outcome: Outcome | None = None,
        sandbox: str | None = None,
        exec: str | None = None,  # the wire name
        step: str | None = None,
        retry_after_s: float | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if outcome is not None:
            self.outcome = outcome
        self.sandbox = sandbox
        self.exec = exec
        self.step = step
        self.retry_after_s = retry_after_s
        self.detail = detail or {}

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidArgumentError(DsecError):
    """The request is malformed or asks for the impossible. Nothing happened."""

    code = "invalid_argument"
    outcome = Outcome.UNCHANGED


class LimitError(InvalidArgumentError):
    """A size, count or rate is above a bound of `core.limits` or of the host. Nothing happened."""

    code = "limit_exceeded"


class AuthError(DsecError):
    """No valid credentials were given. Nothing happened."""

    code = "unauthenticated"
    outcome = Outcome.UNCHANGED


class ForbiddenError(DsecError):
    """The caller is known and may not do this. Nothing happened."""

    code = "forbidden"
    outcome = Outcome.UNCHANGED


class NotFoundError(DsecError):
    """No such thing, or it belongs to another project (we do not say which). Nothing happened."""

    code = "not_found"
    outcome = Outcome.UNCHANGED


class SandboxNotFoundError(NotFoundError):
    """No such sandbox, or not yours."""

    code = "sandbox_not_found"


class ExecNotFoundError(NotFoundError):
    """The sandbox has no such exec, or its record has been dropped."""

    code = "exec_not_found"


class EnvironmentNotFoundError(NotFoundError):
    """No environment of that name on this node."""

    code = "environment_not_found"


class SessionNotFoundError(NotFoundError):
    """The sandbox has no live session of that name."""

    code = "session_not_found"


class VolumeNotFoundError(NotFoundError):
    """No volume, or no dataset, of that name for this project on this node."""

    code = "volume_not_found"


class PathNotFoundError(NotFoundError):
    """The path does not exist inside the sandbox."""

    code = "path_not_found"


class ConflictError(DsecError):
    """The thing exists already, is in use, or differs from what the request assumed. Nothing happened."""

    code = "conflict"
    outcome = Outcome.UNCHANGED


class IdempotencyError(ConflictError):
    """The idempotency key was used before, for a different request."""

    code = "idempotency_mismatch"


class SandboxStateError(ConflictError):
    """Not possible in the sandbox's present state, which the message names."""

    code = "sandbox_state"


class GoneError(DsecError):
    """The sandbox (or exec, or session) was there and has ended; `detail` holds its tombstone."""

    code = "gone"
    outcome = Outcome.GONE


class NodeRetiredError(GoneError):
    """The node that the id names has left for good, and its sandboxes with it."""

    code = "node_retired"


class UnsupportedError(DsecError):
    """This substrate, host or build does not have the ability. Nothing happened."""

    code = "unsupported"
    outcome = Outcome.UNCHANGED


class CapacityError(DsecError):
    """Refused for lack of room (memory, disk, ids, quota). Nothing happened; try again after `retry_after_s`."""

    code = "no_capacity"
    outcome = Outcome.UNCHANGED


class QuotaError(CapacityError):
    """A cap of the project, or of one above it, leaves no room. `detail` has project, cap, limit, used, reserved and
    asked. Without `retry_after_s` something has to end first."""

    code = "quota_exceeded"


class ResumeNoMemoryError(CapacityError):
    """A paused sandbox has given its memory back, and the node had none for it in time. It is paused as before."""

    code = "resume_no_memory"


class DeadlineError(DsecError):
    """Not done within the time given. `outcome` says whether it may still happen."""

    code = "deadline_exceeded"


class PlatformError(DsecError):
    """dsec failed. Never reported as the result of a command."""

    code = "internal"


class UnavailableError(PlatformError):
    """The service or the node cannot be reached."""

    code = "unavailable"


class SandboxError(PlatformError):
    """A platform failure that concerns one sandbox."""

    code = "sandbox_error"


class LaunchError(SandboxError):
    """The sandbox never became ready, and nothing of it is left on the node. `step` names what failed."""

    code = "launch_failed"
    outcome = Outcome.GONE


class SandboxFaultError(SandboxError):
    """The sandbox's agent died or broke the protocol; the sandbox has failed (ruling 9)."""

    code = "sandbox_fault"
    outcome = Outcome.GONE


class FreezeTimeoutError(SandboxError):
    """The sandbox did not stop within its deadline and runs on."""

    code = "freeze_timeout"
    outcome = Outcome.UNCHANGED


class ProtocolError(PlatformError):
    """A peer sent what the contract does not allow. The channel is closed."""

    code = "protocol"


class StorageError(PlatformError):
    """A store, layer or disk failed."""

    code = "storage"


class HostError(PlatformError):
    """The machine lacks or refused something that dsec needs; the hint says how to get it."""

    code = "host"
    outcome = Outcome.UNCHANGED


class FileError(DsecError):
    """A file operation inside a sandbox failed. `detail["errno"]` is its errno name, such as EACCES."""

    code = "file_error"
    outcome = Outcome.UNCHANGED


class CommandError(DsecError):
    """A command did not exit with 0 and the caller had asked for `check=True`. `result` is the ExecResult."""

    code = "command_failed"
    outcome = Outcome.UNCHANGED
    result: Any = None


def _by_code() -> dict[str, type[DsecError]]:
    found: dict[str, type[DsecError]] = {}
    todo: list[type[DsecError]] = [DsecError]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if "code" in cls.__dict__ and cls is not DsecError:
            found.setdefault(cls.code, cls)
    return found


def error_class(code: str) -> type[DsecError]:
    """The class for a wire code. A code that this version does not know is a PlatformError."""
    return _by_code().get(code, PlatformError)
