"""What a node knows of groups on several nodes: told by replicas, which read it where replicas write it down."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from dsec.cluster.directory import Address
from dsec.core.clock import Clock
from dsec.core.errors import DsecError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import GROUP_FRESH_S, GROUP_STALE_S, GROUPS_KNOWN_MAX, LINK_CONNECT_S
from dsec.observe.logs import get_logger
from dsec.wire.cluster import GroupPlaces, OwnGroup

log = get_logger(__name__)

AGAIN_S: Final = 1.0  # a group is not asked for more often
_ASKED_AT_ONCE: Final = 4  # a replica takes sixteen asks of a node, its card and its events among them


@dataclass(slots=True)
class _Known:
    places: GroupPlaces | None = None
    told_at: float = float("-inf")
    asked_at: float = float("-inf")
    refused: DsecError | None = None  # what came of the last ask, if it was no answer
    asking: asyncio.Task[None] | None = None


class Rosters:
    """Also the `Directory` of the nodes that it was told of."""

    def __init__(self, ask: Callable[[OwnGroup], Awaitable[GroupPlaces]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._known: OrderedDict[OwnGroup, _Known] = OrderedDict()
        self._turn = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def of(self, group: OwnGroup, *, fresh_s: float = GROUP_FRESH_S) -> GroupPlaces:
        """As it was told within `fresh_s`. While nobody answers, an older answer is good for GROUP_STALE_S.

        Raises ForbiddenError for a group that is none of this node, UnavailableError.
        """
        known = self._entry(group)
        now = self._clock.monotonic_s()
        if now - known.told_at > fresh_s and now - known.asked_at > min(fresh_s, AGAIN_S):
            if known.asking is None:
                known.asked_at = now
                known.asking = asyncio.create_task(self._renew(group, known), name=f"where group {group.name} is")
            if known.places is None or known.refused is None:  # else nobody answered the last time
                await asyncio.shield(known.asking)
        elif known.asking is not None and known.places is None:
            await asyncio.shield(known.asking)
        if known.places is None or self._clock.monotonic_s() - known.told_at > GROUP_STALE_S:
            raise known.refused or UnavailableError(f"it is not known where group {group.name} is", retry_after_s=1.0)
        return known.places

    def address(self, node: NodeId) -> Address:
        """The one that was told last."""
        found: tuple[float, Address] | None = None
        for known in self._known.values():
            there = None if known.places is None else known.places.addresses.get(node)
            if there is not None and (found is None or known.told_at > found[0]):
                found = known.told_at, Address(*there)
        if found is None:
            raise UnavailableError(f"it is not known where node {node} is", retry_after_s=1.0)
        return found[1]

    async def close(self) -> None:
        tasks = [known.asking for known in self._known.values() if known.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, group: OwnGroup) -> _Known:
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = _Known()
            idle = [old for old, one in self._known.items() if one.asking is None and one is not known]
            for old in idle[: max(len(self._known) - GROUPS_KNOWN_MAX, 0)]:
                del self._known[old]
        self._known.move_to_end(group)
        return known

    async def _renew(self, group: OwnGroup, known: _Known) -> None:
        """What comes of it is in `known`."""
        try:
            # Who waits for an answer of before is not held up for long by replicas that are away.
            async with self._turn, asyncio.timeout(LINK_CONNECT_S):
                known.places = await self._ask(group)
            known.told_at, known.refused = self._clock.monotonic_s(), None
        except TimeoutError:
            known.refused = UnavailableError("no replica says where groups are", retry_after_s=1.0)
        except UnavailableError as error:
            known.refused = error
        except DsecError as error:
            known.places, known.told_at, known.refused = None, float("-inf"), error
        except Exception as error:
            log.error("where a group is could not be asked", group=group.name, exc_info=True)
            known.refused = UnavailableError(f"it is not known where group {group.name} is: {error}")
        finally:
            known.asking = None
