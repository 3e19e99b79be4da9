"""The one body in which errors travel: between node and API, and from the API to callers."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec.core.errors import DsecError, GoneError, Outcome, error_class
from dsec.core.states import ENDED
from dsec.wire.records import Sandbox


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    outcome: str = "unknown"
    hint: str | None = None
    sandbox: str | None = None
    exec: str | None = None
    step: str | None = None
    retry_after_s: float | None = None
    detail: dict[str, Any] = {}


def body_of(error: BaseException) -> ErrorBody:
    """An error that is not ours is told as `internal`, without its text: it may hold what callers must not see."""
    if not isinstance(error, DsecError):
        return ErrorBody(code="internal", message="internal error", hint="the log of the node has the details")
    return ErrorBody(
        code=error.code,
        message=error.message,
        outcome=str(error.outcome),
        hint=error.hint,
        sandbox=error.sandbox,
        exec=error.exec,
        step=error.step,
        retry_after_s=error.retry_after_s,
        detail=error.detail,
    )


def error_of(body: ErrorBody) -> DsecError:
    try:
        outcome = Outcome(body.outcome)
    except ValueError:
        outcome = Outcome.UNKNOWN
    return error_class(body.code)(
        body.message,
        hint=body.hint,
        outcome=outcome,
        sandbox=body.sandbox,
        exec=body.exec,
        step=body.step,
        retry_after_s=body.retry_after_s,
        detail=body.detail,
    )


def gone_error(view: Sandbox) -> GoneError:
    """Its tombstone, as an error: what any use of an ended sandbox gets."""
    ended = view.state if view.state in ENDED else "ending"
    why = f": {view.cause}" if view.cause else ""
    return GoneError(f"the sandbox is {ended}{why}", sandbox=view.id, detail=msgspec.to_builtins(view))
