"""Who asks and what they may do, as the front door established it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dsec.core.errors import ForbiddenError, NotFoundError
from dsec.iam.projects import ROOT, reaches


class Right(enum.StrEnum):
    """Each includes the one before. The words are those of `wire.node.Right`."""

    READ = "read"
    USE = "use"
    MANAGE = "manage"
    ADMIN = "admin"


ORDER = {str(right): place for place, right in enumerate(Right)}
ALL_RIGHTS = frozenset(str(right) for right in Right)
_UP_TO = [frozenset(list(ORDER)[:count]) for count in range(len(ORDER) + 1)]


@dataclass(frozen=True, slots=True)
class Held:
    """A right over a project and all below it. `grant` says by which grant; None: by being root of the machine."""

    project: str
    right: str
    grant: str | None = None
    expires_at: float | None = None

    def covers(self, project: str, right: str) -> bool:
        return ORDER[self.right] >= ORDER[right] and reaches(self.project, project)


@dataclass(frozen=True, slots=True)
class Principal:
    """Acting within `project`, with `rights` there, which are closed: who may use may read."""

    name: str
    project: str = ROOT
    rights: frozenset[str] = frozenset()
    expires_at: float | None = None
    local: bool = False  # known by the uid at the other end of the local socket, not by a token
    id: str = ""  # "name@/project"
    token: str | None = None  # id of the token that was shown
    held: tuple[Held, ...] = ()

    def best(self, project: str, right: str, *, at: float | None = None) -> Held | None:
        """What of it covers `right` over `project`, for the longest time."""
        found = [held for held in self.held if held.covers(project, right)]
        return max(found, key=lambda held: float("inf") if held.expires_at is None else held.expires_at, default=None)

    def require(self, project: str, right: str) -> Held:
        """Raises NotFoundError for a project that it does not even see, ForbiddenError with what is missing."""
        found = self.best(project, right)
        if found is not None:
            return found
        if self.best(project, Right.READ) is None:
            raise no_project(project)
        raise missing_right(self, project, right)

    def within(self, project: str) -> Principal:
        """The same one, with what it may do there and below, and no more. Raises NotFoundError when that is nothing."""
        held = tuple(
            item if reaches(project, item.project) else replace(item, project=project)
            for item in self.held
            if reaches(project, item.project) or reaches(item.project, project)
        )
        if project != ROOT:  # the whole service is nothing that a project holds
            held = tuple(replace(item, right=str(Right.MANAGE)) if item.right == Right.ADMIN else item for item in held)
        here = [item for item in held if reaches(item.project, project)]
        if not here:
            raise no_project(project)
        best = max(here, key=lambda item: ORDER[item.right])
        ends = [end for end in (self.expires_at, best.expires_at) if end is not None]
        return replace(
            self,
            project=project,
            rights=closed_rights((best.right,)),
            expires_at=min(ends, default=None),
            held=held,
        )


def closed_rights(rights: Iterable[str]) -> frozenset[str]:
    """`rights` and what they include. Raises ValueError for a word that is no right."""
    return _UP_TO[max((ORDER[Right(right)] for right in rights), default=-1) + 1]


def highest_right(rights: Iterable[str]) -> str:
    """Raises ValueError for a word that is no right, and for no word at all."""
    return max((str(Right(right)) for right in rights), key=ORDER.__getitem__)


def no_project(project: str) -> NotFoundError:
    return NotFoundError(f"there is no project {project[:80]!r}", hint="`dsec project ls` lists those that you see")


def missing_right(who: Principal, project: str, right: str) -> ForbiddenError:
    held = max((item.right for item in who.held if reaches(item.project, project)), key=ORDER.__getitem__, default=None)
    return ForbiddenError(
        f"this needs the right {right!s} over {project}, which {who.name!r} does not have",
        hint=f"who has the right manage over {project} can give it: dsec grant add",
        detail={"right": str(right), "project": project, "held": held},
    )
