"""What may be removed of a node's disk, and why: a pure decision on a picture of what is there.

A thing stays while it is kept for a reason of its own, or while something that stays needs it. Removals come in an
order in which nothing that is still there ever lacks what it needs, so that a run may be cut off anywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final


class Kind(enum.StrEnum):
    RECORD = "record"  # of an environment: what a name stands for, or stood for
    BUILD = "build"  # what a build request led to
    LAYER = "layer"
    BLOB = "blob"  # of an image from a registry, kept for the next pull
    CHUNKS = "chunks"  # of a layer from a store, loaded as they were read
    UPPER = "upper"  # what a sandbox has written
    OUTPUT = "output"  # of a sandbox's commands
    SOCKET = "socket"  # of a sandbox's agent
    DRAFT = "draft"  # half made or half removed


# What names comes before what it names.
_ORDER: Final = {kind: place for place, kind in enumerate(Kind)}
# Can be had again from where it came from, so that all of it may go when the disk is short.
_CACHES: Final = frozenset({Kind.BLOB})

Key = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Thing:
    """Something on the disk."""

    kind: Kind
    name: str
    bytes: int = 0
    used_at: float = 0.0  # seconds since the epoch: made, replaced or last used
    kept: str = ""  # why it stays whatever its age: what the text says; empty: for nothing
    needs: frozenset[Key] = frozenset()  # what must be there as long as it is

    @property
    def key(self) -> Key:
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class Rules:
    now: float
    record_keep_s: float = 0.0  # what a name stood for before
    blob_keep_s: float = 0.0  # without use
    blob_bytes_max: int = 1 << 62
    stray_keep_s: float = 0.0  # of what nobody knows: it may be somebody's who is just beginning
    want_bytes: int = 0  # to be freed at least, if it can be: caches and what names stood for go before their time


@dataclass(frozen=True, slots=True)
class Removal:
    kind: Kind
    name: str
    bytes: int
    reason: str

    @property
    def key(self) -> Key:
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class Plan:
    removals: tuple[Removal, ...] = ()
    kept: dict[Key, str] = field(default_factory=dict)  # of those that nothing names, why they stay all the same

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals)


def plan_collection(things: Iterable[Thing], rules: Rules) -> Plan:
    """Which of `things` go. The same things and rules give the same plan, in whatever order they come."""
    by_key = {thing.key: thing for thing in things}
    doomed = {thing.key: reason for thing in by_key.values() if (reason := _outlived(thing, rules))}
    _over_size(by_key.values(), rules, doomed)
    plan = _swept(by_key, doomed)
    for thing in _before_their_time(by_key.values()):
        if plan.bytes >= rules.want_bytes:
            break
        if thing.key not in doomed:
            doomed[thing.key] = "room is needed"
            plan = _swept(by_key, doomed)
    return plan


def _outlived(thing: Thing, rules: Rules) -> str | None:
    """Why a thing that nothing needs goes by its age; None: it stays, or its fate is that of who needs it."""
    if thing.kept:
        return None
    idle_s = rules.now - thing.used_at
    match thing.kind:
        case Kind.RECORD:
            return "replaced" if idle_s >= rules.record_keep_s else None
        case Kind.BLOB:
            return "not used for long" if idle_s >= rules.blob_keep_s else None
        case Kind.UPPER | Kind.OUTPUT | Kind.SOCKET | Kind.DRAFT:
            return "nobody's" if idle_s >= rules.stray_keep_s else None
    return "nothing needs it"


def _over_size(things: Iterable[Thing], rules: Rules, doomed: dict[Key, str]) -> None:
    """Caches are bounded: what was used last stays."""
    held = 0
    for thing in sorted(things, key=lambda thing: (-thing.used_at, thing.name)):
        if thing.kind not in _CACHES or thing.key in doomed:
            continue
        held += thing.bytes
        if held > rules.blob_bytes_max and not thing.kept:
            doomed[thing.key] = "above the size of its cache"


def _before_their_time(things: Iterable[Thing]) -> Sequence[Thing]:
    early = [thing for thing in things if not thing.kept and (thing.kind in _CACHES or thing.kind is Kind.RECORD)]
    # Caches first: what a name stood for may not be had again.
    return sorted(early, key=lambda thing: (thing.kind is Kind.RECORD, thing.used_at, thing.name))


def _swept(things: dict[Key, Thing], doomed: dict[Key, str]) -> Plan:
    """All that is doomed, less what something that stays needs; with builds and chunks, which go with their layers."""
    stay = {key for key in things if key not in doomed}
    todo = list(stay)
    while todo:
        thing = things[todo.pop()]
        if thing.kind in (Kind.BUILD, Kind.CHUNKS):
            continue  # has a layer, but does not hold it
        for key in thing.needs:
            if key in things and key not in stay:
                stay.add(key)
                todo.append(key)
    for thing in things.values():
        if thing.kind is Kind.BUILD and not thing.kept and thing.needs <= stay:
            stay.add(thing.key)
        if thing.kind is Kind.CHUNKS and not thing.kept and thing.needs & stay:
            stay.add(thing.key)
    going = _users_first([things[key] for key in doomed if key in things and key not in stay])
    return Plan(
        tuple(Removal(thing.kind, thing.name, thing.bytes, doomed[thing.key]) for thing in going),
        {key: thing.kept for key, thing in sorted(things.items()) if thing.kept},
    )


def _users_first(going: list[Thing]) -> list[Thing]:
    """Kind by kind, and before each thing those of its kind that need it. Things that need each other: all at once."""
    left = sorted(going, key=lambda thing: (_ORDER[thing.kind], thing.name))
    done: list[Thing] = []
    while left:
        kind = left[0].kind
        same = [thing for thing in left if thing.kind is kind]
        needed = {key for thing in same for key in thing.needs if key != thing.key}
        free = [thing for thing in same if thing.key not in needed] or same
        done += free
        left = [thing for thing in left if thing not in free]
    return done
