"""How events are followed: the same for a node's journal and the log of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from dsec.core.limits import EVENTS_QUIET_S
from dsec.wire.codec import pack
from dsec.wire.events import (
    OLDEST,
    Event,
    EventKind,
    EventLine,
    EventQuery,
    Position,
    decode_position,
    encode_position,
    is_wanted,
)
from dsec.wire.frames import Frame, FrameType
from dsec.wire.node import Done, Stream

Place = tuple[int, int]  # as of a Position
BEGINNING: Final[Place] = (0, 0)


@dataclass(frozen=True, slots=True)
class EventPage:
    events: tuple[tuple[Place, Event], ...]  # each with the place after it
    read_to: Place  # all up to here is in `events`, or was of no use to anybody
    first: int  # the oldest record that there is


class EventSource(Protocol):
    @property
    def origin(self) -> str: ...

    def news(self) -> asyncio.Event:
        """Set at the next event; taken before a read, nothing is missed."""
        ...

    async def end(self) -> Place:
        """Of what there is now."""
        ...

    async def read(self, after: Place) -> EventPage: ...


class Bell:
    """Wakes all who wait, once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def news(self) -> asyncio.Event:
        return self._event


async def serve_events(source: EventSource, query: EventQuery, seen: str | None, stream: Stream, now: float) -> None:
    """To the stream's end. Waits while its reader is behind: nothing is kept for it meanwhile."""
    async for line in follow_events(source, query, seen, now):
        await stream.send(Frame(FrameType.EVENT, 0, pack(line)))
    await stream.send(Frame(FrameType.END, 0, pack(Done())))


async def follow_events(
    source: EventSource, query: EventQuery, seen: str | None, now: float
) -> AsyncGenerator[EventLine, None]:
    """The first line says where it begins. `now`: of a gap that is found there."""
    at, lost = await _begin(source, query)
    told: dict[str, int] = {}
    yield EventLine(event=_gap(source, at, now) if lost else None, position=_text(source, at))
    while True:
        news = source.news()
        page = await source.read(at)
        if page.first > at[0] and at != BEGINNING:
            at = (page.first, 0)
            yield EventLine(event=_gap(source, at, now), position=_text(source, at))
        shown = at
        for place, event in page.events:
            if event.number:
                if event.number <= told.get(event.node, 0):
                    continue  # the log was away when it was told first
                told[event.node] = event.number
            now = event.at
            if is_wanted(event, query, seen):
                shown, position = place, _text(source, place)
                yield EventLine(event=msgspec.structs.replace(event, position=position), position=position)
        moved, at = page.read_to > at, max(page.read_to, at)
        if moved:
            if shown != at:
                yield EventLine(position=_text(source, at))
            continue
        if not query.follow:
            return
        if not await _rings(news):
            yield EventLine(position=_text(source, at))


async def _begin(source: EventSource, query: EventQuery) -> tuple[Place, bool]:
    """Where to begin, and whether that is not where it was wanted."""
    if query.after == OLDEST or (query.after is None and not query.follow):
        return BEGINNING, False
    end = await source.end()
    if query.after is None:
        return end, False
    position = decode_position(query.after)
    # Of another stream, or of one that began anew: what is kept is told, and that something may be missing.
    if position.origin != source.origin or position.place > end:
        return BEGINNING, True
    return position.place, False


async def _rings(news: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(EVENTS_QUIET_S):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _gap(source: EventSource, at: Place, now: float) -> Event:
    text = "what happened before this is not kept any more"
    return Event(kind=str(EventKind.GAP), at=now, detail=text, position=_text(source, at))


def _text(source: EventSource, place: Place) -> str:
    return encode_position(Position(source.origin, *place))
