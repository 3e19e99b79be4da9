"""What nodes and replicas of a cluster write down for each other. Readers ignore fields of newer versions."""

from __future__ import annotations

import enum

import msgspec

from dsec.wire.errors import ErrorBody
from dsec.wire.records import NodeLoad


class Wanted(enum.StrEnum):
    """What an operator wants of a node."""

    SERVE = "serve"
    CORDON = "cordon"  # nothing new; what is there stays
    DRAIN = "drain"  # nothing new, and it is to become empty
    RETIRE = "retire"  # it has left for good: its id is never good again


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """MEMBERS/<node>, written by the node when it joins."""

    node: str
    installation: str  # of its state directory: a machine that is set up anew is another node
    term: int  # grows by one with each join; whoever has the largest is in charge of the id
    joined_at: float


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """MEMBERS/<node>.ruling, written by operators and the watcher."""

    wanted: Wanted = Wanted.SERVE
    lost_term: int = 0  # that was declared lost: what its sandboxes were called is free again
    lost_at: float | None = None
    buried_term: int = 0  # whose sandboxes have tombstones, as it is lost or retired
    note: str = ""  # of the operator


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """NODES/<node>, there for as long as the node refreshes it."""

    node: str
    term: int
    host: str  # where replicas connect to
    port: int
    version: str
    substrates: tuple[str, ...] = ()
    networks: dict[str, tuple[str, ...]] = {}  # substrate → modes
    features: dict[str, tuple[str, ...]] = {}  # substrate → abilities
    labels: dict[str, str] = {}
    started_at: float = 0.0
    stopped: bool = False  # its process has ended by itself; its card stays, so that one that comes back was never away
    images: tuple[str, ...] = ()  # environments that are there, as far as a card has room for them
    devices: tuple[str, ...] = ()  # kinds, as CDI has them


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Told every second, to whoever listens."""

    node: str
    term: int
    load: NodeLoad
    admits: bool = True  # new sandboxes


class OwnKey(msgspec.Struct, frozen=True, kw_only=True, tag="read", forbid_unknown_fields=True):
    """Asked by a node: a key of its own, or the ruling of it."""

    bucket: str
    key: str


class OwnWrite(msgspec.Struct, frozen=True, kw_only=True, tag="write", forbid_unknown_fields=True):
    """Asked by a node: its card, or its membership. Written once, however often it is asked for under its `id`."""

    bucket: str
    value: bytes
    id: str
    revision: int | None = None  # of what is there; None: nothing
    ttl_s: float | None = None


class OwnEvents(msgspec.Struct, frozen=True, kw_only=True, tag="events", forbid_unknown_fields=True):
    """Asked by a node: a record of events of its own."""

    body: bytes
    id: str


class OwnGroup(msgspec.Struct, frozen=True, kw_only=True, tag="group", forbid_unknown_fields=True):
    """Asked by a node: what links need of a group that has members on it, and on other nodes."""

    project: str
    name: str
    id: str  # of its job: no later group of the name


class GroupPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: of links with an end on the node that asks, and of nodes that are in the cluster, nothing else."""

    nodes: dict[str, str]  # member → node
    links: dict[str, list[tuple[str, int]]]  # member → those of other nodes that it reaches: member, port
    addresses: dict[str, tuple[str, int, int]]  # node → host, port, term


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node is answered: `revision` of what is there or was written, 0 for nothing; or an error."""

    value: bytes = b""
    revision: int = 0
    error: ErrorBody | None = None


def ruling_key(node: str) -> str:
    return f"{node}.ruling"
