"""The sandboxes of a job on this node: counted, and acted on by one call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from dsec.core import limits
from dsec.core.errors import ConflictError, DeadlineError, DsecError, GoneError, NotFoundError, Outcome
from dsec.core.ids import NodeId
from dsec.core.spec import SandboxSpec
from dsec.core.states import ENDED, EndCause, SandboxState
from dsec.node.registry import Registry
from dsec.node.rights import project_seen, reaches
from dsec.node.supervisor import Supervisor
from dsec.observe.logs import get_logger
from dsec.wire.errors import body_of
from dsec.wire.jobs import JobCounts, JobItem, JobOrder, JobOrderKind, JobPart, JobQuery
from dsec.wire.node import Caller

log = get_logger(__name__)

_NONE: Final = (-1, None)
_ENDS: Final = (JobOrderKind.STOP, JobOrderKind.CLEAR)


class NodeJobs:
    def __init__(
        self, node: NodeId, registry: Registry, clock_s: Callable[[], float], settled: Callable[[str], Awaitable[None]]
    ) -> None:
        """`settled` waits until a sandbox has been taken over from an earlier process."""
        self._node = node
        self._registry = registry
        self._clock_s = clock_s
        self._settled = settled
        self._orders: dict[str, tuple[int, JobOrderKind]] = {}  # the last one of each job by its id; oldest first

    def count(self, query: JobQuery, caller: Caller) -> JobCounts:
        """Raises NotFoundError for a project that the caller does not reach."""
        _check_reach(caller, query.project, query.job)
        found = [one for one in self._registry.of_job(query.project, query.job) if _is_of(one, query.id)]
        return JobCounts(dict(Counter(str(sandbox.state) for sandbox in found if not sandbox.ended)))

    def check_new(self, spec: SandboxSpec) -> None:
        """Raises ConflictError when its job was stopped: who asks for it has not heard of that yet."""
        if spec.job_id is not None and self._orders.get(spec.job_id, _NONE)[1] is JobOrderKind.STOP:
            raise ConflictError(f"job {spec.job} is stopped and takes no new sandboxes")

    def is_paused(self, job: str) -> bool:
        return self._orders.get(job, _NONE)[1] is JobOrderKind.PAUSE

    async def act(self, order: JobOrder, caller: Caller) -> JobPart:
        """As many sandboxes as one call takes. Raises ConflictError when a later order has come meanwhile."""
        _check_reach(caller, order.project, order.job)
        self._take(order)
        todo = sorted(
            (
                sandbox
                for sandbox in self._registry.of_job(order.project, order.job)
                if sandbox.id > order.after and _is_of(sandbox, order.id)
            ),
            key=lambda sandbox: sandbox.id,
        )
        more = len(todo) > limits.JOB_SLICE_ITEMS_MAX
        queue = iter(todo[: limits.JOB_SLICE_ITEMS_MAX])
        items: dict[str, JobItem] = {}
        until = self._clock_s() + limits.JOB_SLICE_S
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(todo), limits.JOB_ITEMS_AT_ONCE_MAX)):
                group.create_task(self._work(order, queue, items, until))
        more = more or next(queue, None) is not None
        self._check(order)
        done = [items[id] for id in sorted(items)]
        return JobPart(node=self._node, items=done, next=done[-1].sandbox if more and done else None)

    async def _work(
        self, order: JobOrder, queue: Iterator[Supervisor], items: dict[str, JobItem], until: float
    ) -> None:
        while self._clock_s() < until and self._is_last(order):
            sandbox = next(queue, None)
            if sandbox is None:
                return
            items[sandbox.id] = await self._one(order.kind, sandbox)

    async def _one(self, kind: JobOrderKind, sandbox: Supervisor) -> JobItem:
        error: DsecError | None = None
        try:
            async with asyncio.timeout(limits.JOB_ITEM_S):
                await self._settled(sandbox.id)
                await _do(kind, sandbox)
        except TimeoutError:
            error = DeadlineError(f"not done after {limits.JOB_ITEM_S:g} s; it goes on", outcome=Outcome.UNKNOWN)
        except GoneError:
            pass  # it has ended by itself, which serves every order
        except DsecError as failure:
            error = failure
        return JobItem(
            sandbox=sandbox.id,
            state=str(sandbox.view().state),
            error=None if error is None else body_of(error),
        )

    def _take(self, order: JobOrder) -> None:
        self._check(order)
        self._orders.pop(order.id, None)
        self._orders[order.id] = (order.order, order.kind)
        if len(self._orders) > limits.JOB_ORDERS_KEPT:
            del self._orders[next(iter(self._orders))]

    def _check(self, order: JobOrder) -> None:
        if not self._is_last(order):
            raise ConflictError(f"job {order.job} has got a later order meanwhile")

    def _is_last(self, order: JobOrder) -> bool:
        return self._orders.get(order.id, _NONE)[0] <= order.order


def _is_of(sandbox: Supervisor, job: str) -> bool:
    """And not of an earlier job of the name."""
    return sandbox.row.spec.job_id in (None, job)


async def _do(kind: JobOrderKind, sandbox: Supervisor) -> None:
    if kind is JobOrderKind.PAUSE:
        await sandbox.pause()
    elif kind is JobOrderKind.RESUME:
        if sandbox.state in (SandboxState.PAUSED, SandboxState.PAUSING):
            await sandbox.resume()
    elif (kind in _ENDS or not sandbox.backend.capabilities.pause) and sandbox.state not in ENDED:
        await sandbox.destroy(EndCause.DESTROYED, f"its job {sandbox.row.spec.job} was stopped")


def _check_reach(caller: Caller, project: str, job: str) -> None:
    if not reaches(project_seen(caller), project):
        raise NotFoundError(f"there is no job {job[:80]!r}")
