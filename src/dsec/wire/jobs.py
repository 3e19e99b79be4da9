"""Jobs: sandboxes of one project that are paused, resumed and stopped by one call, and have a lease."""

from __future__ import annotations

import enum

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.wire.errors import ErrorBody
from dsec.wire.groups import GroupInfo, GroupNote


class OnMissed(enum.StrEnum):
    """What becomes of the sandboxes of a job whose lease is over."""

    PAUSE = "pause"  # those that can be; the others are stopped after the grace
    STOP = "stop"  # after the grace


class JobState(enum.StrEnum):
    RUNNING = "running"
    PAUSED = "paused"  # takes nothing new
    STOPPED = "stopped"  # for good: takes nothing new, and is kept for a day


class Because(enum.StrEnum):
    ASKED = "asked"
    LEASE = "lease"  # it was missed, or is good again


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`lease_s` None: no lease. Asked for again with the same terms, a job that is there is answered."""

    name: str
    lease_s: float | None = None
    on_missed: OnMissed = OnMissed.PAUSE
    grace_s: float = limits.JOB_GRACE_S_DEFAULT

    def __post_init__(self) -> None:
        parse_name(self.name, "job name")
        if self.lease_s is not None:
            _within("lease_s", self.lease_s, limits.JOB_LEASE_S_MIN, limits.JOB_LEASE_S_MAX)
        _within("grace_s", self.grace_s, 0.0, limits.JOB_GRACE_S_MAX)


class JobExtend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lease is good for at least `seconds` from now on, whatever heartbeats come or do not."""

    seconds: float

    def __post_init__(self) -> None:
        _within("seconds", self.seconds, limits.JOB_LEASE_S_MIN, limits.JOB_LEASE_S_MAX)


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """JOBS/<project>.<name>. How long ago a beat was is not in it: whoever watches counts that on a clock of its own,
    from when it has seen the number change. So no clock of any machine can end a lease early."""

    version: int = 1
    id: str  # another one for each job of a name
    name: str
    project: str
    principal: str  # who made it
    created_at: float
    lease_s: float | None
    on_missed: OnMissed
    grace_s: float
    state: JobState = JobState.RUNNING
    because: Because = Because.ASKED
    changed_at: float = 0.0
    order: int = 0  # grows with each change of the state: nodes refuse what is older than what they know
    settled: bool = True  # all sandboxes on all nodes are as the state says
    swept: bool = False  # and were looked at again after it was stopped: no create was under way any more
    graced: bool = False  # those that cannot be paused have been stopped, the grace being over
    beats: int = 0
    beat_at: float = 0.0  # wall time, to be shown
    extensions: int = 0
    extended_s: float = 0.0  # from the last extension on
    group: GroupNote | None = None

    def has_terms(self, request: JobRequest) -> bool:
        return (self.lease_s, self.on_missed, self.grace_s) == (request.lease_s, request.on_missed, request.grace_s)


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its owner sees it. `settled` False: the state is on its way to all its sandboxes."""

    name: str
    project: str
    principal: str
    created_at: float
    state: JobState
    because: Because
    changed_at: float
    settled: bool
    lease_s: float | None = None
    on_missed: OnMissed = OnMissed.PAUSE
    grace_s: float = 0.0
    heartbeat_at: float = 0.0
    group: bool = False  # its sandboxes have names for each other (`dsec group`)
    sandboxes: dict[str, int] | None = None  # by state, of those that have not ended; not in lists
    missing: list[str] = []  # nodes that did not answer: theirs are not counted


class JobPage(msgspec.Struct, frozen=True):
    jobs: list[JobInfo] = []
    next: str | None = None  # cursor for the next page


class JobOrderKind(enum.StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"  # and take nothing new of it
    CLEAR = "clear"  # end those that there are
    STOP_UNPAUSABLE = "stop_unpausable"  # those of backends that cannot pause


class JobOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """To a node: act on its sandboxes of a job, in order of their ids, beginning after `after`."""

    id: str  # of the job, not its name
    job: str
    project: str
    order: int
    kind: JobOrderKind
    after: str = ""


class JobItem(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox, and what is not done of it."""

    sandbox: str
    state: str
    error: ErrorBody | None = None


class JobPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has done for one call. `next`: it has more, after this id. `error`: it could not be asked."""

    node: str
    items: list[JobItem] = []
    next: str | None = None
    error: ErrorBody | None = None


class JobLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an answer to an order: parts, and at the end the job."""

    part: JobPart | None = None
    job: JobInfo | None = None
    error: ErrorBody | None = None


class JobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    project: str
    job: str
    id: str  # of the job


class JobCounts(msgspec.Struct, frozen=True):
    by_state: dict[str, int] = {}


def info_of(row: JobRow) -> JobInfo:
    return JobInfo(
        name=row.name,
        project=row.project,
        principal=row.principal,
        created_at=row.created_at,
        state=row.state,
        because=row.because,
        changed_at=row.changed_at,
        settled=row.settled,
        lease_s=row.lease_s,
        on_missed=row.on_missed,
        grace_s=row.grace_s,
        heartbeat_at=row.beat_at,
        group=row.group is not None,
    )


def group_of(row: JobRow) -> GroupInfo:
    starting = row.state is JobState.RUNNING and row.group is not None and not row.group.members
    return GroupInfo(
        name=row.name,
        project=row.project,
        principal=row.principal,
        created_at=row.created_at,
        state="starting" if starting else str(row.state),
        settled=row.settled,
        members={} if row.group is None else row.group.members,
    )


def _within(what: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{what} must be a number of seconds, not {value!r}"[:120])
    if not low <= value <= high:  # which NaN is not
        raise LimitError(f"{what} must be between {low:g} and {high:g} seconds")
