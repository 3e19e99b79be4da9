"""A batch of creates in groups: each is admitted, placed and sent together, and its items are told as they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from dsec.api.errors import told
from dsec.api.jobgate import check_runs, entered
from dsec.api.request import CALL_MARGIN_S, Request
from dsec.cluster.fleet import CreatesTogether
from dsec.cluster.queue import Patience
from dsec.core.errors import DsecError, Outcome
from dsec.core.limits import BATCH_CONCURRENCY, BATCH_GROUP
from dsec.iam.ledger import Charge
from dsec.wire.codec import to_json
from dsec.wire.errors import ErrorBody
from dsec.wire.jobs import JobRow
from dsec.wire.records import CreateRequest, Sandbox

_AT_ONCE: Final = 2  # groups of one batch


def line_of(index: int, come: Sandbox | ErrorBody) -> bytes:
    return to_json({"index": index, "sandbox" if isinstance(come, Sandbox) else "error": come}) + b"\n"


class _Lines:
    """On their way to the client. Nobody waits to add some: who makes more waits until these are `taken`."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._news.set()
        self._empty.clear()

    async def take(self) -> list[bytes]:
        await self._news.wait()
        lines, self._lines = self._lines, []
        self._news.clear()
        self._empty.set()
        return lines

    async def taken(self) -> None:
        await self._empty.wait()


class GroupedBatch:
    """Of creates with keys. `alone` makes one of them by itself, and gives its line: each item that no group is made of
    goes that way, and is told why not."""

    def __init__(
        self,
        request: Request,
        item: CreateRequest,
        key: str,
        count: int,
        together: CreatesTogether,
        alone: Callable[[int], Awaitable[bytes]],
    ) -> None:
        self._request = request
        self._services = request.services
        self._item = item
        self._key = key
        self._count = count
        self._together = together
        self._alone = alone
        self._lines = _Lines()
        self._patiences: list[Patience] = []
        self._left = False  # its caller has gone

    async def run(self) -> None:
        count = self._count
        groups = (range(start, min(start + BATCH_GROUP, self._count)) for start in range(0, count, BATCH_GROUP))
        async with asyncio.TaskGroup() as work:
            for _ in range(_AT_ONCE):
                work.create_task(self._work(groups))
            while count:
                lines = await self._lines.take()
                count -= len(lines)
                await self._request.write(b"".join(lines))

    async def _work(self, groups: Iterator[range]) -> None:
        for indices in groups:
            await self._lines.taken()
            if not await self._kept(indices):
                await self._each(iter(indices))

    async def _each(self, indices: Iterator[int]) -> None:
        async def work() -> None:
            for index in indices:
                self._lines.put(await self._alone(index))

        async with asyncio.TaskGroup() as group:
            for _ in range(BATCH_CONCURRENCY):
                group.create_task(work())

    async def _kept(self, indices: range) -> bool:
        """Like one create with a key, it goes on when the caller goes away, but for what waits for room. False: nothing
        has been done."""
        try:
            task = self._services.keeper.start(self._make(indices), creates=len(indices))
        except DsecError:
            return False
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._left = True
            for patience in self._patiences:
                patience.leave()
            raise

    async def _make(self, indices: range) -> bool:
        request, services = self._request, self._services
        try:
            wanted, job = await entered(services.jobs, self._item, request.caller)
            charge = await services.admission.take(wanted, len(indices), request.caller)
        except DsecError:
            return False
        untold = set(indices)

        async def hear(come: Sequence[tuple[int, Sandbox | DsecError]]) -> None:
            _settle(charge, come)
            for place, one in come:
                index = indices[place]
                shown = await self._shown(one, job)
                untold.discard(index)
                self._lines.put(line_of(index, shown))

        try:
            await self._together.create(
                wanted,
                caller=request.caller,
                keys=[f"{self._key}/{index}" for index in indices],
                timeout_s=wanted.timeout_s + CALL_MARGIN_S,
                patience=self._patience,
                told=hear,
            )
        except Exception as error:  # not of one item: it is the answer of those that have none
            for index in untold:
                self._lines.put(line_of(index, told(error)))
        finally:
            charge.leave()
        return True

    async def _shown(self, come: Sandbox | DsecError, job: JobRow | None) -> Sandbox | ErrorBody:
        if isinstance(come, DsecError):
            return told(come)
        if job is not None:
            try:
                await check_runs(self._services.jobs, self._services.rpc, job, self._request.caller, come)
            except DsecError as error:
                return told(error)
        return come

    def _patience(self) -> Patience | None:
        if not self._item.queue_s:
            return None
        patience = Patience(self._item.queue_s)
        self._patiences.append(patience)
        if self._left:
            patience.leave()
        return patience


def _settle(charge: Charge, come: Sequence[tuple[int, Sandbox | DsecError]]) -> None:
    unknown = sum(isinstance(one, DsecError) and one.outcome is Outcome.UNKNOWN for _, one in come)
    charge.settle(len(come) - unknown)
    charge.leave(unknown)
