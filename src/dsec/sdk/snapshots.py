"""Snapshots: what sandboxes had on their disks, kept by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, Unpack

import msgspec

from dsec.core import limits
from dsec.core.errors import NotFoundError
from dsec.core.ids import parse_name
from dsec.sdk.requests import CreateOptions
from dsec.sdk.transport import Transport, encode_query
from dsec.wire.snapshots import Published, PublishRequest, SnapshotInfo, SnapshotPage

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.sandbox import AsyncSandbox

MAKING_TIMEOUT_S: Final = limits.CREATE_TIMEOUT_S_MAX  # what a sandbox has written may be much


class _Nothing(msgspec.Struct):
    pass


class AsyncSnapshot:
    """What one sandbox had on its disk at one moment. It stays until `remove`, whatever becomes of the sandbox."""

    def __init__(self, client: AsyncClient, info: SnapshotInfo) -> None:
        self._client = client
        self._info = info

    @property
    def id(self) -> str:
        """`snp_…`: with it, any client of the same owner finds it."""
        return self._info.id

    @property
    def name(self) -> str:
        """The name it was given, or its id."""
        return self._info.name

    @property
    def info(self) -> SnapshotInfo:
        """What is known of it: of which sandbox, when, how large."""
        return self._info

    async def create(
        self, *, timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT, **options: Unpack[CreateOptions]
    ) -> AsyncSandbox:
        """A new sandbox on it; what `options` leave out is as it was in the snapshotted sandbox, but for the name."""
        return await self._client.create(snapshot=self._info.id, timeout_s=timeout_s, **options)

    async def publish(
        self,
        name: str,
        *,
        kind: Literal["workspace", "toolkit"] = "workspace",
        keep: Sequence[str] = (),
        replace: bool = False,
        dry_run: bool = False,
    ) -> Published:
        """Makes a workspace or toolkit of what it has above its environment, as NAME or NAME:TAG, for sandboxes of
        every project; one layer, without residue: temporary files, caches, histories, keys, credentials …

        `keep` names rules that are not applied; `dry_run` only says what would be removed. Needs the right admin.
        Raises ConflictError when the name stands for something else, unless `replace`.
        """
        request = PublishRequest(name=name, kind=kind, keep=tuple(keep), replace=replace, dry_run=dry_run)
        return await self._client._transport.call(
            "POST",
            f"/snapshots/{self._info.id}:publish",
            Published,
            body=request,
            long=True,
            timeout_s=MAKING_TIMEOUT_S,
        )

    async def remove(self, *, missing_ok: bool = False) -> None:
        """Removes it. Raises ConflictError while sandboxes that were made from it live."""
        await self._client.snapshots.remove(self._info.id, missing_ok=missing_ok)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class AsyncSnapshots:
    """`client.snapshots`: those of the caller's project, and of projects below it."""

    def __init__(self, client: AsyncClient, transport: Transport) -> None:
        self._client = client
        self._transport = transport

    async def list(
        self, *, sandbox: str | None = None, max_items: int = 10_000, missing: set[str] | None = None
    ) -> list[AsyncSnapshot]:
        """In the order in which they were made; with `sandbox` only those of this one, by its id. Nodes of a cluster
        that did not answer are added to `missing`."""
        found: list[AsyncSnapshot] = []
        cursor: str | None = None
        while len(found) < max_items:
            query = encode_query({"sandbox": sandbox, "limit": min(limits.LIST_PAGE_MAX, max_items), "cursor": cursor})
            page = await self._transport.call("GET", f"/snapshots?{query}", SnapshotPage)
            found += [AsyncSnapshot(self._client, info) for info in page.snapshots]
            if missing is not None:
                missing.update(page.missing)
            if page.next is None or page.next == cursor:
                break
            cursor = page.next
        return found[:max_items]

    async def get(self, name: str) -> AsyncSnapshot:
        """One of them, by name or id. Raises NotFoundError."""
        info = await self._transport.call("GET", f"/snapshots/{parse_name(name, 'snapshot name')}", SnapshotInfo)
        return AsyncSnapshot(self._client, info)

    async def exists(self, name: str) -> bool:
        """Whether there is one of that name or id."""
        try:
            await self.get(name)
        except NotFoundError:
            return False
        return True

    async def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes one, by name or id. Raises NotFoundError, ConflictError while sandboxes made from it live."""
        path = f"/snapshots/{parse_name(name, 'snapshot name')}"
        try:
            await self._transport.call("DELETE", path, _Nothing, repeatable=True)
        except NotFoundError:
            if not missing_ok:
                raise
