"""What would become of a create, or of a fork, and why: asked before one, or in its place. Nothing happens."""

from __future__ import annotations

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.spec import SandboxSpec
from dsec.wire.errors import ErrorBody
from dsec.wire.records import CreateRequest
from dsec.wire.snapshots import Fork


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of the two."""

    create: CreateRequest | None = None
    fork: Fork | None = None

    def __post_init__(self) -> None:
        if (self.create is None) == (self.fork is None):
            raise InvalidArgumentError("exactly one of create and fork must be given")

    @property
    def sandbox(self) -> str | None:
        return None if self.fork is None else self.fork.sandbox


class CreatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`spec` with what a snapshot, or the sandbox forked, gives it."""

    node: str
    project: str  # that it would be of
    spec: SandboxSpec
    known: bool = False  # the key was used for the same request, and what that gave is remembered
    refused: ErrorBody | None = None  # why the node would not make it now
