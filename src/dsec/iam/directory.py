"""Who may ask: projects, principals, grants and tokens in memory, and how changes to them are made.

Reading is from memory, which follows the store within IAM_STALE_S. A change is decided on what memory says, and
written only if the store still says the same; else it is decided again.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from dsec.core import limits
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import AuthError, CapacityError, ForbiddenError, InvalidArgumentError, UnavailableError
from dsec.iam.change import Change
from dsec.iam.principals import ORDER, Held, Principal, Right, closed_rights, no_project
from dsec.iam.projects import ROOT, lineage, parent_of, parse_project
from dsec.iam.rows import GrantRow, ProjectRow, TokenRow, key_of
from dsec.iam.secrets import digest_of
from dsec.iam.store import Batch, IamStore, OvertakenError
from dsec.iam.view import Rules, View

_SERVICE: Final = "dsec"
_SHARE: Final = 2  # one project below the root has at most a half of what there may be of anything
_MOST: Final = {
    "projects": limits.PROJECTS_MAX,
    "principals": limits.PRINCIPALS_MAX,
    "grants": limits.GRANTS_MAX,
    "tokens": limits.TOKENS_MAX,
}

T = TypeVar("T")


class Directory:
    """What the other modules of this package make their changes through."""

    def __init__(self, store: IamStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._looked_at = -math.inf
        self._held: dict[str, tuple[int, float, tuple[Held, ...]]] = {}
        self.view = View()

    @classmethod
    async def open(cls, store: IamStore, *, clock: Clock | None = None) -> Directory:
        """With the root project, which is made with the store. Raises StorageError."""
        directory = cls(store, clock=clock or SystemClock())
        directory.refresh()
        if directory.view.project(ROOT) is None:
            await directory.change(directory._make_root)
        return directory

    def _make_root(self, change: Change) -> None:
        if self.view.project(ROOT) is None:
            change.put(ProjectRow(path=ROOT, created_at=self.now(), created_by=_SERVICE))

    def now(self) -> float:
        return self._clock.wall_s()

    def close(self) -> None:
        self._store.close()

    # -- who asks ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Memory is what the store is now. Raises StorageError: rather nobody is let in than somebody who may not."""
        found = self._store.changes(self.view.revision)
        if found is not None:
            self.view.follow(found)
            self._held.clear()
        self._looked_at = self._clock.monotonic_s()

    def refresh_if_due(self) -> None:
        if self._clock.monotonic_s() - self._looked_at >= limits.IAM_STALE_S:
            self.refresh()

    def authenticate(self, text: str) -> Principal:
        """Raises AuthError, with the same words whatever is wrong, but for a token that was good once."""
        self.refresh_if_due()
        digest = digest_of(text)
        token = self.view.tokens_by_hash.get(digest)
        # The look-up may tell by its time something of a hash, and a hash cannot be turned into a token. The
        # comparison that decides takes constant time.
        if token is None or not hmac.compare_digest(token.hash, digest):
            raise AuthError("the token is not valid", hint="`dsec token create` on the service's machine makes one")
        if token.revoked_at is not None:
            raise AuthError("the token was revoked")
        now = self.now()
        if token.expires_at is not None and token.expires_at <= now:
            raise AuthError("the token has expired")
        held = self._held_by(token, now)
        if not held:
            raise AuthError("the token was revoked", hint="the grants that it stood on are over")
        return _principal_of(token, held)

    def _held_by(self, token: TokenRow, now: float) -> tuple[Held, ...]:
        known = self._held.get(token.id)
        if known is not None and known[0] <= now < known[1]:
            return known[2]
        held = self.view.held_by(token, now)
        until = min((math.inf if item.expires_at is None else item.expires_at for item in held), default=math.inf)
        self._held[token.id] = (int(now), until, held)
        return held

    def acting_in(self, who: Principal, project: str | None) -> Principal:
        """`who` within a project that it names. Raises NotFoundError when that is not there for it."""
        if project is None:
            return who
        if self.view.project(parse_project(project)) is None:
            raise no_project(project)
        return who.within(project)

    def rules(self, project: str) -> Rules:
        self.refresh_if_due()
        return self.view.rules(project)

    @property
    def ruled(self) -> bool:
        """Whether any project has a policy or a quota."""
        self.refresh_if_due()
        return self.view.ruled > 0

    # -- changes -----------------------------------------------------------------------------------

    async def change(self, decide: Callable[[Change], T]) -> T:
        """Raises what `decide` raises, StorageError, and UnavailableError when others are faster every time."""
        for _ in range(limits.IAM_RETRIES_MAX):
            self.refresh()
            change = Change(self.view)
            result = decide(change)
            if not change.puts:
                return result
            try:
                await self._store.apply(Batch(change.puts, change.expect))
            except OvertakenError:
                continue
            self.refresh()
            return result
        raise UnavailableError("projects and tokens are being changed by many at once", retry_after_s=1.0)

    async def change_in_pieces(self, decide: Callable[[Change], bool]) -> None:
        """Of more keys than one batch takes: until `decide` says that this was the last piece."""
        while not await self.change(decide):
            pass

    def existing(self, path: str) -> ProjectRow:
        """Raises NotFoundError."""
        row = self.view.project(path)
        if row is None:
            raise no_project(path)
        return row

    def may_give(self, by: Principal, project: str, right: str) -> Held:
        """By what `by` may give that right over that project. Raises NotFoundError, ForbiddenError."""
        if right == Right.ADMIN and project != ROOT:
            raise InvalidArgumentError(
                "the right admin is over the whole service, so its project is '/'",
                hint="the right manage is over a project and all below it",
            )
        by.require(project, Right.MANAGE)
        held = by.best(project, right if ORDER[right] > ORDER[Right.MANAGE] else Right.MANAGE)
        if held is None:
            raise ForbiddenError(
                f"nobody can give rights that they do not have: {right}", detail={"right": right, "project": project}
            )
        return held

    def end_of(self, ttl_s: float | None, by: Principal, held: Held) -> float | None:
        """What is given ends when the giver's own right does, and when the token that they gave it with does."""
        wanted = None if ttl_s is None else self.now() + ttl_s
        ends = [end for end in (wanted, by.expires_at, held.expires_at) if end is not None]
        return min(ends, default=None)

    def new_project(self, change: Change, path: str, by: Principal) -> ProjectRow:
        self.check_room("projects", path)
        row = ProjectRow(path=path, created_at=self.now(), created_by=name_of(by))
        change.put(row)
        change.touch(parent_of(path) or ROOT)
        return row

    # -- room --------------------------------------------------------------------------------------

    def check_room(self, kind: str, project: str) -> None:
        """Raises CapacityError when there are too many in all, or in that project's part of the tree."""
        most = _MOST[kind]
        if self.view.count(kind, ROOT) >= most:
            raise CapacityError(f"there are {most} {kind} already", hint=f"remove some {kind}")
        for path in lineage(project)[1:2]:
            if self.view.count(kind, path) >= most // _SHARE:
                raise CapacityError(
                    f"{path} and the projects below it have {most // _SHARE} {kind} already", hint=f"remove some {kind}"
                )

    async def make_room(self, project: str) -> None:
        """Tokens and grants that are over go when there are too many: who still has such a token is told that it is
        not valid, not that it was good once."""
        if not any(self._is_full(kind, project) for kind in ("tokens", "grants")):
            return

        def decide(change: Change) -> bool:
            now = self.now()
            over = [
                row
                for row in self.view.rows.values()
                if (isinstance(row, TokenRow) and is_over(row, now))
                or (isinstance(row, GrantRow) and self.view.in_force(row, now) is None)
            ]
            for row in over[: limits.IAM_BATCH_MAX]:
                change.delete(key_of(row))
            return len(over) <= limits.IAM_BATCH_MAX

        await self.change_in_pieces(decide)

    def _is_full(self, kind: str, project: str) -> bool:
        try:
            self.check_room(kind, project)
        except CapacityError:
            return True
        return False


def _principal_of(token: TokenRow, held: tuple[Held, ...]) -> Principal:
    """Acting in the highest project that it may act in, which is the token's own if it may there."""
    here = held[0]
    right = max((item.right for item in held if item.project == here.project), key=ORDER.__getitem__)
    ends = [end for end in (token.expires_at, here.expires_at) if end is not None]
    return replace(
        Principal(token.principal.rpartition("@/")[0], id=token.principal, token=token.id, held=held),
        project=here.project,
        rights=closed_rights((right,)),
        expires_at=min(ends, default=None),
    )


def name_of(by: Principal) -> str:
    return by.id or by.name


def is_over(token: TokenRow, now: float) -> bool:
    return token.revoked_at is not None or (token.expires_at is not None and token.expires_at <= now)
