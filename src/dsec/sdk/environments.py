"""The environments that sandboxes start from."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from dsec.core.errors import EnvironmentNotFoundError, ProtocolError, UnavailableError
from dsec.core.references import parse_reference
from dsec.sdk.lines import json_lines
from dsec.sdk.requests import as_list
from dsec.sdk.transport import Transport
from dsec.wire import api
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    BuildSource,
    EnvironmentInfo,
    EnvironmentPage,
    EnvironmentStats,
    EnvironmentTrace,
    PushTarget,
)
from dsec.wire.errors import ErrorBody, error_of
from dsec.wire.images import Export, ExportedImage, ExportTarget
from dsec.wire.layers import Composition, EnvironmentDiff

_ATTEMPTS_MAX: Final = 6

# What `base` is made of: a place to build and test ordinary Python projects in.
BASE_PACKAGES: Final = (
    "bash",
    "build-essential",
    "ca-certificates",
    "coreutils",
    "git",
    "less",
    "netbase",
    "procps",
    "python-is-python3",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
    "tzdata",
)


class _Nothing(msgspec.Struct):
    pass


class AsyncEnvironments:
    """`client.environments`: what the service has, and how more are made."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, missing: set[str] | None = None) -> list[EnvironmentInfo]:
        """All of them, by name. Nodes of a cluster that did not answer are added to
        `missing`."""
        page = await self._transport.call("GET", "/environments", EnvironmentPage)
        if missing is not None:
            missing.update(page.missing)
        return page.environments

    async def get(self, name: str) -> EnvironmentInfo:
        """One of them. Raises EnvironmentNotFoundError."""
        return await self._transport.call("GET", _path(name), EnvironmentInfo)

    async def exists(self, name: str) -> bool:
        """Whether there is one of that name."""
        try:
            await self.get(name)
        except EnvironmentNotFoundError:
            return False
        return True

    async def build(
        self,
        name: str,
        source: BuildSource,
        *,
        replace: bool = False,
        refresh: bool = False,
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> EnvironmentInfo:
        """Makes the environment `name`, and returns once sandboxes can start from it.

        `source`: `dsec.DebianSource(packages=(…))`, `RegistrySource("host/path:tag")`, `DirectorySource`, `TarSource`,
        `OciSource`, `DockerArchiveSource`, `DockerfileSource`, or `StoreSource(url=…, environment=…)` for what was
        pushed to a store; paths are the node's. A name that exists
        with the same content is success at once; with other content it is a ConflictError unless `replace`. `refresh`
        builds even what was built before. `on_event` hears each BuildEvent.
        """
        request = BuildRequest(name=name, source=source, replace=replace, refresh=refresh)
        return await self._follow("/environments", request, on_event)

    async def create(
        self,
        name: str,
        base: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        follow: bool = False,
        replace: bool = False,
    ) -> EnvironmentInfo:
        """Puts the environment `name` together from others, each by reference: NAME, NAME:TAG or NAME@DIGEST.

        Later ones hide what earlier ones have in the same place. It stays what its parts are now, until `update`; with
        `follow` they are looked up at each create of a sandbox. Put together the same way already is success; other
        content is a ConflictError unless `replace`.
        """
        of = Composition(
            base=base,
            workspace=workspace,
            toolkits=tuple(as_list(toolkits, "toolkits")),
            follow=follow,
            replace=replace,
        )
        return await self._transport.call("PUT", _path(name), EnvironmentInfo, body=of, repeatable=True)

    async def update(self, name: str) -> EnvironmentInfo:
        """Locks an environment that is made of others to what those are now. What it was stays as NAME@DIGEST."""
        return await self._transport.call("POST", _path(name, ":update"), EnvironmentInfo, repeatable=True)

    async def diff(self, one: str, other: str) -> EnvironmentDiff:
        """What `other` has more, less and otherwise: layers, parts and configuration."""
        return await self._transport.call(
            "GET", _path(one, "/diff"), EnvironmentDiff, query={"other": str(parse_reference(other))}
        )

    async def collapse(self, name: str, *, on_event: Callable[[BuildEvent], Any] | None = None) -> EnvironmentInfo:
        """As `client.layers.collapse`."""
        return await self._follow(_path(name, ":collapse"), None, on_event)

    async def push(
        self, name: str, store: str, *, on_event: Callable[[BuildEvent], Any] | None = None
    ) -> EnvironmentInfo:
        """Puts an environment into a store, from which other nodes build it with `StoreSource`.

        `store`: `file:///directory` of the node, or `s3://bucket/prefix`. What is there already is left as it is.
        The answer's digests are the store's: they name all that is ever read of it (`StoreSource(…, digest=…)`).
        UnsupportedError where layers are kept as directories, or the store is read only.
        """
        path = _path(name, ":push")
        return await self._follow(path, PushTarget(store), on_event)

    async def export(
        self, name: str, target: ExportTarget, *, on_event: Callable[[BuildEvent], Any] | None = None
    ) -> ExportedImage:
        """Makes an environment an image of the OCI, for other tools and machines.

        `target`: `dsec.RegistryTarget("host/path:tag")`, or on the node `LayoutTarget("/directory")` or
        `ArchiveTarget("/file.tar")` for `docker load`. What is there already is not sent again. ConflictError,
        NotFoundError and StorageError as the registry says.
        """
        done = await self._followed(_path(name, ":export"), Export(target), on_event)
        if done.exported is None:
            raise ProtocolError("the service does not say what it has done")
        return done.exported

    async def stats(self, name: str) -> EnvironmentStats:
        """How much of each layer has been loaded from its store, and why the store failed last."""
        return await self._transport.call("GET", _path(name, "/stats"), EnvironmentStats)

    async def trace(self, name: str) -> EnvironmentTrace:
        """Records in the store what has been read so far, so that other nodes load that first.

        ConflictError when nothing was read; UnsupportedError for a store that is read only.
        """
        path = _path(name, ":trace")
        return await self._transport.call("POST", path, EnvironmentTrace, repeatable=True)

    async def _follow(
        self, path: str, request: BuildRequest | PushTarget | None, on_event: Callable[[BuildEvent], Any] | None
    ) -> EnvironmentInfo:
        done = await self._followed(path, request, on_event)
        if done.environment is None:
            raise ProtocolError("the service does not say what it has done")
        return done.environment

    async def _followed(
        self,
        path: str,
        request: BuildRequest | PushTarget | Export | None,
        on_event: Callable[[BuildEvent], Any] | None,
    ) -> BuildEvent:
        attempt = 0
        while True:
            try:
                return await told(self._transport, path, request, on_event)
            except UnavailableError as error:
                if "tried" in error.detail:
                    raise  # by the service, often enough
                # Asking for the same thing again joins what runs, or finds it done.
                attempt += 1
                await self._transport.pause(error, attempt, most=_ATTEMPTS_MAX)

    async def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes the name; its layers go once nothing uses them. Raises EnvironmentNotFoundError."""
        try:
            await self._transport.call("DELETE", _path(name), _Nothing, repeatable=True)
        except EnvironmentNotFoundError:
            if not missing_ok:
                raise


async def told(
    transport: Transport, path: str, request: Any, on_event: Callable[[BuildEvent], Any] | None
) -> BuildEvent:
    """The last event of something that is made while its story is told. Raises what it failed with."""
    async with transport.stream("POST", path, body=request, headers={"Accept": api.TYPE_NDJSON}) as response:
        async for event in json_lines(response, BuildEvent):
            if on_event is not None:
                given = on_event(event)
                if inspect.isawaitable(given):
                    await asyncio.ensure_future(given)
            if event.kind == "error":
                raise error_of(event.error or ErrorBody(code="internal", message=event.message or "it failed"))
            if event.kind == "done":
                return event
    raise UnavailableError("the connection was lost before the end")


def _path(name: str, rest: str = "") -> str:
    # The colon of a tag must not be taken for that of a verb.
    return f"/environments/{quote(str(parse_reference(name)), safe='')}{rest}"
