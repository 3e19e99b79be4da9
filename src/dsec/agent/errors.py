"""ERR frames become typed errors. The text comes from inside a sandbox: it is cut and made printable."""

from __future__ import annotations

import copy
import re
from typing import Final

from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DsecError,
    ExecNotFoundError,
    FileError,
    InvalidArgumentError,
    NotFoundError,
    Outcome,
    PathNotFoundError,
    SandboxError,
    SessionNotFoundError,
    UnsupportedError,
)
from dsec.wire.agent import AgentError, Op

MESSAGE_CHARS_MAX: Final = 500
_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,40}\Z")
_ERRNO: Final = re.compile(r"[A-Z][A-Z0-9]{0,20}\Z")

# connect_failed is a FileError: like a file operation it failed inside the sandbox with an errno that the caller can
# act on (ECONNREFUSED: not listening yet), and nothing has changed.
_CLASSES: Final[dict[str, type[DsecError]]] = {
    "invalid": InvalidArgumentError,
    "command_not_found": InvalidArgumentError,
    "not_executable": InvalidArgumentError,
    "cwd_not_found": InvalidArgumentError,
    "user_not_found": InvalidArgumentError,
    "rlimit_refused": InvalidArgumentError,
    "argument_too_long": InvalidArgumentError,
    "unknown_op": UnsupportedError,
    "no_common_generation": UnsupportedError,
    "session_not_found": SessionNotFoundError,
    "wrong_sandbox": ConflictError,
    "session_busy": ConflictError,
    "too_many_execs": CapacityError,
    "too_many_sessions": CapacityError,
    "too_many_watches": CapacityError,
    "too_many_listeners": CapacityError,
    "too_many_streams": CapacityError,
    "exec_not_found": ExecNotFoundError,
    "superseded": ConflictError,
    "detached": ConflictError,
    "cancelled": ConflictError,
    "stdin_gap": ConflictError,
    "file": FileError,
    "not_a_file": FileError,
    "connect_failed": FileError,
}
_HINTS: Final = {
    "argument_too_long": "write it to a file in the sandbox and pass the path, or use stdin",
    "ENOSPC": "the sandbox's disk is full: remove files, or create it with more disk",
    "EDQUOT": "the sandbox's disk is full: remove files, or create it with more disk",
}
# The same numbers mean something else where the kernel is asked to watch.
_HINTS_OF_WATCHES: Final = {
    "ENOSPC": "no more directories can be watched: watch fewer, or without recursive=True",
    "EMFILE": "what runs in the sandbox has taken all inotify instances that it may have",
}
_NO_ROOM: Final = frozenset({"EAGAIN", "ENOMEM", "EMFILE", "ENFILE", "ENOSPC", "EDQUOT"})


def error_from_agent(error: AgentError, what: str) -> DsecError:
    """The typed error for an ERR frame. `detail` holds the agent's code, and the errno's name where there is one."""
    code = error.code if _CODE.match(error.code) else "unknown"
    errno = error.errno if error.errno is not None and _ERRNO.match(error.errno) else None
    detail = {"code": code} if errno is None else {"code": code, "errno": errno}
    message = f"{what}: {printable(error.message)}" if error.message else f"{what}: {code}"
    cls = _error_class(code, errno)
    of_errno = _HINTS_OF_WATCHES if what == Op.WATCH else _HINTS
    hint = _HINTS.get(code) or (of_errno.get(errno) if code == "file" and errno is not None else None)
    if issubclass(cls, SandboxError):
        return cls(message, outcome=Outcome.UNKNOWN, detail=detail, hint=hint)
    return cls(message, detail=detail, hint=hint)


def _error_class(code: str, errno: str | None) -> type[DsecError]:
    if code in ("file", "connect_failed") and errno == "ENOENT":
        return PathNotFoundError
    if code == "spawn_failed":
        return CapacityError if errno in _NO_ROOM else SandboxError
    found = _CLASSES.get(code)
    if found is not None:
        return found
    return NotFoundError if code.endswith("_not_found") else SandboxError


def printable(text: str) -> str:
    """Text of a sandbox, safe to show: bounded, and without control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:MESSAGE_CHARS_MAX])


def fresh(error: DsecError) -> DsecError:
    """A copy to raise: one error object that several tasks raise would collect the tracebacks of all of them."""
    new = copy.copy(error)
    new.__cause__ = error.__cause__
    return new
