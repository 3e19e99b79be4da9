"""Volumes: directories that outlive sandboxes."""

from __future__ import annotations

import msgspec

from dsec.core.errors import VolumeNotFoundError
from dsec.core.ids import parse_name
from dsec.core.units import parse_size
from dsec.sdk.transport import Transport
from dsec.wire.volumes import VolumeInfo, VolumePage, VolumeRequest


class _Nothing(msgspec.Struct):
    pass


class AsyncVolumes:
    """`client.volumes`: named directories of a project, for `Sandbox.create(volumes=[…])`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self, name: str, *, size: int | str | None = None, uid: int = 0, gid: int = 0) -> VolumeInfo:
        """A new, empty volume of the caller's project; one of that name, size and owner is fine.

        `size`: what can be written in it, as bytes or text such as "10GiB"; without it, as much as the node's disk has.
        `uid`, `gid`: whose its top directory is, as sandboxes see it. ConflictError when there is another one of that
        name, UnsupportedError where a size cannot be kept.
        """
        size_bytes = None if size is None else parse_size(size, "size")
        request = VolumeRequest(name=name, size_bytes=size_bytes, uid=uid, gid=gid)
        return await self._transport.call("POST", "/volumes", VolumeInfo, body=request, repeatable=True)

    async def list(self, *, missing: set[str] | None = None) -> list[VolumeInfo]:
        """Volumes of the caller's projects, then the nodes' datasets. Nodes of a cluster that did not answer are added
        to `missing`."""
        page = await self._transport.call("GET", "/volumes", VolumePage)
        if missing is not None:
            missing.update(page.missing)
        return page.volumes

    async def get(self, name: str, *, project: str | None = None) -> VolumeInfo:
        """One of them, with what it takes of the disk and which sandboxes have it. Raises VolumeNotFoundError."""
        path = f"/volumes/{parse_name(name, 'volume name')}"
        return await self._transport.call("GET", path, VolumeInfo, query=_of(project))

    async def remove(self, name: str, *, project: str | None = None, missing_ok: bool = False) -> None:
        """Removes it with all that is in it. Raises VolumeNotFoundError; ConflictError while a sandbox has it."""
        path = f"/volumes/{parse_name(name, 'volume name')}"
        try:
            await self._transport.call("DELETE", path, _Nothing, query=_of(project), repeatable=True)
        except VolumeNotFoundError:
            if not missing_ok:
                raise


def _of(project: str | None) -> dict[str, str]:
    return {} if project is None else {"project": project}
