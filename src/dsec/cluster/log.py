"""Ordered, durable records that many may read: events and trajectories. The contract of both forms."""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple, Protocol

from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import LOG_ID_BYTES_MAX, LOG_RECORD_BYTES_MAX, REGISTRY_KEY_BYTES_MAX

_SUBJECT: Final = re.compile(r"[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]+)*\Z")


class LogStream(enum.StrEnum):
    EVENTS = "EVENTS"  # sandbox.<node>, verdict.<node>; kept for days
    AUDIT = "AUDIT"  # api.<replica>; kept for months
    TRAJECTORIES = "TRAJ"  # <node>.<run>.<sandbox>; kept until the run is archived


# Of events. A node writes to its own subject alone; replicas and watchers write to the others.
OF_NODE: Final = "sandbox"
VERDICT: Final = "verdict"


def node_subject(node: str) -> str:
    return f"{OF_NODE}.{node}"


def verdict_subject(node: str) -> str:
    return f"{VERDICT}.{node}"


class Record(NamedTuple):
    sequence: int  # of its stream: later ones are larger, with gaps
    subject: str
    body: bytes


class Appends(Protocol):
    """What a node has of a Log. Raises UnavailableError as a Registry does."""

    async def append(self, stream: LogStream, subject: str, body: bytes, *, id: str, after: int | None = None) -> int:
        """Durable once it returns; the record's sequence. With an `id` that was appended lately: the sequence of then.

        Raises ConflictError when `after` is given and the last record of the subject is another (0: there is none), and
        that one is not of this `id`.
        """
        ...


class Log(Appends, Protocol):
    async def read(self, stream: LogStream, subject: str, *, after: int = 0, limit: int = 256) -> list[Record]:
        """Records of the subject, or of all below it, in order; those with a larger sequence than `after`."""
        ...

    async def bounds(self, stream: LogStream) -> tuple[int, int]:
        """The sequences of the first record that is there and of the last one that there was; none: (n + 1, n)."""
        ...

    async def last(self, stream: LogStream, subject: str) -> Record | None:
        """Of exactly this subject."""
        ...

    def follow(self, stream: LogStream, subject: str = "", *, after: int = 0) -> AsyncGenerator[Record, None]:
        """As `read`, and on with what comes; "" is everything. Ends never; close the generator."""
        ...

    async def purge(self, stream: LogStream, subject: str) -> None:
        """Removes the records of the subject and of all below it."""
        ...


def check_subject(subject: str) -> str:
    if len(subject) > REGISTRY_KEY_BYTES_MAX or not _SUBJECT.match(subject):
        raise InvalidArgumentError(f"{subject[:80]!r} is not a subject of the log")
    return subject


def check_record(body: bytes, id: str) -> None:
    if len(body) > LOG_RECORD_BYTES_MAX:
        raise InvalidArgumentError(f"a record of {len(body)} bytes is over {LOG_RECORD_BYTES_MAX}")
    if not id or len(id) > LOG_ID_BYTES_MAX or not id.isascii() or not id.isprintable():
        raise InvalidArgumentError(f"a record's id is 1 to {LOG_ID_BYTES_MAX} printable ASCII characters")
