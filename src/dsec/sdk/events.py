"""Follows events over lost connections: each once, in order, and a gap where there is one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from dsec.core.errors import UnavailableError
from dsec.sdk.lines import json_lines
from dsec.sdk.retry import backoff_s
from dsec.sdk.transport import Transport, encode_query
from dsec.wire import api
from dsec.wire.events import Event, EventLine

LOST_S_MAX: Final = 60.0  # without a connection, then the error is passed on
_NODES_MAX: Final = 10_000  # of which it is remembered how far they have told


async def follow_events(
    transport: Transport,
    *,
    after: str | None,
    follow: bool,
    project: str | None,
    labels: Mapping[str, str] | None,
    sandbox: str | None,
    job: str | None,
    kinds: Sequence[str],
) -> AsyncGenerator[Event, None]:
    fixed = [encode_query({"label": f"{key}={value}"}) for key, value in (labels or {}).items()]
    fixed += [encode_query({"kind": kind}) for kind in kinds]
    fixed.append(encode_query({"project": project, "sandbox": sandbox, "job": job, "follow": follow}))
    told: dict[str, int] = {}
    failures, since = 0, 0.0
    while True:
        path = "/events?" + "&".join(part for part in (*fixed, encode_query({"after": after})) if part)
        try:
            async with transport.stream("GET", path, headers={"Accept": api.TYPE_NDJSON}) as response:
                async for line in json_lines(response, EventLine):
                    failures, after = 0, line.position or after
                    if line.event is not None and _is_new(line.event, told):
                        yield line.event
            if not follow:
                return
            raise UnavailableError("the stream of events ended")
        except UnavailableError as error:
            since = time.monotonic() if failures == 0 else since
            failures += 1
            if time.monotonic() - since > LOST_S_MAX:
                raise
            await asyncio.sleep(error.retry_after_s or backoff_s(failures - 1, random.random()))


def _is_new(event: Event, told: dict[str, int]) -> bool:
    """A node tells again what it does not know to have been kept."""
    if not event.number:
        return True
    if event.number <= told.get(event.node, 0):
        return False
    if len(told) >= _NODES_MAX:
        told.clear()
    told[event.node] = event.number
    return True
