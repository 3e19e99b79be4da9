"""The Registry on JetStream: a bucket is a stream that keeps the last message of each subject."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.msg import Msg

from dsec.cluster.engine.connection import Engine
from dsec.cluster.registry import (
    Bucket,
    Change,
    Entry,
    Snapshot,
    check_key,
    check_prefix,
    check_together,
    check_value,
    is_below,
    whole_ttl_s,
)
from dsec.core.errors import ConflictError, DsecError, Outcome, UnavailableError
from dsec.core.limits import REGISTRY_WATCH_CHANGES_MAX
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_HEARTBEAT_S: Final = 2.0
_SILENCE_S: Final = 3 * _HEARTBEAT_S  # then the watch has died with its server, and begins anew
_FORGET_S: Final = 30.0  # a watch that nobody listens to any more is dropped by the server
_RETRY_S: Final = 0.5
_MARKER_S: Final = 60
_NS: Final = 1_000_000_000
_ROUNDS: Final = 8  # of a create that finds a deletion or an expiry instead of nothing


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    num_pending: int = 0


class _Config(msgspec.Struct, frozen=True):
    subjects: tuple[str, ...]


class _Info(msgspec.Struct, frozen=True):
    config: _Config


class EngineRegistry:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout = engine.layout
        self._places: dict[Bucket, str] = {}
        engine.on_reconnect(self._places.clear)  # the engine may have been set up anew

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        entry, _ = await self._last(bucket, check_key(key))
        return entry

    async def entries(self, bucket: Bucket, prefix: str = "") -> list[Entry]:
        deadline = asyncio.get_running_loop().time() + _SILENCE_S * 2
        while True:
            watch = _Watch(self._engine, bucket, await self._place(bucket), check_prefix(prefix))
            try:
                await watch.begin()
                return sorted(await watch.snapshot())
            except _Lost as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise UnavailableError(f"the engine does not list {bucket}", outcome=Outcome.UNCHANGED) from error
            finally:
                await watch.end()

    async def create(
        self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None, id: str | None = None
    ) -> int:
        """`id`: of a write that may be asked for again, by whom it is done once."""
        expected = 0
        for _ in range(_ROUNDS):
            try:
                return await self._write(bucket, key, value, ttl_s, expected, id)
            except ConflictError:
                entry, expected = await self._last(bucket, key)
                if entry is not None:
                    raise ConflictError(f"{bucket}/{key} is there already") from None
                # What was there was deleted, or its time is over: the place of the marker is what we expect.
        raise UnavailableError(f"{bucket}/{key} changes all the time")

    async def create_all(
        self, bucket: Bucket, entries: Sequence[tuple[str, bytes]], *, ttl_s: float | None = None
    ) -> list[int]:
        check_together(bucket, entries)
        if not entries:
            return []
        place = await self._place(bucket)
        told = [(place + key, value) for key, value in entries]
        last = await self._engine.write_new(self._layout.bucket_stream(bucket), told, ttl_s=whole_ttl_s(ttl_s))
        return list(range(last - len(entries) + 1, last + 1))  # they stand one after the other

    async def update(
        self,
        bucket: Bucket,
        key: str,
        value: bytes,
        *,
        revision: int,
        ttl_s: float | None = None,
        id: str | None = None,
    ) -> int:
        try:
            return await self._write(bucket, key, value, ttl_s, revision, id)
        except ConflictError:
            raise ConflictError(f"{bucket}/{key} is not at revision {revision} any more") from None

    async def put(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._write(bucket, key, value, ttl_s, None)

    async def delete(self, bucket: Bucket, key: str, *, revision: int | None = None) -> None:
        stream, subject = self._layout.bucket_stream(bucket), await self._place(bucket) + check_key(key)
        headers = {"KV-Operation": "PURGE"}  # the marker is there for watchers, and goes by itself
        try:
            await self._engine.write(stream, subject, b"", expected=revision, ttl_s=_MARKER_S, headers=headers)
        except ConflictError:
            raise ConflictError(f"{bucket}/{key} is not at revision {revision} any more") from None

    async def watch(self, bucket: Bucket, prefix: str = "") -> AsyncGenerator[Snapshot | Change, None]:
        check_prefix(prefix)
        while True:
            watch: _Watch | None = None
            try:
                watch = _Watch(self._engine, bucket, await self._place(bucket), prefix)
                await watch.begin()
                yield Snapshot(tuple(sorted(await watch.snapshot())))
                while True:
                    yield await watch.next()
            except (_Lost, DsecError, nats.errors.Error) as error:
                log.info("a watch begins anew", bucket=str(bucket), why=str(error))
            finally:
                if watch is not None:
                    await watch.end()
            await asyncio.sleep(_RETRY_S)

    async def _write(
        self, bucket: Bucket, key: str, value: bytes, ttl_s: float | None, expected: int | None, id: str | None = None
    ) -> int:
        stream, subject = self._layout.bucket_stream(bucket), await self._place(bucket) + check_key(key)
        ttl = whole_ttl_s(ttl_s)
        return await self._engine.write(stream, subject, check_value(value), id=id, expected=expected, ttl_s=ttl)

    async def _last(self, bucket: Bucket, key: str) -> tuple[Entry | None, int]:
        """The entry, and the sequence of what is there in its place; 0: nothing."""
        stream, subject = self._layout.bucket_stream(bucket), await self._place(bucket) + key
        found = await self._engine.last(stream, subject)
        if found is None:
            return None, 0
        entry = None if _is_marker(found.headers) else Entry(key, found.body, found.sequence)
        return entry, found.sequence

    async def _place(self, bucket: Bucket) -> str:
        """What subjects of its keys begin with."""
        known = self._places.get(bucket)
        if known is None:
            found: _Info = await self._engine.ask(f"STREAM.INFO.{self._layout.bucket_stream(bucket)}", {}, _Info)
            known = self._places[bucket] = found.config.subjects[0].removesuffix(">")
        return known


class _Lost(Exception):
    """Messages may have been missed."""


class _Watch:
    """A consumer of our own making: every gap and every silence is noticed, and ends it."""

    def __init__(self, engine: Engine, bucket: Bucket, place: str, prefix: str) -> None:
        self._engine = engine
        self._bucket = bucket
        self._prefix = prefix
        self._place = place
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue(REGISTRY_WATCH_CHANGES_MAX)  # None: the end
        self._overrun = False
        self._delivered = 0
        self._pending = 0
        self._name = secrets.token_hex(8)
        self._subscription: Any = None
        self._forget = engine.on_reconnect(self._cut)

    async def begin(self) -> None:
        layout = self._engine.layout
        inbox = self._engine.client.new_inbox()
        self._subscription = await self._engine.listen(inbox, self._heard)
        subject = self._place + (self._prefix or ">")
        stream = layout.bucket_stream(self._bucket)
        config = {
            "name": self._name,
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "max_deliver": 1,
            "inactive_threshold": int(_FORGET_S * _NS),
            "idle_heartbeat": int(_HEARTBEAT_S * _NS),
        }
        if self._prefix:
            config["filter_subjects"] = [subject, f"{subject}.>"]
            verb = f"CONSUMER.CREATE.{stream}.{self._name}"
        else:
            config["filter_subject"] = subject
            verb = f"CONSUMER.CREATE.{stream}.{self._name}.{subject}"
        made: _Consumer = await self._engine.ask(verb, {"stream_name": stream, "config": config}, _Consumer)
        self._pending = made.num_pending

    async def end(self) -> None:
        self._forget()
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            try:
                await subscription.unsubscribe()
            except Exception as error:  # the connection is closed: there is nothing to take back
                log.debug("a watch ended with its connection", error=str(error))

    async def snapshot(self) -> list[Entry]:
        found: dict[str, Entry] = {}
        for _ in range(self._pending):
            change = await self.next()
            if change.value is not None:
                found[change.key] = Entry(change.key, change.value, change.revision)
            else:
                found.pop(change.key, None)
        return list(found.values())

    async def next(self) -> Change:
        while True:
            message = await self._message()
            status = (message.headers or {}).get("Status")
            if status is not None:
                self._check_idle(message, status)
                continue
            sequence = message.metadata.sequence
            self._delivered += 1
            if sequence.consumer != self._delivered:
                raise _Lost(f"message {sequence.consumer} came where {self._delivered} was due")
            key = message.subject[len(self._place) :]
            if not is_below(key, self._prefix):
                continue
            marked = message.headers is not None and _is_marker_of(message.headers)
            return Change(key, None if marked else message.data, sequence.stream)

    async def _message(self) -> Msg:
        if self._overrun and self._queue.empty():
            raise _Lost("it was read too slowly")
        try:
            async with asyncio.timeout(_SILENCE_S):
                message = await self._queue.get()
        except TimeoutError as error:
            raise _Lost("nothing was heard of it") from error
        if message is None:
            raise _Lost("the connection was lost meanwhile")
        return message

    def _cut(self) -> None:
        if self._queue.full():
            self._overrun = True
        else:
            self._queue.put_nowait(None)

    def _check_idle(self, message: Msg, status: str) -> None:
        if status != "100":
            raise _Lost(f"the server ended it: {status}")
        last = (message.headers or {}).get("Nats-Last-Consumer")
        if last is not None and int(last) != self._delivered:
            raise _Lost(f"{last} were sent and {self._delivered} came")

    async def _heard(self, message: Msg) -> None:
        if self._queue.full():
            self._overrun = True
        elif not self._overrun:
            self._queue.put_nowait(message)


def _is_marker_of(headers: dict[str, str]) -> bool:
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers


def _is_marker(headers: str) -> bool:
    return "KV-Operation:" in headers or "Nats-Marker-Reason:" in headers
