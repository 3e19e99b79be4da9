"""Projects, tokens and quotas of a cluster: kept in its registry, the same for all replicas.

The registry changes one key at a time, and a change of projects and tokens may be of several. So each batch is one key,
numbered: who creates number n has decided on what the n-1 before it gave, and whoever else had is overtaken. Every
replica follows them in order and comes to the same. After many, one replica sums them up (`api.iambase`): whoever is
behind that, or begins, takes the sum and goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import Final

import msgspec

from dsec.api.iambase import BASE, DIGITS, Base, load, read_base, write
from dsec.cluster.registry import Bucket, Change, Registry, Snapshot, key_of
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError, LimitError, Outcome, UnavailableError
from dsec.core.limits import IAM_BATCH_MAX, IAM_BATCHES_MAX, IAM_CHANGES_KEPT, REGISTRY_VALUE_BYTES_MAX
from dsec.iam.slices import Shared
from dsec.iam.store import Batch, Changes, Entry, OvertakenError
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack

log = get_logger(__name__)

_BATCH_BYTES_MAX: Final = REGISTRY_VALUE_BYTES_MAX - 1_024  # a part of a base has it, and what is said of it
_LEASE: Final = "iam-base"
_LEASE_S: Final = 60.0
_CATCH_UP_S: Final = 10.0  # for a batch that somebody else wrote to be seen here
_START_S: Final = 60.0
_AGAIN_S: Final = 1.0


class StoredBatch(msgspec.Struct, frozen=True):
    """What a batch writes; what it expected held when it was written, or it would not be there."""

    puts: dict[str, bytes | None]


class SharedIamStore:
    """`iam.store.IamStore`. What was known stays known while the engine is away; changes fail until it is back."""

    def __init__(self, registry: Registry, clock: Clock | None = None) -> None:
        self._registry = registry
        self._clock = clock or SystemClock()
        self._summed_to = 0  # number up to which there is a base
        self._summing: asyncio.Task[None] | None = None
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._floor = 0  # deletions up to it are forgotten
        self._deleted = 0
        self._applied = 0
        self._early: dict[int, StoredBatch] = {}  # that came before the ones before them
        self._news = asyncio.Condition()
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when all that there is has been seen. Raises UnavailableError."""
        self._task = asyncio.create_task(self._follow(), name="follow projects and tokens")
        try:
            async with asyncio.timeout(_START_S):
                await self._known.wait()
        except TimeoutError as error:
            await self.stop()
            raise UnavailableError(
                "the engine does not tell of projects and tokens", outcome=Outcome.UNCHANGED
            ) from error

    async def stop(self) -> None:
        for task in (self._task, self._summing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """`stop` ends it."""

    def changes(self, after: int) -> Changes | None:
        if after == self._revision:
            return None
        whole = after < self._floor
        newer = [entry for entry in self._entries.values() if entry.revision > (0 if whole else after)]
        newer.sort(key=lambda entry: entry.revision)
        return Changes(self._revision, [e for e in newer if not whole or e.value is not None], whole)

    async def apply(self, batch: Batch) -> int:
        if len(batch.puts) > IAM_BATCH_MAX:
            raise AssertionError("a batch is above what any store takes at once")
        for key, wanted in batch.expect.items():
            entry = self._entries.get(key)
            if wanted != (entry.revision if entry is not None and entry.value is not None else 0):
                raise OvertakenError(f"{key} has changed meanwhile")
        stored = StoredBatch(dict(batch.puts))
        body = pack(stored)
        if len(body) > _BATCH_BYTES_MAX:
            raise LimitError(f"a change of {len(body)} bytes is over {_BATCH_BYTES_MAX}")
        number = self._applied + 1
        try:
            key = f"{number:0{DIGITS}}"
            revision = await self._registry.create(Bucket.IAM, key, body)
        except ConflictError as error:
            await self._seen(number)
            raise OvertakenError("somebody else has changed projects or tokens meanwhile") from error
        base, _ = await read_base(self._registry)
        if base is not None and base.upto >= number:
            # The one of this number was summed up, and is gone: we are behind, and ours counts for nothing.
            with contextlib.suppress(ConflictError):
                await self._registry.delete(Bucket.IAM, key, revision=revision)
            await self._seen(base.upto)
            raise OvertakenError("somebody else has changed projects or tokens meanwhile")
        await self._take(number, stored)
        await self._seen(number)
        return self._revision

    async def _seen(self, number: int) -> None:
        try:
            async with asyncio.timeout(_CATCH_UP_S), self._news:
                await self._news.wait_for(lambda: self._applied >= number)
        except TimeoutError as error:
            raise UnavailableError(
                "the engine is slow to tell of projects and tokens", retry_after_s=_AGAIN_S
            ) from error

    async def _follow(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._registry.watch(Bucket.IAM)) as changes:
                    async for found in changes:
                        await self._heard(found)
            except DsecError as error:
                log.warning("projects and tokens are not followed", error=str(error))
            await asyncio.sleep(_AGAIN_S)

    async def _heard(self, found: Snapshot | Change) -> None:
        """Raises UnavailableError: then all is heard anew."""
        items = [found] if isinstance(found, Change) else found.entries
        for item in items:
            if item.key == BASE and item.value is not None:
                await self._catch_up(unpack(item.value, Base))
        for item in items:
            if item.value is not None and item.key.isdecimal() and int(item.key) > self._summed_to:
                await self._take(int(item.key), unpack(item.value, StoredBatch))
        self._known.set()

    async def _catch_up(self, base: Base) -> None:
        """What came before a base was heard of comes no more: what we lack of it is in it."""
        if self._applied < base.upto:
            base, entries = await load(self._registry)
            self._entries, self._revision, self._applied = entries, base.revision, base.upto
            self._floor, self._deleted = base.revision, 0
            self._early = {number: batch for number, batch in self._early.items() if number > base.upto}
            log.info("caught up with projects and tokens", upto=base.upto)
            async with self._news:
                self._news.notify_all()
        self._summed_to = max(self._summed_to, base.upto)

    def _sum_up(self) -> None:
        if self._applied - self._summed_to >= IAM_BATCHES_MAX and (self._summing is None or self._summing.done()):
            self._summing = asyncio.create_task(self._write_base(), name="sum up projects and tokens")

    async def _write_base(self) -> None:
        """One replica at a time, as a rule; that it is one in the end is seen to by compare-and-set."""
        try:
            await self._registry.create(Bucket.LEASES, _LEASE, b"", ttl_s=_LEASE_S)
        except ConflictError:
            await asyncio.sleep(_AGAIN_S)
            return
        except DsecError as error:
            log.info("changes of projects and tokens are not summed up now", why=error.message)
            return
        upto, revision, entries = self._applied, self._revision, list(self._entries.values())
        try:
            await write(self._registry, self._clock, upto, revision, entries)
        except DsecError as error:
            log.warning("changes of projects and tokens are not summed up now", why=error.message)
        finally:
            with contextlib.suppress(DsecError):
                await self._registry.delete(Bucket.LEASES, _LEASE)

    async def _take(self, number: int, batch: StoredBatch) -> None:
        if number <= self._applied:
            return
        self._early[number] = batch
        while (following := self._early.pop(self._applied + 1, None)) is not None:
            self._applied += 1
            for key, value in following.puts.items():
                self._revision += 1
                self._entries[key] = Entry(key, self._revision, value)
                self._deleted += value is None
        if self._deleted > IAM_CHANGES_KEPT:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.value is not None}
            self._floor, self._deleted = self._revision, 0
        async with self._news:
            self._news.notify_all()
        self._sum_up()


class SharedSlices:
    """`iam.ledger.SliceStore`: what replicas have leased of each cap, changed by compare-and-set."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def read(self, project: str) -> tuple[int, Shared]:
        entry = await self._registry.get(Bucket.QUOTAS, _key(project))
        return (0, Shared()) if entry is None else (entry.revision, unpack(entry.value, Shared))

    async def write(self, project: str, shared: Shared, *, expect: int) -> int | None:
        key, body = _key(project), pack(shared)
        try:
            if not shared.slices:  # nobody has anything of it
                if not expect:
                    return None if await self._registry.get(Bucket.QUOTAS, key) else 0
                await self._registry.delete(Bucket.QUOTAS, key, revision=expect)
                return 0
            if expect:
                return await self._registry.update(Bucket.QUOTAS, key, body, revision=expect)
            return await self._registry.create(Bucket.QUOTAS, key, body)
        except ConflictError:
            return None

    async def remove(self, project: str) -> None:
        await self._registry.delete(Bucket.QUOTAS, _key(project))


def _key(project: str) -> str:
    with contextlib.suppress(InvalidArgumentError):
        return key_of(project)
    return key_of("long", hashlib.sha256(project.encode()).hexdigest())
