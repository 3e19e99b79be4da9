"""Projects: made, found, removed, and what is laid down for them."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import ConflictError, InvalidArgumentError
from dsec.iam.change import Change
from dsec.iam.directory import Directory
from dsec.iam.principals import Principal, Right, missing_right, no_project
from dsec.iam.projects import ROOT, lineage, parent_of, parse_project, reaches
from dsec.iam.rows import PrincipalRow, ProjectRow, project_key
from dsec.wire.iam import CAPS, Caps, Policy, Quota


class Hierarchy:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def may_be_made(self, path: str, *, by: Principal) -> bool:
        """Whether `create` would make it, by what is known here."""
        parent = parent_of(path)
        known = parent is not None and self._directory.view.project(path) is None
        return known and parent is not None and by.best(parent, Right.MANAGE) is not None

    async def create(self, path: str, *, by: Principal) -> ProjectRow:
        """Raises NotFoundError for a parent that is not there, ForbiddenError, ConflictError, CapacityError."""
        directory, parent = self._directory, parent_of(parse_project(path))
        if parent is None:
            raise ConflictError("the root project is always there")

        def decide(change: Change) -> ProjectRow:
            directory.existing(parent)
            change.rely_on(by.require(parent, Right.MANAGE))
            if directory.view.project(path) is not None:
                raise ConflictError(f"there is a project {path} already")
            return directory.new_project(change, path, by)

        return await directory.change(decide)

    def get(self, path: str, *, by: Principal) -> ProjectRow:
        """Raises NotFoundError, also for one that `by` may not read."""
        self._directory.refresh_if_due()
        row = self._directory.existing(parse_project(path))
        if by.best(path, Right.READ) is None:
            raise no_project(path)
        return row

    def visible(self, *, by: Principal, below: str = ROOT) -> list[ProjectRow]:
        """Those that `by` may read, in order of their paths."""
        self._directory.refresh_if_due()
        rows = [row for row in self._directory.view.rows.values() if isinstance(row, ProjectRow)]
        seen = [row for row in rows if reaches(below, row.path) and by.best(row.path, Right.READ) is not None]
        return sorted(seen, key=lambda row: row.path)

    async def remove(self, path: str, *, by: Principal) -> None:
        """With its principals, grants and tokens. Raises ConflictError while there are projects below it."""
        directory, parent = self._directory, parent_of(parse_project(path))
        if parent is None:
            raise InvalidArgumentError("the root project cannot be removed")

        def decide(change: Change) -> bool:
            self.get(path, by=by)
            change.rely_on(by.require(parent, Right.MANAGE))
            below = directory.view.children(path)
            if below:
                raise ConflictError(f"there are {len(below)} projects below {path}", hint="remove those first")
            inside = self._inside(path)
            for key in inside[: limits.IAM_BATCH_MAX - 1]:
                change.delete(key)
            if len(inside) >= limits.IAM_BATCH_MAX:
                return False
            change.delete(project_key(path))
            return True

        await directory.change_in_pieces(decide)

    def _inside(self, path: str) -> list[str]:
        """What goes with a project: also what its principals have been given elsewhere."""
        view = self._directory.view
        found: dict[str, None] = {}
        for key, row in view.rows.items():
            if not isinstance(row, ProjectRow) and row.project == path:
                found[key] = None
            if isinstance(row, PrincipalRow) and row.project == path:
                found.update(dict.fromkeys(view.keys_of(row.id)))
        return list(found)

    async def lay_down(
        self, path: str, *, quota: Quota | None = None, policy: Policy | None = None, by: Principal
    ) -> ProjectRow:
        """None: as it is. Nobody sets what binds their own project: that takes the right manage over the one above,
        and for the root the right admin.

        Raises InvalidArgumentError for a cap above one of a project above it: it would say what is not so.
        """
        directory, parent = self._directory, parent_of(parse_project(path))
        where, right = (ROOT, Right.ADMIN) if parent is None else (parent, Right.MANAGE)

        def decide(change: Change) -> ProjectRow:
            row = self.get(path, by=by)
            held = by.best(where, right)
            if held is None:
                raise missing_right(by, where, right)
            change.rely_on(held)
            if quota is not None:
                for above in lineage(path)[:-1]:
                    change.rely(project_key(above))
                    _check_below(quota, above, directory.existing(above).quota)
            row = msgspec.structs.replace(
                row, quota=row.quota if quota is None else quota, policy=row.policy if policy is None else policy
            )
            change.put(row)
            return row

        return await directory.change(decide)


def _check_below(quota: Quota, above: str, upper: Quota) -> None:
    pairs: list[tuple[str, Caps, Caps]] = [("", quota, upper)]
    for substrate, caps in upper.substrates.items():
        if (own := quota.substrates.get(substrate)) is not None:
            pairs.append((f"{substrate}.", own, caps))
    for prefix, lower_caps, upper_caps in pairs:
        for name in CAPS:
            wanted, most = getattr(lower_caps, name), getattr(upper_caps, name)
            if wanted is not None and most is not None and wanted > most:
                raise InvalidArgumentError(
                    f"the cap on {prefix}{name} would be {wanted:g}, and {above} has {most:g}",
                    hint=f"a cap is at most that of every project above it: dsec quota show {above}",
                    detail={"project": above, "cap": f"{prefix}{name}", "limit": most, "asked": wanted},
                )
