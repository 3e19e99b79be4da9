"""Records of tokens: what an administrator asks for and sees. The token itself is shown once, when it is made."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.wire.node import Right


class TokenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`rights`: read, use (includes read), admin (includes both)."""

    principal: str  # for people: who it is made for
    project: str  # "/team/run"
    rights: tuple[Right, ...] = (Right.USE,)
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if not self.principal or len(self.principal) > 255 or not self.principal.isprintable():
            raise InvalidArgumentError("principal must be 1 to 255 printable characters")
        if not self.rights:
            raise InvalidArgumentError("rights must not be empty")
        if self.ttl_s is not None and not 0 < self.ttl_s <= limits.TOKEN_TTL_S_MAX:
            raise LimitError(f"ttl_s must be above 0 and at most {limits.TOKEN_TTL_S_MAX:g}")


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    principal: str
    project: str
    rights: list[str]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    info: TokenInfo


class TokenPage(msgspec.Struct, frozen=True):
    tokens: list[TokenInfo] = []
