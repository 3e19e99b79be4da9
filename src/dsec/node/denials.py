"""What sandboxes asked for and may not reach, told as events: at once, then ever more seldom while it goes on, and when
a caller's command has ended, who is to be told why.

A program inside decides how often it asks and for what: nothing of it may fill the node's events, or its memory.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.core import limits
from dsec.core.errors import DsecError
from dsec.node.events import event_of
from dsec.observe import metrics
from dsec.wire.egress import EgressDenied
from dsec.wire.events import Denied, EventKind

if TYPE_CHECKING:
    from dsec.core.clock import Clock
    from dsec.node.journal import Journal
    from dsec.node.registry import Registry
    from dsec.node.services import Sleep
    from dsec.node.tasks import Tasks

_GATHER_S: Final = 0.2  # what a program asks for at once is one event
_QUIET_S: Final = 30.0  # after an event; doubled by each
_QUIET_S_MAX: Final = 1_800.0
_SHOWN: Final = 80  # characters of a target
_LATE_S: Final = 1.5  # after the end of a command: what its last refusals take to be heard of here


@dataclass(slots=True)
class _Of:
    """One sandbox's, since its last event."""

    asked: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    others: int = 0
    wait_s: float = _GATHER_S
    telling: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # somebody waits to be told
    wanted_until_s: float = -math.inf


class Denials:
    def __init__(self, registry: Registry, journal: Journal, clock: Clock, tasks: Tasks, sleep: Sleep) -> None:
        self._registry = registry
        self._journal = journal
        self._clock = clock
        self._tasks = tasks
        self._sleep = sleep
        self._of: dict[str, _Of] = {}

    def note(self, denial: EgressDenied) -> None:
        found = self._registry.find(denial.sandbox)
        if found is None or found.ended:
            return
        metrics.EGRESS_DENIED.inc(denial.count)
        of = self._of.setdefault(denial.sandbox, _Of())
        key = (_plain(denial.target), denial.port, _plain(denial.reason))
        if key in of.asked or len(of.asked) < limits.EGRESS_DENIALS_TOLD_MAX:
            of.asked[key] += denial.count
        else:
            of.others += denial.count
        if self._clock.monotonic_s() < of.wanted_until_s:
            of.wanted.set()
        if not of.telling:
            of.telling = True
            with suppress(DsecError):  # the node stops
                self._tasks.spawn(self._tell(denial.sandbox, of))

    def tell_soon(self, id: str) -> None:
        """A caller's command has ended, and its caller may ask why. Programs inside cannot bring that about."""
        if (of := self._of.get(id)) is None:
            return
        of.wanted_until_s = self._clock.monotonic_s() + _LATE_S
        if of.asked:
            of.wanted.set()

    def forget(self, id: str) -> None:
        """It has ended."""
        self._of.pop(id, None)

    async def _tell(self, id: str, of: _Of) -> None:
        """Ends after a time in which nothing was asked for."""
        try:
            while True:
                if hurried := await self._quiet(of):
                    await self._sleep(_GATHER_S)
                found = self._registry.find(id)
                if found is None or self._of.get(id) is not of:
                    return
                if not of.asked:
                    self._of.pop(id, None)
                    return
                detail, denied, others = _words(of), _told(of), of.others
                of.asked, of.others = Counter(), 0
                if not hurried:
                    of.wait_s = min(max(of.wait_s * 2, _QUIET_S), _QUIET_S_MAX)
                event = event_of(found.row, EventKind.EGRESS_DENIED, self._clock.wall_s(), detail=detail)
                event = msgspec.structs.replace(event, denied=denied, denied_more=others)
                with suppress(DsecError):  # of a full disk others tell
                    await self._journal.note([event])
        finally:
            of.telling = False

    async def _quiet(self, of: _Of) -> bool:
        """Whether it was cut short, since somebody waits to be told."""
        of.wanted.clear()
        tasks = [asyncio.ensure_future(work) for work in (of.wanted.wait(), self._sleep(of.wait_s))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return of.wanted.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _told(of: _Of) -> tuple[Denied, ...]:
    return tuple(
        Denied(host=target, port=port, reason=reason, count=count)
        for (target, port, reason), count in of.asked.most_common()
    )


def _words(of: _Of) -> str:
    told = [
        f"{target}{f':{port}' if port else ''} ({reason}{f', {count} times' if count > 1 else ''})"
        for (target, port, reason), count in of.asked.most_common()
    ]
    if of.others:
        told.append(f"and others, {of.others} times")
    return "; ".join(told)


def _plain(text: str) -> str:
    """Names come from inside: nothing of them may reach a terminal but what is seen."""
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in text[:_SHOWN])
