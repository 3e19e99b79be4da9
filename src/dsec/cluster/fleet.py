"""What a replica asks of all nodes together: where creates go, what there is, and who answers for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from dsec.cluster.rpc import Rpc
from dsec.core.ids import NodeId
from dsec.wire.codec import pack, unpack
from dsec.wire.events import EventQuery
from dsec.wire.node import Caller, Method, Nothing, Right, Stream
from dsec.wire.records import CreateRequest, Health, ListQuery, Sandbox, SandboxPage

HEALTH_TIMEOUT_S: Final = 5.0


class Fleet(Protocol):
    def node_for(self, method: Method, named: str | None) -> NodeId:
        """Who does what is not about one sandbox. `named`: the node that the caller asked for.

        Raises InvalidArgumentError when there are several and none is named, NodeRetiredError, UnavailableError.
        """
        ...

    def nodes(self) -> Sequence[NodeId]:
        """All on which there may be sandboxes now."""
        ...

    async def node_of_key(self, project: str, key: str) -> NodeId | None:
        """Which node may have made something for this key before; None: none has."""
        ...

    def silent(self) -> Sequence[NodeId]:
        """Those on which there may be more, and that cannot be asked now."""
        ...

    async def create(self, request: CreateRequest, *, caller: Caller, key: str | None, timeout_s: float) -> Sandbox:
        """As the node does it (`Method.CREATE`): with a key once, whichever replica is asked and however often."""
        ...

    async def listing(self, query: ListQuery, *, caller: Caller, timeout_s: float) -> SandboxPage: ...

    async def events(self, query: EventQuery, *, caller: Caller) -> Stream:
        """What happened to what the caller sees (`Method.EVENTS`)."""
        ...

    async def health(self, version: str) -> Health: ...


class OneNode:
    """Of `dsec up`: the node beside us, which keeps keys and names itself."""

    def __init__(self, rpc: Rpc, node: NodeId) -> None:
        self._rpc = rpc
        self._node = node

    def node_for(self, method: Method, named: str | None) -> NodeId:
        return self._node if named is None else NodeId(named)

    def nodes(self) -> Sequence[NodeId]:
        return (self._node,)

    async def node_of_key(self, project: str, key: str) -> NodeId | None:
        return self._node

    def silent(self) -> Sequence[NodeId]:
        return ()

    async def create(self, request: CreateRequest, *, caller: Caller, key: str | None, timeout_s: float) -> Sandbox:
        answer = await self._rpc.call(
            self._node, Method.CREATE, pack(request), caller=caller, timeout_s=timeout_s, key=key
        )
        return unpack(answer, Sandbox)

    async def listing(self, query: ListQuery, *, caller: Caller, timeout_s: float) -> SandboxPage:
        answer = await self._rpc.call(self._node, Method.LIST, pack(query), caller=caller, timeout_s=timeout_s)
        return unpack(answer, SandboxPage)

    async def events(self, query: EventQuery, *, caller: Caller) -> Stream:
        return await self._rpc.open(self._node, Method.EVENTS, pack(query), caller=caller)

    async def health(self, version: str) -> Health:
        caller = Caller(principal="api", project="/", rights=frozenset({Right.READ}))
        answer = await self._rpc.call(
            self._node, Method.HEALTH, pack(Nothing()), caller=caller, timeout_s=HEALTH_TIMEOUT_S
        )
        return msgspec.structs.replace(unpack(answer, Health), load=self._rpc.load(self._node))
