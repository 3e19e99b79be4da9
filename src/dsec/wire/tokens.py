"""Records of tokens: what a manager asks for and sees. The token itself is shown once, when it is made."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.wire.iam import check_principal_name, check_ttl
from dsec.wire.node import Right


class TokenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`rights`: read, use (includes read), manage (includes both), admin (of "/" only, includes all)."""

    principal: str  # who it is for: a name in the project, which is made when it is new, or "name@/other"
    project: str  # "/team/run"; made when it is new
    rights: tuple[Right, ...] = (Right.USE,)
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        check_principal_name(self.principal.rpartition("@/")[0] or self.principal)
        if not self.rights:
            raise InvalidArgumentError("rights must not be empty")
        check_ttl(self.ttl_s)


class RotateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A new token in the place of an old one, which stays good for `overlap_s` more."""

    overlap_s: float = limits.TOKEN_OVERLAP_S_DEFAULT
    ttl_s: float | None = None  # of the new one; None: the old one's end

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s)
        if not 0 <= self.overlap_s <= limits.TOKEN_TTL_S_MAX:
            raise LimitError(f"overlap_s must be between 0 and {limits.TOKEN_TTL_S_MAX:g}")


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    principal: str
    project: str
    rights: list[str]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    created_by: str = ""


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    info: TokenInfo


class TokenPage(msgspec.Struct, frozen=True):
    tokens: list[TokenInfo] = []
