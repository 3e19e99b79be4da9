"""Tokens for callers over the network."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsec.core.errors import InvalidArgumentError
from dsec.sdk.transport import Transport
from dsec.wire.node import Right
from dsec.wire.tokens import TokenAnswer, TokenInfo, TokenPage, TokenRequest


class AsyncTokens:
    """`client.tokens`: for administrators of a project."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, principal: str, *, project: str = "/", rights: Sequence[str] = ("use",), ttl_s: float | None = None
    ) -> TokenAnswer:
        """A new token, which is shown this once. `rights`: "read", "use" (includes read), "admin" (includes both)."""
        try:
            wanted = tuple(Right(right) for right in rights)
        except ValueError as error:
            raise InvalidArgumentError(f"{error.args[0]}", hint="rights are read, use and admin") from error
        request = TokenRequest(principal=principal, project=project, rights=wanted, ttl_s=ttl_s)
        return await self._transport.call("POST", "/tokens", TokenAnswer, body=request)

    async def list(self) -> list[TokenInfo]:
        """The tokens of the caller's projects, without their secrets."""
        return (await self._transport.call("GET", "/tokens", TokenPage)).tokens

    async def revoke(self, id: str) -> TokenInfo:
        """Ends a token at once."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", id):
            raise InvalidArgumentError(f"{id[:40]!r} is not the id of a token", hint="list() shows the ids")
        return await self._transport.call("DELETE", f"/tokens/{id}", TokenInfo, repeatable=True)
