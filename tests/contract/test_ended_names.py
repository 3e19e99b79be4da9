"""Names of sandboxes that have ended are free without being asked for: on each form of shared state the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster.endednames import EndedNames
from dsec.cluster.log import LogStream, node_subject, verdict_subject
from dsec.cluster.names import Holder, Names
from dsec.cluster.registry import Bucket, key_of
from dsec.core.clock import SystemClock
from dsec.core.ids import NodeId, SandboxId, new_sandbox_id
from dsec.testing.nats_servers import NatsServers
from dsec.testing.shared_state import FORMS, State, state_of
from dsec.wire.codec import pack
from dsec.wire.events import Event, EventKind, Events

NODE, OTHER = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")


@pytest.fixture(params=FORMS)
async def state(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[State]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state


async def named(state: State, name: str, node: NodeId = NODE) -> SandboxId:
    async def there(holder: Holder, project: str, name: str) -> bool:
        return True

    names = Names(state.registry, SystemClock(), there)
    claim = await names.claim("/p", name, node, None)
    sandbox = new_sandbox_id(node)
    await names.keep(claim, sandbox)
    return sandbox


async def tell(state: State, subject: str, *events: Event) -> None:
    id = f"{subject}-{events[0].number}-{events[0].sandbox}"
    await state.log.append(LogStream.EVENTS, subject, pack(Events(events)), id=id)


def event(sandbox: str, name: str, kind: EventKind, number: int = 1, node: NodeId = NODE) -> Event:
    return Event(kind=str(kind), at=1.0, node=node, number=number, sandbox=sandbox, project="/p", name=name)


async def has(state: State, name: str) -> bool:
    return await state.other.get(Bucket.NAMES, key_of("/p", name)) is not None


async def test_a_name_goes_with_its_sandbox_however_that_ends(state: State) -> None:
    kinds = (EventKind.DESTROYED, EventKind.EXPIRED, EventKind.FAILED)
    made = [await named(state, str(kind)) for kind in kinds]
    alive = await named(state, "alive")
    await tell(state, node_subject(NODE), event(alive, "alive", EventKind.PAUSED))
    for number, (sandbox, kind) in enumerate(zip(made, kinds, strict=True), 2):
        await tell(state, node_subject(NODE), event(sandbox, str(kind), kind, number))

    ended = EndedNames(state.registry, state.log)
    assert await ended.free_some()
    assert not await ended.free_some()

    assert [await has(state, str(kind)) for kind in kinds] == [False, False, False]
    assert await has(state, "alive")


async def test_a_name_that_another_has_by_now_stays(state: State) -> None:
    old = new_sandbox_id(NODE)
    await named(state, "db")
    await tell(state, node_subject(NODE), event(old, "db", EventKind.DESTROYED))

    await EndedNames(state.registry, state.log).free_some()

    assert await has(state, "db")


async def test_a_node_frees_no_names_of_others(state: State) -> None:
    sandbox = await named(state, "db", OTHER)
    await tell(state, node_subject(NODE), event(sandbox, "db", EventKind.DESTROYED, node=OTHER))
    await tell(state, node_subject(NODE), event(sandbox, "db", EventKind.DESTROYED, number=2))
    await EndedNames(state.registry, state.log).free_some()
    assert await has(state, "db")

    await tell(state, verdict_subject(OTHER), event(sandbox, "db", EventKind.FAILED, number=0, node=OTHER))
    await EndedNames(state.registry, state.log).free_some()
    assert not await has(state, "db")


async def test_the_next_watcher_goes_on_where_the_last_one_was(state: State) -> None:
    first = await named(state, "first")
    await tell(state, node_subject(NODE), event(first, "first", EventKind.DESTROYED))
    await EndedNames(state.registry, state.log).free_some()
    again = await named(state, "again")
    await tell(state, node_subject(NODE), event(again, "again", EventKind.DESTROYED, 2))

    assert await EndedNames(state.other, state.log).free_some()

    assert not await has(state, "again")
    assert not await EndedNames(state.other, state.log).free_some()
