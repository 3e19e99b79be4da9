"""Many creates in one request, each told as soon as it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dsec.api.batches import GroupedBatch, line_of
from dsec.api.errors import told
from dsec.api.request import Request
from dsec.api.routes.sandboxes import create, on_named_node
from dsec.api.routing import Route
from dsec.core.errors import LimitError
from dsec.core.limits import BATCH_CONCURRENCY, IDEMPOTENCY_KEY_BYTES_MAX
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.node import Right
from dsec.wire.records import BatchItem, BatchRequest, CreateRequest


async def create_batch(request: Request) -> None:
    body = await request.record(BatchRequest)
    key = request.key
    if key is not None and len(key) + len(f"/{body.count}") > IDEMPOTENCY_KEY_BYTES_MAX:
        raise LimitError("the Idempotency-Key leaves no room for the number of the item")
    item = on_named_node(CreateRequest(spec=body.spec, timeout_s=body.timeout_s, queue_s=body.queue_s), request)
    await request.start(200, TYPE_NDJSON, [])
    together = request.services.fleet.together

    async def alone(index: int) -> bytes:
        return await _create_one(request, item, index)

    try:
        if together is None or key is None or body.count == 1:
            await _one_by_one(request, body.count, alone)
        else:
            await GroupedBatch(request, item, key, body.count, together, alone).run()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    await request.end()


async def _one_by_one(request: Request, count: int, alone: Callable[[int], Awaitable[bytes]]) -> None:
    # Bounded: a client that does not read its results holds back the creates.
    lines: asyncio.Queue[bytes] = asyncio.Queue(BATCH_CONCURRENCY)
    indices = iter(range(count))

    async def work() -> None:
        for index in indices:
            await lines.put(await alone(index))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, BATCH_CONCURRENCY)):
            group.create_task(work())
        for _ in range(count):
            await request.write(await lines.get())


async def _create_one(request: Request, item: CreateRequest, index: int) -> bytes:
    key = None if request.key is None else f"{request.key}/{index}"
    try:
        return line_of(index, await create(request, item, key=key))
    except Exception as error:  # one item's failure is that item's answer
        return line_of(index, told(error))


ROUTES = (
    Route(
        "POST",
        "/v1/sandboxes:batch",
        create_batch,
        "Create sandboxes alike. Answers a line each, in order of completion; item i has the key `<key>/<i>`.",
        Right.USE,
        body=BatchRequest,
        answer={TYPE_NDJSON: BatchItem},
        statuses=(409, 429, 501),
        mutates=True,
    ),
)
