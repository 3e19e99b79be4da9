"""Many creates alike: placed, written down and sent in groups (ruling 32), each once for its key as if it came alone.

What does not go the way of the group goes on by itself: where a key was used before, a node refuses, or is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dsec.cluster.fleet import Told
from dsec.cluster.operations import Operation
from dsec.cluster.queue import Patience
from dsec.cluster.rpc import told as told_of
from dsec.core.errors import DsecError, UnsupportedError
from dsec.core.ids import NodeId
from dsec.core.limits import BATCH_CONCURRENCY
from dsec.observe.logs import get_logger
from dsec.wire.node import Caller, Method
from dsec.wire.records import CreateRequest, Sandbox

if TYPE_CHECKING:
    from dsec.cluster.many import ManyNodes

log = get_logger(__name__)


class Together:
    """See `cluster.fleet.CreatesTogether`."""

    def __init__(self, fleet: ManyNodes) -> None:
        self._fleet = fleet

    async def create(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        keys: Sequence[str],
        timeout_s: float,
        patience: Callable[[], Patience | None],
        told: Told,
    ) -> None:
        request = msgspec.structs.replace(request, queue_s=0.0)
        await _Group(self._fleet, request, caller, keys, timeout_s, patience, told).run()


@dataclass
class _Group:
    _fleet: ManyNodes
    _request: CreateRequest
    _caller: Caller
    _keys: Sequence[str]
    _timeout_s: float
    _patience: Callable[[], Patience | None]
    _told: Told

    def __post_init__(self) -> None:
        self._until = self._fleet.clock.monotonic_s() + self._timeout_s

    async def run(self) -> None:
        parts: list[tuple[NodeId, range]] = []
        nodes: list[NodeId] = []
        for node, count in self._fleet.choose_all(self._request, self._caller.project, len(self._keys)):
            parts.append((node, range(len(nodes), len(nodes) + count)))
            nodes += [node] * count
        operations = await self._begin(nodes)
        async with asyncio.TaskGroup() as group:
            if operations:
                for node, places in parts:
                    group.create_task(self._at(node, places, operations))
            group.create_task(self._alone(range(len(operations), len(self._keys))))

    async def _begin(self, nodes: Sequence[NodeId]) -> Sequence[Operation]:
        """Of the first so many keys, at these nodes; none when one is known, or the engine does not take them."""
        keys, project = self._keys[: len(nodes)], self._caller.project
        try:
            return await self._fleet.operations.begin_all(
                project, keys, self._request, nodes, timeout_s=self._timeout_s
            )
        except DsecError as error:
            log.info("creates of a batch go one by one", why=error.message)
            return ()

    async def _at(self, node: NodeId, places: range, operations: Sequence[Operation]) -> None:
        come = await self._ask(node, places)
        done = [(place, one) for place, one in zip(places, come, strict=True) if isinstance(one, Sandbox)]
        if done:
            await self._told(done)
        if len(done) == len(come):
            return
        async with asyncio.TaskGroup() as group:
            for place, one in zip(places, come, strict=True):
                if not isinstance(one, Sandbox):
                    group.create_task(self._one(place, (operations[place], one)))

    async def _ask(self, node: NodeId, places: range) -> Sequence[Sandbox | DsecError | None]:
        fleet, request, caller = self._fleet, self._request, self._caller
        left_s = fleet.left_s(self._until)
        try:
            if len(places) == 1:
                return [await fleet.ask(node, request, caller, self._keys[places[0]], left_s)]
            keys = tuple(self._keys[places.start : places.stop])
            return await fleet.ask_many(node, request, caller, keys, left_s)
        except UnsupportedError as error:
            # Of several at once: the node is of before there was such a call, and is asked for each.
            return [error] if len(places) == 1 else [None] * len(places)
        except DsecError as error:
            return [error] * len(places)

    async def _alone(self, places: Iterable[int]) -> None:
        """Those that no group was made of."""
        turn = asyncio.Semaphore(BATCH_CONCURRENCY)

        async def work(place: int) -> None:
            async with turn:
                await self._one(place, None)

        async with asyncio.TaskGroup() as group:
            for place in places:
                group.create_task(work(place))

    async def _one(self, place: int, begun: tuple[Operation, DsecError | None] | None) -> None:
        timeout_s = self._timeout_s if begun is None else self._fleet.left_s(self._until)
        come: Sandbox | DsecError
        try:
            come = await self._fleet.go_on(
                self._request,
                caller=self._caller,
                key=self._keys[place],
                timeout_s=timeout_s,
                patience=self._patience(),
                begun=begun,
            )
        except DsecError as error:
            come = error
        except Exception as error:
            come = told_of(error, Method.CREATE)
        await self._told([(place, come)])
