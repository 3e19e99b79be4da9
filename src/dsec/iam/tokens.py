"""Tokens: made once, shown once, replaced without a gap, revoked."""

from __future__ import annotations

import math

import msgspec

from dsec.core import limits
from dsec.core.errors import ConflictError, NotFoundError
from dsec.iam.change import Change
from dsec.iam.delegation import Delegation
from dsec.iam.directory import Directory, is_over, name_of
from dsec.iam.principals import ORDER, Principal, Right
from dsec.iam.projects import lineage, parse_project
from dsec.iam.rows import TokenRow
from dsec.iam.secrets import digest_of, new_id, new_token


class Tokens:
    """
    text, token = await tokens.create("ci", project="/team", right="use", ttl_s=3600, by=root)
    principal = directory.authenticate(text)           # raises AuthError
    """

    def __init__(self, directory: Directory, delegation: Delegation) -> None:
        self._directory = directory
        self._delegation = delegation

    async def create(
        self, name: str, *, project: str, right: str = "use", ttl_s: float | None = None, by: Principal
    ) -> tuple[str, TokenRow]:
        """The token's text and what is kept of it. Project, principal and grant are made when they are new.

        `name`: of a principal of the project, or the id of any; the token is good for that project and those below.

        Raises ForbiddenError when `by` would give more than it has: project, right or time.
        """
        directory, project, right = self._directory, parse_project(project), str(Right(right))
        text = new_token()

        def decide(change: Change) -> TokenRow:
            held = directory.may_give(by, project, right)
            change.rely_on(held)
            for path in lineage(project):
                if directory.view.project(path) is None:
                    directory.new_project(change, path, by)
            who = self._delegation.principal_for(change, name, project, by)
            lasting = directory.end_of(None, by, held)
            if not self._delegation.has(who.id, project, right, lasting):
                self._delegation.give(change, who, project, right, lasting, held=held, by=by)
            directory.check_room("tokens", project)
            id = new_id("tok")
            row = TokenRow(
                id=id,
                hash=digest_of(text),
                principal=who.id,
                project=project,
                right=right,
                created_at=directory.now(),
                created_by=name_of(by),
                expires_at=directory.end_of(ttl_s, by, held),
                family=id,
            )
            change.put(row)
            change.touch(project)
            return row

        await directory.make_room(project)
        return text, await directory.change(decide)

    async def rotate(
        self, id: str, *, overlap_s: float, ttl_s: float | None = None, by: Principal
    ) -> tuple[str, TokenRow]:
        """A new token in the place of one that is good, which ends `overlap_s` from now at the latest.

        Who holds a token may rotate it, without gaining time by that; so may who manages its project.
        """
        directory, text = self._directory, new_token()

        def decide(change: Change) -> TokenRow:
            old = self._one(id, by)
            now = directory.now()
            if is_over(old, now):
                raise ConflictError("the token is not good any more", hint="make a new one: dsec token create")
            wanted = old.expires_at if ttl_s is None else now + ttl_s
            if by.token == id:
                ends = [end for end in (wanted, old.expires_at) if end is not None]
            else:
                held = directory.may_give(by, old.project, old.right)
                change.rely_on(held)
                ends = [end for end in (wanted, by.expires_at, held.expires_at) if end is not None]
            directory.check_room("tokens", old.project)
            until = min(now + overlap_s, math.inf if old.expires_at is None else old.expires_at)
            row = msgspec.structs.replace(
                old,
                id=new_id("tok"),
                hash=digest_of(text),
                created_at=now,
                created_by=name_of(by),
                expires_at=min(ends, default=None),
                generation=old.generation + 1,
            )
            change.put(msgspec.structs.replace(old, expires_at=until), row)
            change.touch(old.project)
            if (who := directory.view.principal(old.principal)) is not None:
                change.put(who)
            return row

        known = directory.view.token(id)
        await directory.make_room("/" if known is None else known.project)
        return text, await directory.change(decide)

    def list(self, *, by: Principal) -> list[TokenRow]:
        """Those of projects that `by` manages, newest first."""
        self._directory.refresh_if_due()
        rows = [row for row in self._directory.view.rows.values() if isinstance(row, TokenRow)]
        found = [row for row in rows if by.best(row.project, Right.MANAGE) is not None]
        return sorted(found, key=lambda row: row.created_at, reverse=True)

    async def revoke(self, id: str, *, by: Principal) -> TokenRow:
        """And those that came of it by rotation: who has stolen one may have rotated it. Takes effect here with the
        next request. Idempotent. Raises NotFoundError, also for another project's token."""

        def decide(change: Change) -> bool:
            row = self._one(id, by)
            later = [
                each
                for each in self._directory.view.tokens_of(row.principal)
                if each.family == row.family and each.generation > row.generation
            ]
            due = [each for each in (row, *later) if each.revoked_at is None]
            now = self._directory.now()
            for each in due[: limits.IAM_BATCH_MAX]:
                change.put(msgspec.structs.replace(each, revoked_at=now))
            return len(due) <= limits.IAM_BATCH_MAX

        await self._directory.change_in_pieces(decide)
        row = self._directory.view.token(id)
        if row is None:
            raise NotFoundError(f"there is no token {id[:40]!r}", hint="`dsec token ls` lists those that you see")
        return row

    def _one(self, id: str, by: Principal) -> TokenRow:
        row = self._directory.view.token(id)
        held = None if row is None else by.best(row.project, Right.MANAGE)
        if row is None or (by.token != id and (held is None or ORDER[row.right] > ORDER[held.right])):
            raise NotFoundError(f"there is no token {id[:40]!r}", hint="`dsec token ls` lists those that you see")
        return row
