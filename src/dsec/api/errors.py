"""The one place that knows how errors look in HTTP."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.iam.secrets import PREFIX, without_tokens
from dsec.observe.logs import get_logger
from dsec.wire.codec import to_json
from dsec.wire.errors import ErrorBody, body_of

log = get_logger(__name__)

STATUS: Final[dict[str, int]] = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "sandbox_not_found": 404,
    "exec_not_found": 404,
    "environment_not_found": 404,
    "session_not_found": 404,
    "volume_not_found": 404,
    "path_not_found": 404,
    "conflict": 409,
    "idempotency_mismatch": 409,
    "sandbox_state": 409,
    "file_error": 409,
    "gone": 410,
    "node_retired": 410,
    "limit_exceeded": 413,
    "no_capacity": 429,
    "quota_exceeded": 429,
    "resume_no_memory": 429,
    "internal": 500,
    "sandbox_error": 500,
    "launch_failed": 500,
    "sandbox_fault": 500,
    "freeze_timeout": 500,
    "protocol": 500,
    "storage": 500,
    "host": 500,
    "command_failed": 500,
    "unsupported": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
WEBSOCKET_ERROR: Final = 4000  # close code; a text message {"error": …} comes before it

Headers = list[tuple[bytes, bytes]]


class MethodError(InvalidArgumentError):
    """The path exists and does not have this method."""

    def __init__(self, method: str, allowed: list[str]) -> None:
        super().__init__(f"this path has no {method[:20]}", hint=f"it has {', '.join(allowed)}")
        self.allowed = allowed


class RangeError(InvalidArgumentError):
    """The range asked for begins after the file's end."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the range begins after the end of the file, which has {size} bytes")
        self.size = size


def told(error: BaseException) -> ErrorBody:
    """What the caller is told. An error that is not ours is logged here, once, and told as `internal`."""
    if not isinstance(error, DsecError):
        log.error("a request failed", exc_info=error)
    body = body_of(error)
    # Messages repeat what was asked for, and somebody has put a token into a path: callers log what they are told.
    return msgspec.structs.replace(body, message=without_tokens(body.message)) if PREFIX in body.message else body


def status_of(error: BaseException) -> int:
    if isinstance(error, MethodError):
        return 405
    if isinstance(error, RangeError):
        return 416
    return STATUS.get(error.code, 500) if isinstance(error, DsecError) else 500


def headers_of(error: BaseException, body: ErrorBody) -> Headers:
    """Headers that say in HTTP what the body says."""
    headers: Headers = []
    if body.retry_after_s is not None and math.isfinite(body.retry_after_s):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(body.retry_after_s))))
    if isinstance(error, MethodError):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, RangeError):
        headers.append((b"content-range", b"bytes */%d" % error.size))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_line(error: BaseException) -> bytes:
    """`{"error": …}`: the last line of NDJSON, and the text before a WebSocket's close."""
    return to_json({"error": told(error)})
