"""What is asked of disks of full machines: to a store, from a store, and of a machine to an image."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_name
from dsec.wire.environments import check_store

_DIGEST: Final = re.compile(r"[0-9a-f]{8,64}")


class MachinePush(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Put the image `name`, and the layers of its disk that are not there, into a store; again: success."""

    name: str
    store: str

    def __post_init__(self) -> None:
        parse_name(self.name, "image name")
        check_store(self.store)


class MachinePull(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The image `image` of a store becomes `name` on this node; its disk is loaded as it is read."""

    name: str
    store: str
    image: str
    digest: str | None = None  # as a push has told it, or how it begins: no other is taken

    def __post_init__(self) -> None:
        parse_name(self.name, "image name")
        parse_name(self.image, "image name")
        check_store(self.store)
        if self.digest is not None and not _DIGEST.fullmatch(self.digest):
            raise InvalidArgumentError("a digest is of 8 to 64 hexadecimal digits")


class MachineCommit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The disk of a full machine, as it is now, becomes the image `name`: what it has written lies above its image."""

    name: str

    def __post_init__(self) -> None:
        parse_name(self.name, "image name")


class SandboxCommit(msgspec.Struct, frozen=True):
    sandbox: str
    request: MachineCommit
