"""When a failed request is tried again, and how long after. Pure."""

from __future__ import annotations

from typing import Final

from dsec.core.errors import CapacityError, DsecError, Outcome, UnavailableError

ATTEMPTS_MAX: Final = 6  # of one request, the first included: a wrong address is told within 2 s
ATTEMPTS_KNOWN_MAX: Final = 20  # of a service that has answered before: it is restarted, say, which may take 30 s
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
RETRY_AFTER_MAX_S: Final = 30.0  # a server that asks for more is not waited for


def is_retryable(error: DsecError, *, repeatable: bool) -> bool:
    """Whether sending the request again can do no harm and may help.

    `repeatable`: the request changes nothing, or carries a key or offset by which a second one is recognised.
    """
    if isinstance(error, CapacityError):
        return error.retry_after_s is not None and "queued_s" not in error.detail  # it has waited for its room already
    if isinstance(error, UnavailableError):
        return repeatable or error.outcome is Outcome.UNCHANGED
    return False


def retry_delay_s(
    error: DsecError, *, attempt: int, repeatable: bool, left_s: float, jitter: float, known: bool = False
) -> float | None:
    """Seconds to wait before the next attempt, None to give up.

    `attempt` counts failures before this one, `left_s` is what remains of the deadline, `jitter` is in 0 … 1, and
    `known` says that the service has been there before.
    """
    if attempt + 1 >= (ATTEMPTS_KNOWN_MAX if known else ATTEMPTS_MAX) or not is_retryable(error, repeatable=repeatable):
        return None
    if error.retry_after_s is not None:
        if error.retry_after_s > RETRY_AFTER_MAX_S:
            return None
        delay = max(error.retry_after_s, 0.0) * (1.0 + 0.25 * jitter)
    else:
        delay = backoff_s(attempt, jitter)
    return delay if delay < left_s else None


def backoff_s(attempt: int, jitter: float) -> float:
    """Doubles from BACKOFF_FIRST_S up to BACKOFF_MAX_S; between half and all of that, by `jitter`."""
    whole = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(attempt, 16))
    return whole * (0.5 + 0.5 * jitter)
