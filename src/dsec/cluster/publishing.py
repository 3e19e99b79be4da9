"""Tells the log of a cluster what has happened on this node, from its journal: all of it, in order, at least once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from dsec.cluster.log import Appends, LogStream, node_subject
from dsec.core.errors import DsecError
from dsec.core.limits import EVENTS_RECORD_BYTES_MAX, EVENTS_RECORD_MAX
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack
from dsec.wire.events import Event, EventKind, Events
from dsec.wire.following import BEGINNING, EventSource

log = get_logger(__name__)

_RETRY_S: Final = 1.0
_APART_S: Final = 0.05  # between two records: what happens meanwhile goes into one


class EventPublisher:
    """`told`: up to which event the log had them when that was last kept by `keep`. What was told after that, by a
    process that was killed, is told again: readers know it by its number."""

    def __init__(self, log: Appends, source: EventSource, told: int, keep: Callable[[int], Awaitable[None]]) -> None:
        self._log = log
        self._source = source
        self._at = (told, 0)
        self._keep = keep
        # The log takes each id once, whoever writes it: by ids that are foreseen a node could keep others' records out.
        self._word = secrets.token_hex(8)

    async def run(self) -> None:
        """Until it is cancelled. While the log is away events stay in the journal, and are told then."""
        while True:
            news = self._source.news()
            try:
                if await self._tell_some():
                    await asyncio.sleep(_APART_S)
                else:
                    await news.wait()
            except DsecError as error:
                log.info("events cannot be told now", why=error.message)
                await asyncio.sleep(_RETRY_S)

    async def _tell_some(self) -> bool:
        page = await self._source.read(self._at)
        if not page.events:
            return False
        events = [event for _, event in page.events]
        if page.first > self._at[0] and self._at != BEGINNING:
            events.insert(0, self._lost(events[0]))
        for batch in batches(events):
            await self._append(batch)
        self._at = page.read_to
        await self._keep(self._at[0])
        return True

    def _lost(self, next: Event) -> Event:
        return Event(kind=str(EventKind.GAP), at=next.at, node=next.node, number=next.number - 1)

    async def _append(self, batch: Sequence[Event]) -> None:
        node = self._source.origin
        id = f"{self._word}-{node}-{batch[0].number}-{batch[-1].number}"
        await self._log.append(LogStream.EVENTS, node_subject(node), pack(Events(tuple(batch))), id=id)


def batches(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Of at most so many events and, above one event, so many bytes."""
    batch: list[Event] = []
    size = 0
    for event in events:
        more = len(pack(event))
        if batch and (len(batch) == EVENTS_RECORD_MAX or size + more > EVENTS_RECORD_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += more
    if batch:
        yield batch
