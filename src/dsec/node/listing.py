"""Pages of sandboxes: the living from memory, the ended from the journal, in one order."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from dsec.core import limits
from dsec.core.errors import DsecError, InvalidArgumentError, LimitError
from dsec.core.states import ENDED, SandboxState
from dsec.node.journal import Journal
from dsec.node.registry import BEGINNING, Registry
from dsec.node.rights import reaches
from dsec.wire.cursors import Place, decode_cursor, encode_cursor
from dsec.wire.records import ListQuery, Sandbox, SandboxPage

_SCANNED_MAX: Final = 5_000  # looked at for one page; a page may come short, and then has a cursor
_TOMBSTONES_AT_ONCE: Final = 500


def list_sandboxes(registry: Registry, journal: Journal, query: ListQuery, *, project: str | None) -> SandboxPage:
    """Raises InvalidArgumentError for a state or cursor that is none, LimitError for a page that is too large."""
    states = _states(query)
    if not 1 <= query.limit <= limits.LIST_PAGE_MAX:
        raise LimitError(f"a page has between 1 and {limits.LIST_PAGE_MAX} sandboxes, not {query.limit}")
    start = BEGINNING if query.cursor is None else decode_cursor(query.cursor)
    living = states is None or bool(states - ENDED)
    buried = states is not None and bool(states & ENDED)
    found: list[Sandbox] = []
    last = start
    for scanned, (place, sandbox) in enumerate(_merged(registry, journal, start, living=living, buried=buried)):
        if len(found) == query.limit or scanned == _SCANNED_MAX:
            return SandboxPage(found, encode_cursor(last))
        last = place
        if _matches(sandbox, query, states, project):
            found.append(sandbox)
    return SandboxPage(found, None)


async def with_metrics(registry: Registry, page: SandboxPage) -> SandboxPage:
    """As they are now; one that ends meanwhile has none. Others get their turn in between."""
    found = []
    for sandbox in page.sandboxes:
        living = registry.find(sandbox.id)
        if living is not None:
            with suppress(DsecError):
                sandbox = msgspec.structs.replace(sandbox, metrics=await living.measure())
            await asyncio.sleep(0)
        found.append(sandbox)
    return SandboxPage(found, page.next)


def _merged(
    registry: Registry, journal: Journal, place: Place, *, living: bool, buried: bool
) -> Iterator[tuple[Place, Sandbox]]:
    """Both sources in order of creation. A sandbox that ends meanwhile is in one of them."""
    sources: list[Iterator[tuple[Place, Sandbox]]] = []
    if living:
        sources.append((at, sandbox.view()) for at, sandbox in registry.after(place))
    if buried:
        sources.append(_buried(journal, place))
    yield from heapq.merge(*sources, key=lambda item: item[0])


def _buried(journal: Journal, place: Place) -> Iterator[tuple[Place, Sandbox]]:
    while True:
        page = journal.tombstones(place, _TOMBSTONES_AT_ONCE)
        for tombstone in page:
            place = Place(tombstone.sandbox.created_at, tombstone.sandbox.id)
            yield place, tombstone.sandbox
        if len(page) < _TOMBSTONES_AT_ONCE:
            return


def _states(query: ListQuery) -> set[SandboxState] | None:
    try:
        return {SandboxState(state) for state in query.states} or None
    except ValueError as error:
        raise InvalidArgumentError(
            f"states are {', '.join(SandboxState)}", hint=f"asked for {', '.join(query.states)[:200]}"
        ) from error


def _matches(sandbox: Sandbox, query: ListQuery, states: set[SandboxState] | None, project: str | None) -> bool:
    return (
        reaches(project, sandbox.project)
        and (states is None or sandbox.state in states)
        and (query.name is None or sandbox.name == query.name)
        and (query.job is None or sandbox.job == query.job)
        and all(sandbox.labels.get(key) == value for key, value in query.labels.items())
    )
