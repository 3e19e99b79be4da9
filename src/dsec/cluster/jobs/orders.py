"""One order to all sandboxes of a job: every node is told, and tells what it has done, a slice at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Final

from dsec.cluster.fleet import Fleet
from dsec.cluster.rpc import Rpc
from dsec.core.errors import DeadlineError, DsecError, UnavailableError, UnsupportedError
from dsec.core.ids import NodeId
from dsec.core.limits import JOB_ITEM_S, JOB_NODES_AT_ONCE_MAX, JOB_PARTS_MAX, JOB_SLICE_S
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
from dsec.wire.jobs import JobCounts, JobOrder, JobOrderKind, JobPart, JobQuery, JobRow, JobState
from dsec.wire.node import Caller, Method, Right

KIND_OF: Final = {
    JobState.RUNNING: JobOrderKind.RESUME,
    JobState.PAUSED: JobOrderKind.PAUSE,
    JobState.STOPPED: JobOrderKind.STOP,
}
_MARGIN_S: Final = 30.0
_COUNT_S: Final = 5.0
_TRIES: Final = 3  # of one slice, while its node is not reached
_PAUSE_S: Final = 1.0
_MUTE_S: Final = 60.0  # a node that takes calls and does not answer holds up one order, and not all that come meanwhile


class Orders:
    def __init__(self, rpc: Rpc, fleet: Fleet) -> None:
        self._rpc = rpc
        self._fleet = fleet
        self._mute: dict[NodeId, float] = {}  # until when it is not asked

    async def give(
        self, row: JobRow, kind: JobOrderKind, *, going: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[JobPart, None]:
        """What each node has done, as it comes; close the generator (`contextlib.aclosing`). Nodes that cannot be
        asked, and those that fail, are told of by a part with an error. `going` False: nothing more is begun."""
        parts: asyncio.Queue[JobPart | None] = asyncio.Queue(JOB_NODES_AT_ONCE_MAX)
        nodes = iter(self._fleet.nodes())

        async def work() -> None:
            for node in nodes:
                await self._at(node, row, kind, parts, going)

        async def all() -> None:
            for node in self._fleet.silent():
                error = UnavailableError(f"node {node} is away")
                await parts.put(JobPart(node=node, error=body_of(error)))
            async with asyncio.TaskGroup() as group:
                for _ in range(JOB_NODES_AT_ONCE_MAX):
                    group.create_task(work())
            await parts.put(None)

        task = asyncio.create_task(all(), name=f"order to job {row.name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while True:
                getting = asyncio.ensure_future(parts.get())
                await asyncio.wait({getting, task}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    if parts.empty():
                        await task  # raises what it failed with
                        return
                    continue
                part = getting.result()
                if part is None:
                    return
                yield part
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def carry_out(self, row: JobRow, kind: JobOrderKind, *, going: Callable[[], bool]) -> bool:
        """Whether all is done, everywhere."""
        good = True
        async with contextlib.aclosing(self.give(row, kind, going=going)) as parts:
            async for part in parts:
                good = good and is_done(part, kind)
        return good and going()

    async def counts(self, row: JobRow, caller: Caller) -> tuple[dict[str, int], list[str]]:
        """Of sandboxes by state, and the nodes that did not answer."""
        total: Counter[str] = Counter()
        missing = [str(node) for node in self._fleet.silent()]
        turn = asyncio.Semaphore(JOB_NODES_AT_ONCE_MAX)
        body = pack(JobQuery(row.project, row.name, row.id))

        async def ask(node: NodeId) -> None:
            async with turn:
                try:
                    answer = await self._rpc.call(node, Method.JOB_COUNT, body, caller=caller, timeout_s=_COUNT_S)
                    total.update(unpack(answer, JobCounts).by_state)
                except DsecError:
                    missing.append(str(node))

        async with asyncio.TaskGroup() as group:
            for node in self._fleet.nodes():
                group.create_task(ask(node))
        return dict(total), sorted(missing)

    async def _at(
        self,
        node: NodeId,
        row: JobRow,
        kind: JobOrderKind,
        parts: asyncio.Queue[JobPart | None],
        going: Callable[[], bool],
    ) -> None:
        after: str | None = ""
        count = 0
        loop = asyncio.get_running_loop()
        try:
            if loop.time() < self._mute.get(node, 0.0):
                raise UnavailableError(f"node {node} did not answer the last order", retry_after_s=_MUTE_S)
            while after is not None and going():
                part = await self._slice(node, row, kind, after)
                if part.node != node or (part.next is not None and part.next <= after):
                    raise UnavailableError(f"node {node} tells of another, or goes back in what it tells")
                if (count := count + 1) > JOB_PARTS_MAX:
                    raise UnavailableError(f"node {node} tells of more sandboxes than there can be")
                after = part.next
                await parts.put(part)
            self._mute.pop(node, None)
        except DsecError as error:
            if isinstance(error, DeadlineError):
                self._mute[node] = loop.time() + _MUTE_S
            await parts.put(JobPart(node=node, error=body_of(error)))

    async def _slice(self, node: NodeId, row: JobRow, kind: JobOrderKind, after: str) -> JobPart:
        order = JobOrder(id=row.id, job=row.name, project=row.project, order=row.order, kind=kind, after=after)
        caller = Caller(principal=row.principal, project=row.project, rights=frozenset({Right.READ, Right.USE}))
        for left in reversed(range(_TRIES)):
            try:
                answer = await self._rpc.call(
                    node,
                    Method.JOB_ACT,
                    pack(order),
                    caller=caller,
                    timeout_s=JOB_SLICE_S + JOB_ITEM_S + _MARGIN_S,
                )
                return unpack(answer, JobPart)
            except UnavailableError:
                if not left:
                    raise
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("the last try raises")


def is_done(part: JobPart, kind: JobOrderKind) -> bool:
    """What cannot be paused is done with: the grace decides over it."""
    if part.error is not None:
        return False
    passed = {UnsupportedError.code} if kind is JobOrderKind.PAUSE else set()
    return all(item.error is None or item.error.code in passed for item in part.items)
