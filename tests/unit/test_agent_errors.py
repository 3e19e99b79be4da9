"""ERR frames become the error that a caller can act on."""

from __future__ import annotations

import pytest

from dsec.agent.errors import MESSAGE_CHARS_MAX, error_from_agent, fresh
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
from dsec.wire.agent import AgentError


@pytest.mark.parametrize(
    ("op", "errno", "hint"),
    [("write", "ENOSPC", "disk is full"), ("watch", "ENOSPC", "watch fewer"), ("watch", "EMFILE", "inotify instances")],
)
def test_a_hint_is_of_what_was_asked_for(op: str, errno: str, hint: str) -> None:
    assert hint in str(error_from_agent(AgentError("file", "/work", errno), op).hint)


@pytest.mark.parametrize(
    ("code", "errno", "kind"),
    [
        ("invalid", None, InvalidArgumentError),
        ("command_not_found", "ENOENT", InvalidArgumentError),
        ("not_executable", "EACCES", InvalidArgumentError),
        ("cwd_not_found", None, InvalidArgumentError),
        ("user_not_found", None, InvalidArgumentError),
        ("rlimit_refused", "EPERM", InvalidArgumentError),
        ("argument_too_long", "E2BIG", InvalidArgumentError),
        ("session_not_found", None, SessionNotFoundError),
        ("session_busy", None, ConflictError),
        ("too_many_execs", None, CapacityError),
        ("exec_not_found", None, ExecNotFoundError),
        ("superseded", None, ConflictError),
        ("stdin_gap", None, ConflictError),
        ("unknown_op", None, UnsupportedError),
        ("no_common_generation", None, UnsupportedError),
        ("file", "ENOENT", PathNotFoundError),
        ("file", "EACCES", FileError),
        ("file", None, FileError),
        ("not_a_file", None, FileError),
        ("connect_failed", "ECONNREFUSED", FileError),
        ("connect_failed", "ENOENT", PathNotFoundError),
        ("spawn_failed", "EAGAIN", CapacityError),
        ("spawn_failed", "EIO", SandboxError),
        ("thing_of_tomorrow_not_found", None, NotFoundError),
        ("thing_of_tomorrow", None, SandboxError),
        ("", None, SandboxError),
    ],
)
def test_each_code_has_its_class(code: str, errno: str | None, kind: type[DsecError]) -> None:
    error = error_from_agent(AgentError(code, "why", errno), "op")

    assert type(error) is kind
    assert error.detail.get("errno") == errno
    assert error.message == "op: why"


def test_a_refusal_says_that_nothing_happened_and_an_unknown_failure_does_not() -> None:
    assert error_from_agent(AgentError("command_not_found", ""), "exec").outcome is Outcome.UNCHANGED
    assert error_from_agent(AgentError("strange", ""), "exec").outcome is Outcome.UNKNOWN


def test_text_from_inside_is_bounded_and_printable() -> None:
    error = error_from_agent(AgentError("x\n", "\x1b]0;title\x07" + "\u202e" + "a" * 10_000, "E\n"), "op")

    assert error.detail == {"code": "unknown"}
    assert str(error).isprintable()
    assert len(str(error)) <= MESSAGE_CHARS_MAX + len("op: ")


def test_a_fresh_copy_is_equal_and_another_object() -> None:
    error = FileError("m", hint="h", sandbox="sbx", step="s", detail={"errno": "EIO"})
    error.__cause__ = ValueError("x")

    copy = fresh(error)

    assert copy is not error
    assert (type(copy), copy.__dict__, copy.args, copy.__cause__) == (
        FileError,
        error.__dict__,
        error.args,
        error.__cause__,
    )
