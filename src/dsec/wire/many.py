"""Creates alike that one node is asked for at once (`Method.CREATE_MANY`)."""

from __future__ import annotations

import msgspec

from dsec.core.errors import LimitError
from dsec.core.limits import CREATES_TOGETHER_MAX
from dsec.wire.errors import ErrorBody
from dsec.wire.records import CreateRequest, Sandbox


class CreateMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    create: CreateRequest
    keys: tuple[str, ...]  # a sandbox for each, as by `Method.CREATE` with it

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= CREATES_TOGETHER_MAX:
            raise LimitError(f"1 to {CREATES_TOGETHER_MAX} creates are asked for at once, and not {len(self.keys)}")


class Created(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has come of one. Neither: it is under way; ask for it by its key."""

    sandbox: Sandbox | None = None
    error: ErrorBody | None = None


class CreatedMany(msgspec.Struct, frozen=True):
    items: tuple[Created, ...]  # in the order of the keys
