"""Projects: whose sandboxes they are, and what binds them."""

from __future__ import annotations

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.sdk.transport import Transport
from dsec.wire.iam import Policy, ProjectInfo, ProjectPage, ProjectRequest, Quota, QuotaInfo


class _Nothing(msgspec.Struct):
    pass


class AsyncProjects:
    """`client.projects`: projects in projects. A quota or a policy binds a project and all below it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self, path: str) -> ProjectInfo:
        """A new project, such as "/team/run-7", below one that the caller manages."""
        return await self._transport.call("POST", "/projects", ProjectInfo, body=ProjectRequest(path=_path(path)))

    async def list(self, below: str | None = None) -> list[ProjectInfo]:
        """Those that the caller may read, by path; `below`: only that one and those below it."""
        found: list[ProjectInfo] = []
        query = {} if below is None else {"below": _path(below)}
        while True:
            page = await self._transport.call("GET", "/projects", ProjectPage, query={**query, "limit": "1000"})
            found += page.projects
            if page.next is None:
                return found
            query["cursor"] = page.next

    async def get(self, path: str) -> ProjectInfo:
        """One of them, with its quota and its policy. Raises NotFoundError."""
        return await self._transport.call("GET", "/project", ProjectInfo, query={"path": _path(path)})

    async def remove(self, path: str) -> None:
        """With its principals, grants and tokens. ConflictError while it has sandboxes, or projects below it."""
        await self._transport.call("DELETE", "/project", _Nothing, query={"path": _path(path)})

    async def quota(self, path: str) -> QuotaInfo:
        """Its caps, and every cap that binds it, with what is used of each."""
        return await self._transport.call("GET", "/project/quota", QuotaInfo, query={"path": _path(path)})

    async def set_quota(self, path: str, quota: Quota) -> QuotaInfo:
        """Replaces its caps: what all sandboxes of it and below it may have together.

        Takes the right manage over the project above it. A cap is at most that of every project above.
        """
        return await self._transport.call(
            "PUT", "/project/quota", QuotaInfo, query={"path": _path(path)}, body=quota, repeatable=True
        )

    async def set_policy(self, path: str, policy: Policy) -> ProjectInfo:
        """Replaces its policy: what each sandbox of it and below it must be like. Takes what `set_quota` takes."""
        return await self._transport.call(
            "PUT", "/project/policy", ProjectInfo, query={"path": _path(path)}, body=policy, repeatable=True
        )


def _path(path: str) -> str:
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidArgumentError(f"{str(path)[:80]!r} is not a project path", hint="such as /team/run-7")
    return path
