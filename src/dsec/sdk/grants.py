"""Grants and principals: who may do what in which project."""

from __future__ import annotations

import re

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.sdk.transport import Transport
from dsec.wire.iam import GrantInfo, GrantPage, GrantRequest, PrincipalInfo, PrincipalPage
from dsec.wire.node import Right


class _Nothing(msgspec.Struct):
    pass


class AsyncGrants:
    """`client.grants`: rights over projects, handed on. A grant ends with the one that its giver had it by."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, principal: str, *, project: str, right: str = "use", ttl_s: float | None = None
    ) -> GrantInfo:
        """Gives a right over a project and all below it: at most what the caller has, and for no longer.

        `principal` is "name@/team", or a name in `project`, which is made when it is new.
        """
        request = GrantRequest(principal=principal, project=project, right=right_of(right), ttl_s=ttl_s)
        return await self._transport.call("POST", "/grants", GrantInfo, body=request)

    async def principals(self) -> list[PrincipalInfo]:
        """Those of projects that the caller manages."""
        return (await self._transport.call("GET", "/principals", PrincipalPage)).principals

    async def list(self) -> list[GrantInfo]:
        """Those over projects that the caller manages, and the caller's own; newest first."""
        return (await self._transport.call("GET", "/grants", GrantPage)).grants

    async def revoke(self, id: str) -> None:
        """Takes it back, and with it all that was given by it."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", id):
            raise InvalidArgumentError(f"{id[:40]!r} is not the id of a grant", hint="list() shows the ids")
        await self._transport.call("DELETE", f"/grants/{id}", _Nothing)

    async def remove_principal(self, id: str) -> None:
        """With its tokens and its grants, and with all that it has given to others."""
        await self._transport.call("DELETE", "/principals", _Nothing, query={"id": id})


def right_of(word: str) -> Right:
    try:
        return Right(word)
    except ValueError as error:
        raise InvalidArgumentError(f"{error.args[0]}", hint="rights are read, use, manage and admin") from error
