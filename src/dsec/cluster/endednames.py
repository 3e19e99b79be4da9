"""Takes away the names of sandboxes that have ended, by what the log tells: else each name that there ever was would
have an entry for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from dsec.cluster.events import events_of
from dsec.cluster.log import Log, LogStream
from dsec.cluster.names import Holder
from dsec.cluster.registry import Bucket, Registry, key_of
from dsec.core.errors import ConflictError, DsecError
from dsec.core.limits import EVENTS_READ_MAX
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.events import ENDS, Event

log = get_logger(__name__)

_LOOK_S: Final = 5.0
_PLACE: Final = "names-freed"


class _ReadTo(msgspec.Struct, frozen=True):
    """LEASES/names-freed: how far the log has been read for this, by whichever watcher."""

    sequence: int = 0


class EndedNames:
    """`acts`: whether this process is the one that does it; two that do do no harm."""

    def __init__(self, registry: Registry, events: Log, *, acts: Callable[[], bool] = lambda: True) -> None:
        self._registry = registry
        self._events = events
        self._acts = acts

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                while self._acts() and await self.free_some():
                    pass
            except DsecError as error:
                log.info("names of ended sandboxes stay for now", why=error.message)
            await asyncio.sleep(_LOOK_S)

    async def free_some(self) -> bool:
        """Whether there was anything to read. Raises UnavailableError."""
        entry = await self._registry.get(Bucket.LEASES, _PLACE)
        after = 0 if entry is None else unpack(entry.value, _ReadTo).sequence
        records = await self._events.read(LogStream.EVENTS, "", after=after, limit=EVENTS_READ_MAX)
        if not records:
            return False
        for record in records:
            for event in events_of(record):
                if event.kind in ENDS:
                    await self._free(event)
        await self._registry.put(Bucket.LEASES, _PLACE, pack(_ReadTo(records[-1].sequence)))
        return True

    async def _free(self, event: Event) -> None:
        """Only what this very sandbox has: a node speaks for its own, and a name may be another's by now."""
        if event.sandbox is None or event.project is None or event.name is None:
            return
        try:
            place = key_of(event.project, event.name)
            entry = await self._registry.get(Bucket.NAMES, place)
            if entry is not None and unpack(entry.value, Holder).sandbox == event.sandbox:
                await self._registry.delete(Bucket.NAMES, place, revision=entry.revision)
        except ConflictError:
            return  # somebody has taken it this moment
