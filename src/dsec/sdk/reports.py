"""What came of orders to many sandboxes."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec.wire.jobs import JobInfo, JobItem


@dataclass(frozen=True, slots=True)
class JobReport:
    """What came of a pause, resume or stop. What is not done is gone on with by the service."""

    job: JobInfo
    done: int  # sandboxes
    failed: list[JobItem] = field(default_factory=list)  # each with its error, such as `unsupported`
    missing: dict[str, str] = field(default_factory=dict)  # nodes that could not be asked, and why

    @property
    def ok(self) -> bool:
        """All sandboxes on all nodes."""
        return not self.failed and not self.missing
