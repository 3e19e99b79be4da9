"""Groups: several sandboxes with private names, started and stopped as one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, NotFoundError, SandboxError
from dsec.core.ids import parse_name
from dsec.sdk.leaving import body_first
from dsec.sdk.paging import all_pages
from dsec.sdk.requests import as_list, as_mapping, make_spec
from dsec.sdk.starting import Story, followed, have_image
from dsec.wire.groups import GroupDown, GroupInfo, GroupLink, GroupMember, GroupPage, GroupRequest, GroupStep
from dsec.wire.plans import GroupExplanation

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.sandbox import AsyncSandbox

_STOP_S: Final = 180.0
_UNDO_S: Final = 30.0
_MARGIN_S: Final = 30.0


class AsyncGroup:
    """Several sandboxes that reach each other by name. `async with` ends all of them at its end.

    async with await client.groups.create(
        {"db": {"environment": "postgres", "start": True}, "web": {"environment": "shop", "after": ["db"]}},
        links=["db:5432"],
    ) as group:
        web = await group.sandbox("web")  # in it, db:5432 is the other's port
    """

    def __init__(self, client: AsyncClient, info: GroupInfo) -> None:
        self._client = client
        self._transport = client._transport
        self._path = f"/groups/{parse_name(info.name, 'group name')}"
        self._info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.name} {self._info.state} {', '.join(self._info.members)}>"

    @property
    def name(self) -> str:
        """Unique among the groups and jobs of its project."""
        return self._info.name

    @property
    def info(self) -> GroupInfo:
        """What was last heard of it, with its sandboxes; `refresh` asks again."""
        return self._info

    @property
    def members(self) -> dict[str, str]:
        """Name → id of the sandbox."""
        return dict(self._info.members)

    async def sandbox(self, name: str) -> AsyncSandbox:
        """The member of that name. Raises NotFoundError."""
        id = self._info.members.get(name)
        if id is None:
            raise NotFoundError(f"group {self.name} has no member {str(name)[:40]!r}", hint=", ".join(self.members))
        return await self._client.get(id)

    async def refresh(self) -> GroupInfo:
        """Asks for its present state. Raises NotFoundError when it is gone."""
        self._info = await self._transport.call("GET", self._path, GroupInfo)
        return self._info

    async def down(self) -> None:
        """Destroys all its sandboxes and forgets it; gone already is fine. Raises SandboxError when some of it could
        not be removed yet: the service goes on trying."""
        try:
            told = await self._transport.call(
                "DELETE", self._path, GroupDown, repeatable=True, long=True, timeout_s=_STOP_S
            )
        except NotFoundError:
            return
        if told.failed:
            what = "; ".join(f"{name}: {why}" for name, why in list(told.failed.items())[:3])
            raise SandboxError(f"group {self.name} is not gone whole yet: {what}", hint="it is gone on with")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        with body_first(error):
            await self.down()


class AsyncGroups:
    """`client.groups`: several sandboxes with private names, all of them or none."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._transport = client._transport

    async def create(
        self,
        members: Mapping[str, Mapping[str, Any]],
        *,
        links: Iterable[str | GroupLink] = (),
        name: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        on_step: Callable[[GroupStep], Any] | None = None,
    ) -> AsyncGroup:
        """A new group, all of whose sandboxes run; or an error, and nothing of it is left.

        `members`: name → arguments of `Sandbox.create`, with `environment` among them, and `after`: names of those that
        are to be started, and ready, before. `links`: "db:5432", or a `dsec.GroupLink`: in all others, or in those that
        it names, `db:5432` reaches that port of db. A member has the sandbox name GROUP-MEMBER unless it is given one.
        `timeout_s` is for the start of each; `on_step` hears each GroupStep of it. The same again is success.
        Raises ConflictError (another group or job of that name), and what `Sandbox.create` raises, with the member that
        failed in `detail["member"]`.
        """
        request = _request(members, links, name, timeout_s)
        async with followed(self._client, request.name, request.members, Story(on_step)):
            return await self._start(request)

    async def explain(
        self,
        members: Mapping[str, Mapping[str, Any]],
        *,
        links: Iterable[str | GroupLink] = (),
        name: str | None = None,
    ) -> GroupExplanation:
        """What would become of `create` with the same arguments now: where each member would go, or which of them has
        no node, and why. Nothing happens."""
        return await self._explain(_request(members, links, name, limits.CREATE_TIMEOUT_S_DEFAULT))

    async def explain_compose(
        self,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        profiles: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> GroupExplanation:
        """As `explain`, of what `from_compose` would start. No image is pulled: that one is not there is told. No
        volume is made, and those that `from_compose` would make keep no member from a node."""
        from dsec.sdk.compose import read_compose

        read = await asyncio.to_thread(read_compose, Path(path), name=name, profiles=profiles, variables=variables)
        made = {volume.name for volume in await self._client.volumes.list()} if read.volumes else set[str]()
        read = read.without(frozenset(read.volumes) - made)
        return await self._explain(read.request(timeout_s=limits.CREATE_TIMEOUT_S_DEFAULT))

    async def _explain(self, request: GroupRequest) -> GroupExplanation:
        return await self._transport.call("POST", "/groups:explain", GroupExplanation, body=request, repeatable=True)

    async def from_compose(
        self,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        profiles: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        on_note: Callable[[str], Any] | None = None,
        on_step: Callable[[GroupStep], Any] | None = None,
    ) -> AsyncGroup:
        """A group as a compose file describes it. `variables`: for `${NAME}` in it; default: this process' environment.

        `name`: default that of the file, or of its directory. Services with `profiles` are left out unless one of
        theirs is asked for. An `image` is an environment; one that is not there is pulled from its registry, for which
        the right admin is needed, and kept under its name. Named volumes are made (the
        same). `on_note` hears what means less here, such as published ports; `on_step` each GroupStep: images that are
        pulled, members that start and are ready, and who is waited for. Whatever of the file cannot be had here is
        an InvalidArgumentError that names service and key. Raises what `create` raises; UnsupportedError without the
        package PyYAML.
        """
        from dsec.sdk.compose import read_compose  # only who has such files needs a reader of them

        read = await asyncio.to_thread(read_compose, Path(path), name=name, profiles=profiles, variables=variables)
        request = read.request(timeout_s=timeout_s)
        if on_note is not None:
            for note in read.notes:
                on_note(note)
        story = Story(on_step)
        for image, environment in read.images.items():
            services = ", ".join(
                name for name, one in request.members.items() if one.spec.environment.base == environment
            )
            await have_image(self._client, image, environment, services, story)
        for volume in read.volumes:
            await self._client.volumes.create(volume)
        async with followed(self._client, request.name, request.members, story):
            return await self._start(request)

    async def get(self, name: str) -> AsyncGroup:
        """A group by its name, with its sandboxes. Raises NotFoundError."""
        info = await self._transport.call("GET", f"/groups/{parse_name(name, 'group name')}", GroupInfo)
        return AsyncGroup(self._client, info)

    async def list(self, *, max_items: int = 10_000) -> list[GroupInfo]:
        """The groups of the caller's project and of those below it."""
        return await all_pages(self._transport, "/groups", GroupPage, lambda page: page.groups, max_items=max_items)

    async def _start(self, request: GroupRequest) -> AsyncGroup:
        wait_s = request.timeout_s * len(request.members) + _MARGIN_S
        try:
            info = await self._transport.call(
                "POST", "/groups", GroupInfo, body=request, repeatable=True, long=True, timeout_s=wait_s
            )
        except asyncio.CancelledError:
            # It may be on its way, and nobody would ever hear of it.
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wait_for(self._undo(request.name), _UNDO_S))
            raise
        return AsyncGroup(self._client, info)

    async def _undo(self, name: str) -> None:
        await self._transport.call("DELETE", f"/groups/{name}", GroupDown, repeatable=True)


