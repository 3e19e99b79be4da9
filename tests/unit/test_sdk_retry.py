"""When a request is sent again: pure decisions."""

from __future__ import annotations

import pytest

from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    DsecError,
    InvalidArgumentError,
    LaunchError,
    Outcome,
    UnavailableError,
)
from dsec.sdk.retry import ATTEMPTS_MAX, BACKOFF_MAX_S, backoff_s, is_retryable, retry_delay_s

REFUSED = UnavailableError("refused", outcome=Outcome.UNCHANGED)
LOST = UnavailableError("lost", outcome=Outcome.UNKNOWN)


@pytest.mark.parametrize(
    ("error", "repeatable", "expected"),
    [
        (REFUSED, False, True),
        (REFUSED, True, True),
        (LOST, False, False),  # it may have happened
        (LOST, True, True),
        (CapacityError("full", retry_after_s=1.0), False, True),
        (CapacityError("full"), True, False),  # the service does not think that waiting helps
        (DeadlineError("late"), True, False),
        (InvalidArgumentError("no"), True, False),
        (LaunchError("no"), True, False),
    ],
)
def test_only_what_can_do_no_harm_is_sent_again(error: DsecError, repeatable: bool, expected: bool) -> None:
    assert is_retryable(error, repeatable=repeatable) is expected


def test_attempts_are_bounded() -> None:
    delays = [retry_delay_s(LOST, attempt=n, repeatable=True, left_s=60, jitter=0.5) for n in range(ATTEMPTS_MAX)]

    assert all(delay is not None for delay in delays[:-1])
    assert delays[-1] is None


def test_a_service_that_has_answered_before_is_waited_for_longer() -> None:
    def waited(*, known: bool) -> float:
        delays = [
            retry_delay_s(LOST, attempt=n, repeatable=True, left_s=60, jitter=1.0, known=known) for n in range(100)
        ]
        return sum(delay or 0.0 for delay in delays)

    assert waited(known=False) < 2
    assert 20 < waited(known=True) < 45


def test_nothing_is_tried_after_the_deadline() -> None:
    assert retry_delay_s(LOST, attempt=0, repeatable=True, left_s=0.0, jitter=0.0) is None


def test_what_the_service_asks_for_is_waited_and_not_less() -> None:
    error = CapacityError("full", retry_after_s=2.0)

    delays = [retry_delay_s(error, attempt=0, repeatable=False, left_s=60, jitter=j) for j in (0.0, 1.0)]

    assert delays == [2.0, 2.5]
    assert retry_delay_s(error, attempt=0, repeatable=False, left_s=1.9, jitter=0.0) is None


def test_a_service_that_asks_for_an_hour_is_not_waited_for() -> None:
    error = CapacityError("full", retry_after_s=3_600.0)

    assert retry_delay_s(error, attempt=0, repeatable=True, left_s=1e6, jitter=0.0) is None


def test_pauses_grow_and_stay_bounded() -> None:
    least = [backoff_s(n, 0.0) for n in range(40)]

    assert least == sorted(least)
    assert backoff_s(39, 1.0) == BACKOFF_MAX_S
