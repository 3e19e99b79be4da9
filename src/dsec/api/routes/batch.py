"""Many creates in one request, each told as soon as it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from dsec.api.errors import told
from dsec.api.request import Request
from dsec.api.routes.sandboxes import create, on_named_node
from dsec.api.routing import Route
from dsec.core.errors import LimitError
from dsec.core.limits import BATCH_CONCURRENCY, IDEMPOTENCY_KEY_BYTES_MAX
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.codec import to_json
from dsec.wire.errors import ErrorBody
from dsec.wire.node import Right
from dsec.wire.records import BatchItem, BatchRequest, CreateRequest, Sandbox

_Lines = asyncio.Queue[bytes]


async def create_batch(request: Request) -> None:
    body = await request.record(BatchRequest)
    key = request.key
    if key is not None and len(key) + len(f"/{body.count}") > IDEMPOTENCY_KEY_BYTES_MAX:
        raise LimitError("the Idempotency-Key leaves no room for the number of the item")
    item = on_named_node(CreateRequest(spec=body.spec, timeout_s=body.timeout_s, queue_s=body.queue_s), request)
    await request.start(200, TYPE_NDJSON, [])
    # Bounded: a client that does not read its results holds back the creates.
    lines: _Lines = asyncio.Queue(BATCH_CONCURRENCY)
    indices = iter(range(body.count))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(body.count, BATCH_CONCURRENCY)):
            group.create_task(_work(request, item, key, indices, lines))
        for _ in range(body.count):
            await request.write(await lines.get())
    await request.end()


async def _work(request: Request, item: CreateRequest, key: str | None, indices: Iterator[int], lines: _Lines) -> None:
    for index in indices:
        answer = await _create_one(request, item, None if key is None else f"{key}/{index}")
        if isinstance(answer, Sandbox):
            line = to_json({"index": index, "sandbox": answer})
        else:
            line = to_json({"index": index, "error": answer})
        await lines.put(line + b"\n")


async def _create_one(request: Request, item: CreateRequest, key: str | None) -> Sandbox | ErrorBody:
    try:
        return await create(request, item, key=key)
    except Exception as error:  # one item's failure is that item's answer
        return told(error)


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
