"""Tokens of the first version, which had name, project and rights each, as principals, grants and tokens."""

from __future__ import annotations

import sqlite3
from typing import Final

from dsec.iam.principals import ORDER, closed_rights, highest_right
from dsec.iam.projects import ROOT, lineage
from dsec.iam.rows import GrantRow, PrincipalRow, ProjectRow, Row, TokenRow, encoded, principal_id
from dsec.iam.secrets import new_id

_COLUMNS: Final = "id, hash, principal, project, rights, created_at, expires_at, revoked_at"
_BY: Final = "dsec"


def entries_of_tokens(db: sqlite3.Connection) -> dict[str, bytes | None]:
    """Each token may what it might. Raises sqlite3.Error, ValueError."""
    tokens: list[TokenRow] = []
    rows: list[Row] = []
    paths = {ROOT}
    best: dict[str, tuple[str, str, str]] = {}  # principal → name, project, highest right
    for id, hash, name, project, rights, created_at, expires_at, revoked_at in db.execute(
        f"SELECT {_COLUMNS} FROM tokens"
    ):
        if not closed_rights(rights.split()):
            continue
        right, principal = highest_right(rights.split()), principal_id(name, project)
        paths.update(lineage(project))
        known = best.get(principal)
        if known is None or ORDER[known[2]] < ORDER[right]:
            best[principal] = (name, project, right)
        tokens.append(
            TokenRow(
                id=id,
                hash=hash,
                principal=principal,
                project=project,
                right=right,
                created_at=created_at,
                created_by=_BY,
                expires_at=expires_at,
                revoked_at=revoked_at,
                family=id,
            )
        )
    at = min((token.created_at for token in tokens), default=0.0)
    rows += [ProjectRow(path=path, created_at=at, created_by=_BY) for path in sorted(paths)]
    for principal, (name, project, right) in best.items():
        rows.append(PrincipalRow(name=name, project=project, created_at=at, created_by=_BY))
        rows.append(
            GrantRow(id=new_id("grt"), principal=principal, project=project, right=right, created_at=at, created_by=_BY)
        )
    return encoded([*rows, *tokens])
