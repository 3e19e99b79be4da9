"""Volumes and datasets: shared by node, API, SDK and CLI."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name


class VolumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make the volume `name` of the caller's project. One of that name with the same size is success."""

    name: str
    size_bytes: int | None = None  # None: as much as the node's disk has
    uid: int = 0  # whose its top directory is, as sandboxes see it
    gid: int = 0

    def __post_init__(self) -> None:
        parse_name(self.name, "volume name")
        size = self.size_bytes
        if size is not None and not limits.VOLUME_BYTES_MIN <= size <= limits.DISK_BYTES_MAX:
            raise LimitError(
                "the size of a volume must be between 16MiB and 64TiB",
                hint='a size is a number of bytes, or text such as "10GiB"',
            )
        for what, id in (("uid", self.uid), ("gid", self.gid)):
            if not 0 <= id <= limits.IMAGE_ID_MAX:
                raise InvalidArgumentError(f"{what} must be between 0 and {limits.IMAGE_ID_MAX}")


class VolumeRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A volume by name, or a dataset. `project`: another one's than the caller's, for administrators."""

    name: str
    project: str | None = None


class VolumeUser(msgspec.Struct, frozen=True, kw_only=True):
    sandbox: str
    readonly: bool


class VolumeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A volume as callers see it. None: not known, or there is none."""

    name: str
    kind: str  # volume | dataset
    project: str | None = None  # a dataset is everybody's
    size_bytes: int | None = None
    used_bytes: int | None = None  # on the node's disk; of a volume without a limit only told by `get`
    mechanism: str | None = None  # by which its size is kept: directory (not at all) | project | image
    created_at: float | None = None
    uid: int | None = None
    gid: int | None = None
    used_by: tuple[VolumeUser, ...] = ()  # sandboxes that the caller may see
    node: str | None = None  # where it is, in a list of a cluster


class VolumePage(msgspec.Struct, frozen=True):
    volumes: list[VolumeInfo] = []
    missing: list[str] = []  # nodes that did not answer
