"""Who asks and what they may do, as the front door established it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from dsec.iam.projects import ROOT


class Right(enum.StrEnum):
    """Each includes the one before. The words are those of `wire.node.Right`."""

    READ = "read"
    USE = "use"
    ADMIN = "admin"


ALL_RIGHTS = frozenset(str(right) for right in Right)


@dataclass(frozen=True, slots=True)
class Principal:
    """`rights` is closed: who may use may read."""

    name: str
    project: str = ROOT
    rights: frozenset[str] = frozenset()
    expires_at: float | None = None
    local: bool = False  # known by the uid at the other end of the local socket, not by a token


def closed_rights(rights: Iterable[str]) -> frozenset[str]:
    """`rights` and what they include. Raises ValueError for a word that is no right."""
    order = list(Right)
    highest = max((order.index(Right(right)) for right in rights), default=-1)
    return frozenset(map(str, order[: highest + 1]))
