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


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What placement must know of a node. `features` are those of the substrate that was asked for."""

    substrates: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    devices: tuple[str, ...] = ()  # kinds
    has_environment: bool = False
    used: dict[str, int] = {}  # dimension → how much
    room: dict[str, int] = {}


class CreatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`spec` with what a snapshot, or the sandbox forked, gives it."""

    node: str
    project: str  # that it would be of
    spec: SandboxSpec
    known: bool = False  # the key was used for the same request, and what that gave is remembered
    refused: ErrorBody | None = None  # why the node would not make it now
    facts: NodeFacts = NodeFacts()


class CapVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One cap that binds the project, and whether the sandbox fits below it."""

    project: str
    cap: str
    limit: float
    used: float
    reserved: float
    asked: float
    fits: bool


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node: could it take the sandbox, and how full would it be then."""

    node: str
    fits: bool
    reason: str | None = None  # a word for programs: closed, substrate, label, memory_bytes, no_capacity, …
    text: str | None = None
    hint: str | None = None
    fullness: float = 0.0  # in the fullest of the dimensions asked; 1 is full
    chosen: bool = False  # the best of those that could


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a create now: it passes the policies, then the caps, then one of the nodes."""

    project: str
    would_be_made: bool
    spec: SandboxSpec
    policy: ErrorBody | None = None  # the rule that forbids it
    caps: list[CapVerdict] = []
    nodes: list[NodeVerdict] = []


class GroupExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a group now. `nodes`: member → where it would go; one node for all where that can be.

    `missing`: the member that no node takes, by itself or beside the others, and `why`; `caps`: of all together.
    """

    project: str
    would_be_made: bool
    nodes: dict[str, str] = {}
    missing: str | None = None
    why: str | None = None
    caps: list[CapVerdict] = []
    members: dict[str, Explanation] = {}
