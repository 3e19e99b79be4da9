"""Stored records: what is kept of projects, principals, grants and tokens. They ignore fields of newer versions."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.wire.codec import pack
from dsec.wire.iam import Policy, Quota

ROW_VERSION: Final = 1


class ProjectRow(msgspec.Struct, frozen=True, kw_only=True):
    version: int = ROW_VERSION
    path: str
    created_at: float
    created_by: str
    quota: Quota = Quota()
    policy: Policy = Policy()


class PrincipalRow(msgspec.Struct, frozen=True, kw_only=True):
    version: int = ROW_VERSION
    name: str
    project: str
    created_at: float
    created_by: str

    @property
    def id(self) -> str:
        return principal_id(self.name, self.project)


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """`parent`: the grant by which its giver had the right; None: root of the machine gave it."""

    version: int = ROW_VERSION
    id: str
    principal: str
    project: str
    right: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    parent: str | None = None
    depth: int = 0  # of parents


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a token. It gives of its principal's grants what lies within `project` and `right`."""

    version: int = ROW_VERSION
    id: str
    hash: bytes
    principal: str
    project: str
    right: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    family: str = ""  # id of the first of those that were made by rotation
    generation: int = 0  # within its family


Row = ProjectRow | PrincipalRow | GrantRow | TokenRow
KINDS: Final[dict[str, type[Row]]] = {
    "project": ProjectRow,
    "principal": PrincipalRow,
    "grant": GrantRow,
    "token": TokenRow,
}


def principal_id(name: str, project: str) -> str:
    return f"{name}@{project}"


def project_key(path: str) -> str:
    return f"project{path}"


def principal_key(id: str) -> str:
    return f"principal/{id}"


def grant_key(id: str) -> str:
    return f"grant/{id}"


def token_key(id: str) -> str:
    return f"token/{id}"


def key_of(row: Row) -> str:
    match row:
        case ProjectRow():
            return project_key(row.path)
        case PrincipalRow():
            return principal_key(row.id)
        case GrantRow():
            return grant_key(row.id)
        case TokenRow():
            return token_key(row.id)


def encoded(rows: list[Row]) -> dict[str, bytes | None]:
    return {key_of(row): pack(row) for row in rows}
