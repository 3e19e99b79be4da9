"""Creates alike that are asked for at once: each as if it were asked for alone, with its key."""

from __future__ import annotations

import asyncio
from typing import Final

from dsec.core.errors import DsecError
from dsec.node.creation import Creation
from dsec.observe.logs import get_logger
from dsec.wire.errors import body_of
from dsec.wire.many import Created, CreatedMany, CreateMany
from dsec.wire.node import Caller
from dsec.wire.records import Sandbox

log = get_logger(__name__)

_TOLD_S: Final = 1.0  # what has not come within it is asked for again: the others do not wait for it


async def create_many(creation: Creation, request: CreateMany, caller: Caller) -> CreatedMany:
    """What has come of each within a second. The rest goes on: with a key a create does not end with its caller."""
    tasks = [asyncio.create_task(creation.create(request.create, caller, key)) for key in request.keys]
    try:
        await asyncio.wait(tasks, timeout=_TOLD_S)
        return CreatedMany(tuple(map(_created, tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _created(task: asyncio.Task[Sandbox]) -> Created:
    if not task.done() or task.cancelled():
        return Created()
    error = task.exception()
    if error is None:
        return Created(sandbox=task.result())
    if not isinstance(error, DsecError):
        log.error("a create failed in a way that it should not", exc_info=error)
    return Created(error=body_of(error))
