"""What all changes of projects and tokens up to one of them have come to, written down so that they can go.

It lies beside them in the registry: its parts first, then `base`, which says which they are and is changed by
compare-and-set. So there is one at a time, and it is whole. What comes up to it counts for nothing any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from dsec.cluster.registry import Bucket, Registry
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError, Outcome, UnavailableError
from dsec.core.limits import IAM_BATCHES_KEPT, REGISTRY_VALUE_BYTES_MAX
from dsec.iam.store import Entry
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack

log = get_logger(__name__)

BASE: Final = "base"
DIGITS: Final = 12
_PART_BYTES: Final = REGISTRY_VALUE_BYTES_MAX - 8_192
_ROUNDS: Final = 8
_MAKE_S_MAX: Final = 600.0  # one that took longer is given up: its parts may be taken for leftovers then
_LEFTOVER_S: Final = 3_600.0


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """IAM/base."""

    upto: int  # number of the last change that is in it
    revision: int
    id: str  # of its parts
    parts: int


class _Part(msgspec.Struct, frozen=True):
    """IAM/base.<id>.<number>."""

    entries: list[tuple[str, int, bytes]]


class Whole(NamedTuple):
    base: Base
    entries: dict[str, Entry]


async def read_base(registry: Registry) -> tuple[Base | None, int]:
    """And its revision in the registry; 0: there is none."""
    entry = await registry.get(Bucket.IAM, BASE)
    return (None, 0) if entry is None else (unpack(entry.value, Base), entry.revision)


async def load(registry: Registry) -> Whole:
    """The one of now. Raises UnavailableError."""
    for _ in range(_ROUNDS):
        base, _revision = await read_base(registry)
        if base is None:
            break
        found: dict[str, Entry] = {}
        for number in range(base.parts):
            part = await registry.get(Bucket.IAM, _part_key(base.id, number))
            if part is None:
                break  # another one has taken its place
            for key, revision, value in unpack(part.value, _Part).entries:
                found[key] = Entry(key, revision, value)
        else:
            return Whole(base, found)
    raise UnavailableError("what projects and tokens have come to cannot be read", outcome=Outcome.UNCHANGED)


async def write(registry: Registry, clock: Clock, upto: int, revision: int, entries: Sequence[Entry]) -> bool:
    """What is said of the change `upto` becomes the base, and changes well before it go. False: another one was there
    first. Raises UnavailableError; it can be done again."""
    began_s = clock.monotonic_s()
    old, at = await read_base(registry)
    if old is not None and old.upto >= upto:
        return False
    id = f"{int(clock.wall_s())}-{secrets.token_hex(6)}"
    parts = list(_parts(entries))
    for number, part in enumerate(parts):
        await registry.put(Bucket.IAM, _part_key(id, number), pack(_Part(part)))
    base = Base(upto=upto, revision=revision, id=id, parts=len(parts))
    try:
        if clock.monotonic_s() - began_s > _MAKE_S_MAX:
            raise ConflictError("it took too long")
        if at:
            await registry.update(Bucket.IAM, BASE, pack(base), revision=at)
        else:
            await registry.create(Bucket.IAM, BASE, pack(base))
    except ConflictError:
        for number in range(len(parts)):
            await registry.delete(Bucket.IAM, _part_key(id, number))
        return False
    await _tidy(registry, clock, base, old)
    log.info("changes of projects and tokens are summed up", upto=upto, entries=len(entries), parts=len(parts))
    return True


async def _tidy(registry: Registry, clock: Clock, base: Base, old: Base | None) -> None:
    for entry in await registry.entries(Bucket.IAM):
        if entry.key.isdecimal():
            gone = int(entry.key) <= base.upto - IAM_BATCHES_KEPT
        else:
            id = entry.key.removeprefix(f"{BASE}.").partition(".")[0]
            made_at = id.partition("-")[0]
            before = old is not None and id == old.id
            left = made_at.isdecimal() and clock.wall_s() - int(made_at) > _LEFTOVER_S
            gone = entry.key != BASE and id != base.id and (before or left)
        if gone:
            await registry.delete(Bucket.IAM, entry.key)


def _parts(entries: Iterable[Entry]) -> Iterable[list[tuple[str, int, bytes]]]:
    part: list[tuple[str, int, bytes]] = []
    size = 0
    for entry in entries:
        if entry.value is None:
            continue
        more = len(entry.key) + len(entry.value) + 32
        if part and size + more > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append((entry.key, entry.revision, entry.value))
        size += more
    yield part


def _part_key(id: str, number: int) -> str:
    return f"{BASE}.{id}.{number:06}"
