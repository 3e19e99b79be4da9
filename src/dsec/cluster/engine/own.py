"""What a node has of the cluster's shared state: it asks replicas and watchers (`engine.desk`) for what is its own."""

from __future__ import annotations

import secrets
from typing import Final

from dsec.cluster.engine.connection import Engine, NotNow
from dsec.cluster.log import LogStream, check_record, node_subject
from dsec.cluster.registry import Bucket, Entry, check_value
from dsec.core.errors import ForbiddenError, ProtocolError, UnavailableError
from dsec.core.ids import NodeId
from dsec.wire.cluster import GroupPlaces, OwnEvents, OwnGroup, OwnKey, OwnWrite, Told
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import error_of

_NOBODY: Final = "no replica and no watcher is there"


class OwnKeys:
    """`cluster.registry.Keys`: the keys of one node."""

    def __init__(self, engine: Engine, node: NodeId) -> None:
        self._engine = engine
        self._node = node

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        told = await ask(self._engine, self._node, OwnKey(bucket=bucket, key=key))
        return Entry(key, told.value, told.revision) if told.revision else None

    async def create(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._write(bucket, key, value, None, ttl_s)

    async def update(self, bucket: Bucket, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return await self._write(bucket, key, value, revision, ttl_s)

    async def _write(self, bucket: Bucket, key: str, value: bytes, revision: int | None, ttl_s: float | None) -> int:
        if key != self._node:
            raise ForbiddenError(f"node {self._node} does not write {bucket}/{key}")
        write = OwnWrite(
            bucket=bucket, value=check_value(value), id=secrets.token_hex(12), revision=revision, ttl_s=ttl_s
        )
        return (await ask(self._engine, self._node, write)).revision


class OwnLog:
    """`cluster.log.Appends`: the events of one node."""

    def __init__(self, engine: Engine, node: NodeId) -> None:
        self._engine = engine
        self._node = node

    async def append(self, stream: LogStream, subject: str, body: bytes, *, id: str, after: int | None = None) -> int:
        check_record(body, id)
        if (stream, subject, after) != (LogStream.EVENTS, node_subject(self._node), None):
            raise ForbiddenError(f"node {self._node} does not write {stream}/{subject}")
        return (await ask(self._engine, self._node, OwnEvents(body=body, id=id))).revision


async def places_of(engine: Engine, node: NodeId, group: OwnGroup) -> GroupPlaces:
    """What links need of a group that has members on `node`, and on others. Raises ForbiddenError, UnavailableError."""
    return unpack((await ask(engine, node, group)).value, GroupPlaces)


async def ask(engine: Engine, node: NodeId, what: OwnKey | OwnWrite | OwnEvents | OwnGroup) -> Told:
    """Raises what the desk does, and UnavailableError."""

    def read(answer: bytes) -> Told:
        try:
            told = unpack(answer, Told)
        except ProtocolError as error:
            raise NotNow(f"an answer cannot be read: {error.message}") from error
        if told.error is None:
            return told
        refusal = error_of(told.error)
        raise NotNow(refusal.message) if isinstance(refusal, UnavailableError) else refusal

    # One that has gone may count as there for a while: from the second time on all are asked.
    places = (engine.layout.desk(node), engine.layout.desks(node))
    told: Told = await engine.request(places, pack(what), read, nobody=_NOBODY)
    return told
