"""Small shared state: buckets of keys with revisions, times to live and watches. The contract of both forms."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple, Protocol

from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import (
    REGISTRY_KEY_BYTES_MAX,
    REGISTRY_TOGETHER_MAX,
    REGISTRY_TTL_S_MAX,
    REGISTRY_VALUE_BYTES_MAX,
)

_KEY: Final = re.compile(r"[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]+)*\Z")
_ESCAPED: Final = re.compile(r"[^A-Za-z0-9_-]")


class Bucket(enum.StrEnum):
    """What is kept; nothing here grows with execs."""

    NODES = "NODES"  # <node> → card; lives as long as it is refreshed
    MEMBERS = "MEMBERS"  # <node> → which installation and generation it is, and what an operator wants of it
    LEASES = "LEASES"  # <what> → who holds it
    NAMES = "NAMES"  # <project>.<name> → sandbox
    JOBS = "JOBS"  # <project>.<name> → its lease and state
    POOLS = "POOLS"  # <environment digest> → spares wanted
    SANDBOXES = "SANDBOXES"  # <node>.<sandbox> → last known state, for when the node is gone
    IAM = "IAM"  # <number> → a batch of changes of projects, principals, grants and tokens
    QUOTAS = "QUOTAS"  # <project> → what replicas have leased of its caps
    OPS = "OPS"  # <project>.<idempotency key> → node and request (ruling 3)


TOGETHER: Final = frozenset((Bucket.OPS,))  # of which many keys can be made in one write


class Entry(NamedTuple):
    key: str
    value: bytes
    revision: int  # grows with every write to the bucket, so one that comes later is newer


class Change(NamedTuple):
    key: str
    value: bytes | None  # None: deleted, or its time is over
    revision: int


class Snapshot(NamedTuple):
    """All there is. What a watcher knew before is void."""

    entries: tuple[Entry, ...]


class Keys(Protocol):
    """What a node has of a Registry: its own keys (`members.membership`).

    Raises UnavailableError when the engine cannot be asked: `unchanged` when nothing was written for sure.
    """

    async def get(self, bucket: Bucket, key: str) -> Entry | None: ...

    async def create(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """The revision. Raises ConflictError when the key is there."""
        ...

    async def update(self, bucket: Bucket, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Raises ConflictError when the key is not at `revision` any more. The time to live begins again, or ends."""
        ...


class Registry(Keys, Protocol):
    async def create_all(
        self, bucket: Bucket, entries: Sequence[tuple[str, bytes]], *, ttl_s: float | None = None
    ) -> list[int]:
        """All of them or none, of different keys; the revisions, in their order. For buckets in `TOGETHER`.

        Raises ConflictError when one of the keys is there, or has just been; UnavailableError is not tried again here,
        and says nothing of whether they were written.
        """
        ...

    async def entries(self, bucket: Bucket, prefix: str = "") -> list[Entry]:
        """Those whose key is `prefix`, or begins with `prefix` and a dot; all without one. In order of keys."""
        ...

    async def put(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Whatever was there."""
        ...

    async def delete(self, bucket: Bucket, key: str, *, revision: int | None = None) -> None:
        """Nothing there is no error. Raises ConflictError when `revision` is given and it is at another."""
        ...

    def watch(self, bucket: Bucket, prefix: str = "") -> AsyncGenerator[Snapshot | Change, None]:
        """First a Snapshot, then changes in order; a further Snapshot whenever changes may have been missed.

        Of changes of one key that follow each other quickly the earlier ones may be left out. Ends never; close the
        generator (`contextlib.aclosing`).
        """
        ...


def key_of(*parts: str) -> str:
    """A key from any texts, one token each; different texts give different keys."""
    key = ".".join(_token(part) for part in parts)
    if len(key) > REGISTRY_KEY_BYTES_MAX:
        raise InvalidArgumentError(f"a key of {len(key)} bytes is over {REGISTRY_KEY_BYTES_MAX}")
    return key


def _token(text: str) -> str:
    # '=' escapes, as '%' does in URLs: it is what the engine's keys may hold beside letters and digits.
    return _ESCAPED.sub(_escape, text) or "=="


def _escape(found: re.Match[str]) -> str:
    return "".join(f"={byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def check_key(key: str) -> str:
    if len(key) > REGISTRY_KEY_BYTES_MAX or not _KEY.match(key):
        raise InvalidArgumentError(f"{key[:80]!r} is not a key of the registry", hint="make it with key_of")
    return key


def check_prefix(prefix: str) -> str:
    return check_key(prefix) if prefix else prefix


def check_value(value: bytes) -> bytes:
    if len(value) > REGISTRY_VALUE_BYTES_MAX:
        raise InvalidArgumentError(f"a value of {len(value)} bytes is over {REGISTRY_VALUE_BYTES_MAX}")
    return value


def whole_ttl_s(ttl_s: float | None) -> int | None:
    """The engine counts whole seconds, one at least: rounded up, so that nothing ends early."""
    if ttl_s is None:
        return None
    if not 0 < ttl_s <= REGISTRY_TTL_S_MAX:
        raise InvalidArgumentError(f"a time to live is above 0 and at most {REGISTRY_TTL_S_MAX:g} s")
    return math.ceil(ttl_s)


def check_together(bucket: Bucket, entries: Sequence[tuple[str, bytes]]) -> None:
    if bucket not in TOGETHER:
        raise InvalidArgumentError(f"keys of {bucket} are written one by one")
    if len(entries) > REGISTRY_TOGETHER_MAX:
        raise InvalidArgumentError(f"{len(entries)} keys at once are over {REGISTRY_TOGETHER_MAX}")
    for key, value in entries:
        check_key(key)
        check_value(value)


def is_below(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(prefix + ".")
