"""Tokens for callers over the network."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.sdk.grants import right_of
from dsec.sdk.transport import Transport
from dsec.wire.tokens import RotateRequest, TokenAnswer, TokenInfo, TokenPage, TokenRequest


class AsyncTokens:
    """`client.tokens`: for who manages a project."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, principal: str, *, project: str = "/", rights: Sequence[str] = ("use",), ttl_s: float | None = None
    ) -> TokenAnswer:
        """A new token, which is shown this once; it is good for the project and all below it.

        `principal` is a name in the project, or "name@/other"; project, principal and grant are made when they are new.
        `rights`: "read", "use" (includes read), "manage" (includes both; sub-projects, tokens, grants, and quotas of
        what is below), "admin" (of "/" only, includes all).
        """
        wanted = tuple(map(right_of, rights))
        request = TokenRequest(principal=principal, project=project, rights=wanted, ttl_s=ttl_s)
        return await self._transport.call("POST", "/tokens", TokenAnswer, body=request)

    async def rotate(
        self, id: str = "self", *, overlap_s: float = limits.TOKEN_OVERLAP_S_DEFAULT, ttl_s: float | None = None
    ) -> TokenAnswer:
        """A new token in the place of one, by default of the client's own, which stays good for `overlap_s` more."""
        request = RotateRequest(overlap_s=overlap_s, ttl_s=ttl_s)
        return await self._transport.call("POST", f"/tokens/{_checked(id)}:rotate", TokenAnswer, body=request)

    async def list(self) -> list[TokenInfo]:
        """The tokens of projects that the caller manages, without their secrets."""
        return (await self._transport.call("GET", "/tokens", TokenPage)).tokens

    async def revoke(self, id: str) -> TokenInfo:
        """Ends a token at once, and those that came of it by rotation. "self" is the client's own."""
        return await self._transport.call("DELETE", f"/tokens/{_checked(id)}", TokenInfo, repeatable=True)


def _checked(id: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", id):
        raise InvalidArgumentError(f"{id[:40]!r} is not the id of a token", hint="list() shows the ids")
    return id