def _request(
    members: Mapping[str, Mapping[str, Any]], links: Iterable[str | GroupLink], name: str | None, timeout_s: float
) -> GroupRequest:
    return GroupRequest(
        name=name if name is not None else f"group-{secrets.token_hex(4)}",
        members={member: _member(member, options) for member, options in as_mapping(members, "members").items()},
        links=tuple(_link(link) for link in as_list(links, "links")),
        timeout_s=timeout_s,
    )


def _member(name: str, options: Mapping[str, Any]) -> GroupMember:
    given = as_mapping(options, f"member {str(name)[:40]}")
    after = as_list(given.pop("after", ()), "after")
    environment = given.pop("environment", "base")
    try:
        spec = make_spec(environment, **given)
    except TypeError as error:
        raise InvalidArgumentError(f"member {str(name)[:40]}: {error}".replace("make_spec() ", "")) from error
    return GroupMember(spec=spec, after=tuple(after))


def _link(link: str | GroupLink) -> GroupLink:
    if isinstance(link, GroupLink):
        return link
    name, colon, port = str(link).partition(":")
    if not colon or not port.isascii() or not port.isdecimal():
        raise InvalidArgumentError(f"{str(link)[:40]!r} is no link", hint='such as "db:5432"')
    return GroupLink(name=name, port=int(port[:6]))
