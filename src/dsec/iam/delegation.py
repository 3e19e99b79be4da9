"""Principals and grants: who has which right over which project, and from whom.

A grant stands on the one by which its giver had the right: when that one goes, or its holder, so does this one.
"""

from __future__ import annotations

import math

from dsec.core import limits
from dsec.core.errors import CapacityError, NotFoundError
from dsec.iam.change import Change
from dsec.iam.directory import Directory, name_of
from dsec.iam.principals import ORDER, Held, Principal, Right, missing_right
from dsec.iam.projects import ROOT, parse_project, reaches
from dsec.iam.rows import GrantRow, PrincipalRow, grant_key, principal_id, principal_key
from dsec.iam.secrets import new_id


class Delegation:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    # -- principals --------------------------------------------------------------------------------

    def principals(self, *, by: Principal) -> list[PrincipalRow]:
        """Those of projects that `by` manages."""
        self._directory.refresh_if_due()
        rows = [row for row in self._directory.view.rows.values() if isinstance(row, PrincipalRow)]
        return sorted((row for row in rows if by.best(row.project, Right.MANAGE)), key=lambda row: row.id)

    async def remove_principal(self, id: str, *, by: Principal) -> None:
        """With its tokens and grants; what it has given to others is over, too. Raises NotFoundError."""
        view = self._directory.view

        def decide(change: Change) -> bool:
            row = view.principal(id)
            held = None if row is None else by.best(row.project, Right.MANAGE)
            if row is None or held is None:
                raise NotFoundError(f"there is no principal {id[:80]!r}", hint="`dsec principal ls` lists yours")
            if any(grant.right == Right.ADMIN for grant in view.grants_of(id)):
                held = by.require(ROOT, Right.ADMIN)
            change.rely_on(held)
            inside = view.keys_of(id)
            for key in inside[: limits.IAM_BATCH_MAX - 1]:
                change.delete(key)
            if len(inside) >= limits.IAM_BATCH_MAX:
                return False
            change.delete(principal_key(id))
            return True

        await self._directory.change_in_pieces(decide)

    def principal_for(self, change: Change, named: str, project: str, by: Principal) -> PrincipalRow:
        """By id, or by name in the project; made when it is new, in a project that `by` manages."""
        directory = self._directory
        id = named if "@/" in named else principal_id(named, project)
        known = directory.view.principal(id)
        if known is not None:
            change.put(known)  # whoever removes it meanwhile is overtaken
            return known
        name, _, rest = id.rpartition("@/")
        home = parse_project(f"/{rest}")
        if by.best(home, Right.MANAGE) is None or (home != project and directory.view.project(home) is None):
            raise NotFoundError(f"there is no principal {id[:80]!r}", hint="a principal is NAME@/PROJECT")
        directory.check_room("principals", home)
        row = PrincipalRow(name=name, project=home, created_at=directory.now(), created_by=name_of(by))
        change.put(row)
        change.touch(home)
        return row

    # -- grants ------------------------------------------------------------------------------------

    def grants(self, *, by: Principal) -> list[tuple[GrantRow, bool]]:
        """Those over projects that `by` manages, and its own there, newest first; and whether each is in force."""
        self._directory.refresh_if_due()
        view, now = self._directory.view, self._directory.now()
        rows = [row for row in view.rows.values() if isinstance(row, GrantRow)]
        seen = [row for row in rows if self._is_own(row, by) or by.best(row.project, Right.MANAGE)]
        found = [(row, view.in_force(row, now) is not None) for row in seen]
        return sorted(found, key=lambda item: item[0].created_at, reverse=True)

    async def grant(
        self, principal: str, *, project: str, right: str, ttl_s: float | None = None, by: Principal
    ) -> GrantRow:
        """`principal`: its id, or a name in `project`, which is made when it is new there.

        Raises ForbiddenError when `by` would give more than it has: project, right, or time.
        """
        directory, project, right = self._directory, parse_project(project), str(Right(right))

        def decide(change: Change) -> GrantRow:
            directory.existing(project)
            held = directory.may_give(by, project, right)
            change.rely_on(held)
            who = self.principal_for(change, principal, project, by)
            return self.give(change, who, project, right, directory.end_of(ttl_s, by, held), held=held, by=by)

        await directory.make_room(project)
        return await directory.change(decide)

    def give(
        self,
        change: Change,
        who: PrincipalRow,
        project: str,
        right: str,
        expires_at: float | None,
        *,
        held: Held,
        by: Principal,
    ) -> GrantRow:
        """By `held`, which covers it."""
        directory = self._directory
        directory.check_room("grants", project)
        parent = None if held.grant is None else directory.view.grant(held.grant)
        depth = 0 if parent is None else parent.depth + 1
        if depth > limits.DELEGATIONS_MAX:
            raise CapacityError(
                f"rights are handed on at most {limits.DELEGATIONS_MAX} times in a row",
                hint="have it granted by somebody nearer to the root",
            )
        row = GrantRow(
            id=new_id("grt"),
            principal=who.id,
            project=project,
            right=right,
            created_at=directory.now(),
            created_by=name_of(by),
            expires_at=expires_at,
            parent=None if parent is None else parent.id,
            depth=depth,
        )
        change.put(row)
        change.touch(project)
        return row

    def has(self, principal: str, project: str, right: str, until: float | None) -> bool:
        """Whether it has that right there already, for as long."""
        view, now = self._directory.view, self._directory.now()
        end = math.inf if until is None else until
        return any(
            reaches(grant.project, project)
            and ORDER[grant.right] >= ORDER[right]
            and (view.in_force(grant, now) or 0.0) >= end
            for grant in view.grants_of(principal)
        )

    async def revoke(self, id: str, *, by: Principal) -> None:
        """And with it what was given by it. Its holder may give it back, with a token that has all of it.

        Raises NotFoundError, ForbiddenError.
        """
        view = self._directory.view

        def decide(change: Change) -> None:
            row = view.grant(id)
            held = None if row is None else by.best(row.project, Right.MANAGE)
            mine = row is not None and self._is_own(row, by, whole=True)
            if row is None or (held is None and not mine):
                raise NotFoundError(f"there is no grant {id[:40]!r}", hint="`dsec grant ls` lists them")
            if held is not None and not mine:
                if ORDER[row.right] > ORDER[held.right]:
                    raise missing_right(by, row.project, row.right)
                change.rely_on(held)
            change.delete(grant_key(id))

        await self._directory.change(decide)

    def _is_own(self, row: GrantRow, by: Principal, *, whole: bool = False) -> bool:
        """Of who asks, and within the token that was shown: who manages a project may have made that for a principal of
        another. `whole`: the token has all of the right, too."""
        token = None if by.token is None else self._directory.view.token(by.token)
        if token is None or row.principal != token.principal or not reaches(token.project, row.project):
            return False
        return not whole or ORDER[token.right] >= ORDER[row.right]
