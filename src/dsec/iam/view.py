"""All projects, principals, grants and tokens in memory, as of one revision, with what they come to."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

from dsec.iam.principals import ORDER, Held, Right
from dsec.iam.projects import ROOT, lineage, reaches
from dsec.iam.rows import (
    KINDS,
    GrantRow,
    PrincipalRow,
    ProjectRow,
    Row,
    TokenRow,
    grant_key,
    principal_key,
    project_key,
    token_key,
)
from dsec.iam.store import Changes, Entry
from dsec.wire.codec import unpack
from dsec.wire.iam import Policy, Quota


@dataclass(frozen=True, slots=True)
class Rules:
    """What binds a project: policies and quotas of itself and of those above it, root first."""

    policies: tuple[tuple[str, Policy], ...] = ()
    quotas: tuple[tuple[str, Quota], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.policies or self.quotas)


class View:
    def __init__(self) -> None:
        self.revision = 0
        self._clear()

    def _clear(self) -> None:
        self.rows: dict[str, Row] = {}
        self.revisions: dict[str, int] = {}
        self.tokens_by_hash: dict[bytes, TokenRow] = {}
        self.counts: dict[str, dict[str, int]] = {}  # kind → project → of it and of all below
        self._children: dict[str, set[str]] = defaultdict(set)
        self._grants_of: dict[str, set[str]] = defaultdict(set)
        self._tokens_of: dict[str, set[str]] = defaultdict(set)
        self._rules: dict[str, Rules] = {}
        self.ruled = 0  # projects that have a policy or a quota

    # -- following the store -----------------------------------------------------------------------

    def follow(self, changes: Changes) -> None:
        if changes.whole:
            self._clear()
        for entry in changes.entries:
            self._take(entry)
        self.revision = changes.revision
        self._rules.clear()

    def _take(self, entry: Entry) -> None:
        old = self.rows.pop(entry.key, None)
        self.revisions.pop(entry.key, None)
        if old is not None:
            self._index(old, -1)
        if entry.value is None:
            return
        row = unpack(entry.value, KINDS[entry.key.partition("/")[0]])
        self.rows[entry.key] = row
        self.revisions[entry.key] = entry.revision
        self._index(row, 1)

    def _index(self, row: Row, step: int) -> None:
        match row:
            case ProjectRow():
                kind, project = "projects", row.path
                self.ruled += step * (row.quota != Quota() or row.policy != Policy())
                if project != ROOT:
                    _note(self._children, lineage(project)[-2], project, step)
            case PrincipalRow():
                kind, project = "principals", row.project
            case GrantRow():
                kind, project = "grants", row.project
                _note(self._grants_of, row.principal, row.id, step)
            case TokenRow():
                kind, project = "tokens", row.project
                _note(self._tokens_of, row.principal, row.id, step)
                if step > 0:
                    self.tokens_by_hash[row.hash] = row
                else:
                    self.tokens_by_hash.pop(row.hash, None)
        counts = self.counts.setdefault(kind, {})
        for path in lineage(project):
            counts[path] = counts.get(path, 0) + step
            if not counts[path]:
                del counts[path]

    # -- what there is -----------------------------------------------------------------------------

    def project(self, path: str) -> ProjectRow | None:
        return cast(ProjectRow | None, self.rows.get(project_key(path)))

    def principal(self, id: str) -> PrincipalRow | None:
        return cast(PrincipalRow | None, self.rows.get(principal_key(id)))

    def grant(self, id: str) -> GrantRow | None:
        return cast(GrantRow | None, self.rows.get(grant_key(id)))

    def token(self, id: str) -> TokenRow | None:
        return cast(TokenRow | None, self.rows.get(token_key(id)))

    def children(self, path: str) -> set[str]:
        return self._children.get(path, set())

    def grants_of(self, principal: str) -> list[GrantRow]:
        return [grant for id in self._grants_of.get(principal, ()) if (grant := self.grant(id)) is not None]

    def tokens_of(self, principal: str) -> list[TokenRow]:
        return [token for id in self._tokens_of.get(principal, ()) if (token := self.token(id)) is not None]

    def keys_of(self, principal: str) -> list[str]:
        """Of its grants and tokens."""
        grants = [grant_key(id) for id in self._grants_of.get(principal, ())]
        return [*grants, *(token_key(id) for id in self._tokens_of.get(principal, ()))]

    def count(self, kind: str, path: str) -> int:
        return self.counts.get(kind, {}).get(path, 0)

    def rules(self, path: str) -> Rules:
        """Of a project that may not be there: then those of the projects above it that are."""
        found = self._rules.get(path)
        if found is None:
            rows = [row for part in lineage(path) if (row := self.project(part)) is not None]
            found = self._rules[path] = Rules(
                tuple((row.path, row.policy) for row in rows if row.policy != Policy()),
                tuple((row.path, row.quota) for row in rows if row.quota != Quota()),
            )
        return found

    # -- what it comes to --------------------------------------------------------------------------

    def in_force(self, grant: GrantRow, now: float) -> float | None:
        """Until when: a grant lasts no longer than those that it came by, than their holders, and than its project.
        None: not any more."""
        until = math.inf
        here: GrantRow | None = grant
        while here is not None:
            until = min(until, math.inf if here.expires_at is None else here.expires_at)
            if until <= now or self.project(here.project) is None or self.principal(here.principal) is None:
                return None
            if here.parent is None:
                return until
            here = self.grant(here.parent)
        return None

    def held_by(self, token: TokenRow, now: float) -> tuple[Held, ...]:
        """Of each grant of its principal what lies within the token's own bounds."""
        found = []
        for grant in self.grants_of(token.principal):
            until = self.in_force(grant, now)
            if until is None:
                continue
            if reaches(grant.project, token.project):
                project = token.project
            elif reaches(token.project, grant.project):
                project = grant.project
            else:
                continue
            right = min(grant.right, token.right, key=ORDER.__getitem__)
            if right == Right.ADMIN and project != ROOT:
                right = str(Right.MANAGE)
            found.append(Held(project, right, grant.id, None if until == math.inf else until))
        found.sort(key=lambda held: (held.project.count("/"), held.project, -ORDER[held.right]))
        return tuple(found)


def _note(index: dict[str, set[str]], key: str, item: str, step: int) -> None:
    if step > 0:
        index[key].add(item)
        return
    index[key].discard(item)
    if not index[key]:
        del index[key]
