"""What happened to sandboxes and nodes, as an ordered stream that a reader takes up again where it left it.

A node writes an event with the change that it is about, and numbers them. Positions are of the stream that is read: of
one node's journal, or of the log of a cluster. What a node has told twice (the log was away) has its number twice.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_sandbox_id
from dsec.core.spec import check_labels
from dsec.wire.node import reaches

OLDEST = "oldest"


class EventKind(enum.StrEnum):
    CREATED = "created"  # its making has begun
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    RESTED = "rested"  # nobody has used it for a while; `detail` is the rung: pause, page_out, sleep
    SNAPSHOT = "snapshot"
    ROLLED_BACK = "rolled_back"
    EGRESS_DENIED = "egress_denied"  # it asked for what it may not reach: `denied`, and as words `detail`
    DESTROYED = "destroyed"  # by somebody
    EXPIRED = "expired"  # its time to live was over
    FAILED = "failed"  # `cause` says why
    RETURNED = "returned"  # its node had been declared lost, and is back with it
    # Of nodes, for operators:
    NODE_JOINED = "node_joined"
    NODE_SUSPECT = "node_suspect"
    NODE_LOST = "node_lost"
    NODE_RETURNED = "node_returned"
    NODE_RETIRED = "node_retired"
    NODE_FLOODS = "node_floods"  # it sends far too much, and is not listened to for a minute
    # What a reader has missed. For everybody.
    GAP = "gap"


ENDS = frozenset((EventKind.DESTROYED, EventKind.EXPIRED, EventKind.FAILED))


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox was given."""

    created_at: float
    cpu: float
    memory_bytes: int
    pids_max: int
    network: str
    disk_bytes: int | None = None


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a sandbox asked for and may not reach."""

    host: str  # the name that was asked for, or the address
    port: int = 0  # 0: a question after the name
    reason: str = ""  # wire.egress.DeniedReason
    count: int = 1


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str  # EventKind; later versions may have more
    at: float
    node: str = ""
    number: int = 0  # among those of its node; 0: not told by one
    position: str = ""  # to go on after it
    sandbox: str | None = None
    project: str | None = None
    name: str | None = None
    labels: dict[str, str] = {}
    substrate: str | None = None
    environment: str | None = None
    incarnation: int = 1
    cause: str | None = None  # of an end: core.states.EndCause
    detail: str | None = None
    snapshot: str | None = None
    principal: str | None = None  # who made the sandbox
    job: str | None = None
    made: Figures | None = None  # of `created`
    denied: tuple[Denied, ...] = ()  # of `egress_denied`: the most frequent; `denied_more`: how often others
    denied_more: int = 0


class Events(msgspec.Struct, frozen=True):
    """One record of the log: some of one node, in order."""

    events: tuple[Event, ...] = ()


class EventLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of the stream to a caller: an event, or only how far it has been read."""

    event: Event | None = None
    position: str = ""


class EventQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    after: str | None = None  # a position, or "oldest"; None: what comes from now on, or when not following all
    follow: bool = True
    project: str | None = None  # this one and those below; None: all that the caller sees
    labels: dict[str, str] = {}
    sandbox: str | None = None
    job: str | None = None
    kinds: tuple[str, ...] = ()  # empty: all

    def __post_init__(self) -> None:
        check_labels(self.labels)
        if self.sandbox is not None:
            parse_sandbox_id(self.sandbox)
        known = frozenset(map(str, EventKind))
        for kind in self.kinds:
            if kind not in known:
                raise InvalidArgumentError(f"there is no event {kind[:40]!r}", hint=", ".join(EventKind))
        if self.after is not None and self.after != OLDEST:
            decode_position(self.after)


class Position(NamedTuple):
    """All before this record has been read, and of the record the first `done` events."""

    origin: str  # whose stream: a node's id, or of a cluster its unit
    record: int
    done: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.record, self.done


def encode_position(position: Position) -> str:
    return f"{position.origin}:{position.record}:{position.done}"


def decode_position(text: str) -> Position:
    """Raises InvalidArgumentError."""
    parts = text[:128].split(":")
    if len(parts) != 3 or not parts[0] or not all(part.isdecimal() and part.isascii() for part in parts[1:]):
        raise InvalidArgumentError(f"{text[:80]!r} is not a position of events", hint="take it from an event")
    return Position(parts[0], min(int(parts[1]), limits.EVENT_NUMBER_MAX), min(int(parts[2]), limits.EVENT_NUMBER_MAX))


def is_wanted(event: Event, query: EventQuery, seen: str | None) -> bool:
    """`seen`: below which path the caller sees; None: everything, and then nodes, too."""
    if event.kind == EventKind.GAP:
        return True
    if query.kinds and event.kind not in query.kinds:
        return False
    if event.sandbox is None:
        chosen = query.project is not None or query.sandbox is not None or query.job is not None or query.labels
        return seen is None and not chosen
    project = event.project or ""
    return (
        reaches(seen, project)
        and reaches(query.project, project)
        and query.sandbox in (None, event.sandbox)
        and query.job in (None, event.job)
        and all(event.labels.get(key) == value for key, value in query.labels.items())
    )
