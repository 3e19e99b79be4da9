"""What sandboxes have used, for their owners' accounts (ruling 34)."""

from __future__ import annotations

import enum

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError


class UsageBy(enum.StrEnum):
    PROJECT = "project"  # a total for each project
    DAY = "day"  # a total for each project and day (UTC) on which sandboxes ended, or of today for those that live
    JOB = "job"  # a total for each job, of those whose last sandbox ended then; without days
    SANDBOX = "sandbox"  # a record for each


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sandboxes that ended in [since, until), in whole days for totals, and those that live unless `until` is past."""

    project: str | None = None  # this one and those below it; None: the caller's
    since: float = 0.0
    until: float | None = None
    by: UsageBy = UsageBy.PROJECT
    job: str | None = None  # only of this one, with by=sandbox and by=job
    limit: int = limits.LIST_PAGE_DEFAULT  # of records
    cursor: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= limits.LIST_PAGE_MAX:
            raise LimitError(f"a page has between 1 and {limits.LIST_PAGE_MAX} records, not {self.limit}")
        if self.since < 0 or (self.until is not None and self.until < self.since):
            raise InvalidArgumentError("until must not be before since, nor since before 1970")
        if self.job is not None and self.by not in (UsageBy.JOB, UsageBy.SANDBOX):
            raise InvalidArgumentError("usage of one job is told by job or by sandbox")


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. Memory and cores as asked for are `memory_bytes` and `cpu`; what it had is the rest."""

    sandbox: str
    project: str
    principal: str = ""
    job: str | None = None
    substrate: str = ""
    environment: str = ""
    created_at: float = 0.0
    ended_at: float | None = None  # None: it lives
    cause: str | None = None
    cpu: float = 0.0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    memory_gib_s: float = 0.0
    frozen_s: float = 0.0
    lived_s: float = 0.0
    output_bytes: int = 0
    sent_bytes: int = 0  # through the proxy
    received_bytes: int = 0


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Of the project itself, without those below it."""

    project: str
    day: str | None = None  # "2026-11-30"
    job: str | None = None  # with by=job
    sandboxes: int = 0
    cpu_s: float = 0.0
    memory_gib_s: float = 0.0
    frozen_s: float = 0.0
    lived_s: float = 0.0
    output_bytes: int = 0
    sent_bytes: int = 0  # through the proxy
    received_bytes: int = 0


class UsagePage(msgspec.Struct, frozen=True):
    totals: list[UsageTotal] = []
    records: list[UsageRecord] = []  # that live first, then the newest
    next: str | None = None  # cursor for the next page
    missing: list[str] = []  # nodes that did not answer: what they have is not in it


def added(one: UsageTotal, other: UsageTotal) -> UsageTotal:
    """Of the same project, day and job."""
    return UsageTotal(
        project=one.project,
        day=one.day,
        job=one.job,
        sandboxes=one.sandboxes + other.sandboxes,
        cpu_s=one.cpu_s + other.cpu_s,
        memory_gib_s=one.memory_gib_s + other.memory_gib_s,
        frozen_s=one.frozen_s + other.frozen_s,
        lived_s=one.lived_s + other.lived_s,
        output_bytes=one.output_bytes + other.output_bytes,
        sent_bytes=one.sent_bytes + other.sent_bytes,
        received_bytes=one.received_bytes + other.received_bytes,
    )
