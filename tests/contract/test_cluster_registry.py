"""The Registry and the Lease on it: the same in this process and on NATS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster.registry import Bucket, Change, Entry, Registry, Snapshot, key_of
from dsec.core import limits
from dsec.core.clock import SystemClock
from dsec.core.errors import ConflictError, InvalidArgumentError
from dsec.testing.nats_servers import NatsServers
from dsec.testing.shared_state import FORMS, State, embedded, state_of
from tests.contract.served import until

NODES, NAMES = Bucket.NODES, Bucket.NAMES


@pytest.fixture(params=FORMS)
async def state(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[State]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state


@pytest.fixture
def registry(state: State) -> Registry:
    return state.registry


@contextlib.asynccontextmanager
async def watching(registry: Registry, bucket: Bucket, prefix: str = "") -> AsyncIterator[list[Snapshot | Change]]:
    seen: list[Snapshot | Change] = []

    async def watch() -> None:
        async with contextlib.aclosing(registry.watch(bucket, prefix)) as changes:
            async for change in changes:
                seen.append(change)

    task = asyncio.create_task(watch())
    try:
        await until(lambda: seen)
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---- entries -------------------------------------------------------------------------------------


async def test_what_was_put_is_found_with_a_revision_that_grows(state: State) -> None:
    first = await state.registry.put(NODES, "a", b"1")
    second = await state.registry.put(NODES, "a", b"2")

    assert first < second
    assert await state.other.get(NODES, "a") == Entry("a", b"2", second)
    assert await state.other.get(NODES, "b") is None
    assert await state.other.get(NAMES, "a") is None


async def test_only_one_of_many_creates_a_key(state: State) -> None:
    async def create(number: int) -> bool:
        registry = (state.registry, state.other)[number % 2]
        try:
            await registry.create(NAMES, "name", str(number).encode())
        except ConflictError:
            return False
        return True

    done = await asyncio.gather(*map(create, range(16)))

    entry = await state.registry.get(NAMES, "name")
    assert sum(done) == 1
    assert entry is not None
    assert done[int(entry.value)]


async def test_an_update_needs_the_revision_of_now(registry: Registry) -> None:
    revision = await registry.create(NODES, "a", b"1")
    newer = await registry.update(NODES, "a", b"2", revision=revision)

    with pytest.raises(ConflictError):
        await registry.update(NODES, "a", b"3", revision=revision)
    with pytest.raises(ConflictError):
        await registry.update(NODES, "nothing", b"3", revision=revision)
    assert await registry.get(NODES, "a") == Entry("a", b"2", newer)


async def test_a_deleted_key_can_be_created_again_and_its_old_revision_is_void(registry: Registry) -> None:
    old = await registry.create(NODES, "a", b"1")
    await registry.delete(NODES, "a")
    assert await registry.get(NODES, "a") is None
    assert await registry.entries(NODES) == []

    new = await registry.create(NODES, "a", b"2")

    assert new > old
    with pytest.raises(ConflictError):
        await registry.update(NODES, "a", b"3", revision=old)
    with pytest.raises(ConflictError):
        await registry.delete(NODES, "a", revision=old)
    await registry.delete(NODES, "a", revision=new)
    await registry.delete(NODES, "a")
    assert await registry.get(NODES, "a") is None


async def test_listing_goes_by_whole_tokens(registry: Registry) -> None:
    for key in ("n1.b", "n1.a", "n10.a", "n1"):
        await registry.put(Bucket.SANDBOXES, key, key.encode())

    assert [entry.key for entry in await registry.entries(Bucket.SANDBOXES, "n1")] == ["n1", "n1.a", "n1.b"]
    assert [entry.key for entry in await registry.entries(Bucket.SANDBOXES)] == ["n1", "n1.a", "n1.b", "n10.a"]


async def test_what_is_not_refreshed_is_over_and_what_is_stays(registry: Registry) -> None:
    kept = await registry.create(NODES, "kept", b"", ttl_s=3)
    kept = await registry.update(NODES, "kept", b"", revision=kept, ttl_s=60)
    await registry.create(NODES, "over", b"", ttl_s=4)
    await registry.create(NODES, "for-ever", b"", ttl_s=3)
    await registry.put(NODES, "for-ever", b"")
    async with asyncio.timeout(60):
        while await registry.get(NODES, "over") is not None:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.05)

    assert [entry.key for entry in await registry.entries(NODES)] == ["for-ever", "kept"]
    assert await registry.create(NODES, "over", b"again") > kept


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b", "a b", "a*", "a>", "ä", "x" * 2_000])
async def test_keys_that_no_engine_could_hold_are_refused(registry: Registry, key: str) -> None:
    with pytest.raises(InvalidArgumentError):
        await registry.put(NODES, key, b"")


async def test_a_value_has_a_bound(registry: Registry) -> None:
    await registry.put(NODES, "a", bytes(limits.REGISTRY_VALUE_BYTES_MAX))

    with pytest.raises(InvalidArgumentError):
        await registry.put(NODES, "a", bytes(limits.REGISTRY_VALUE_BYTES_MAX + 1))


async def test_any_text_becomes_a_key_of_its_own(registry: Registry) -> None:
    texts = ["", "/a/b", "/a", "a.b", "ä ö", "=41", "A", "a\nb", "*", ">", "x" * 255, "\ud800"]
    for text in texts:
        await registry.create(Bucket.OPS, key_of("p", text), text.encode("utf-8", "surrogatepass"))

    assert len(await registry.entries(Bucket.OPS, "p")) == len(texts)


# ---- watches -------------------------------------------------------------------------------------


async def test_a_watch_begins_with_what_is_there_and_goes_on_in_order(state: State) -> None:
    first = await state.registry.put(NODES, "a.x", b"1")
    await state.registry.put(NODES, "b", b"")
    async with watching(state.other, NODES, "a") as seen:
        for number in range(20):
            await state.registry.put(NODES, "a.y", str(number).encode())
            await until(lambda number=number: len(seen) == number + 2)  # type: ignore[misc]
        await state.registry.put(NODES, "b", b"not this")
        await state.registry.delete(NODES, "a.x")
        await until(lambda: len(seen) >= 22)

    changes = [change for change in seen[1:] if isinstance(change, Change)]
    assert seen[0] == Snapshot((Entry("a.x", b"1", first),))
    assert [change.value for change in changes[:20]] == [str(number).encode() for number in range(20)]
    assert (changes[20].key, changes[20].value) == ("a.x", None)
    assert [change.revision for change in changes] == sorted(change.revision for change in changes)


async def test_a_watch_of_nothing_says_that_there_is_nothing(registry: Registry) -> None:
    async with watching(registry, NODES) as seen:
        assert seen == [Snapshot(())]


async def test_a_watch_tells_that_a_time_to_live_is_over(registry: Registry) -> None:
    async with watching(registry, NODES) as seen:
        await registry.create(NODES, "a", b"1", ttl_s=1)
        await until(lambda: len(seen) >= 3)

    assert isinstance(seen[2], Change)
    assert (seen[2].key, seen[2].value) == ("a", None)


# ---- leases --------------------------------------------------------------------------------------


async def test_one_has_a_lease_until_it_is_given_up(state: State) -> None:
    one, other = state.lease(), state.lease(other=True)
    held = await one.acquire("leader", "one", 30)
    assert held is not None
    assert await other.acquire("leader", "other", 30) is None

    renewed = await one.renew(held)
    await one.release(renewed)
    taken = await other.acquire("leader", "other", 30)

    assert taken is not None
    assert held.token < renewed.token < taken.token
    assert await one.holder("leader") == "other"
    with pytest.raises(ConflictError):
        await one.renew(renewed)
    await one.release(renewed)
    assert await one.holder("leader") == "other"


async def test_a_lease_that_is_not_renewed_passes_on(state: State) -> None:
    one, other = state.lease(), state.lease(other=True)
    held = await one.acquire("leader", "one", 1)
    assert held is not None
    taken = None
    async with asyncio.timeout(60):
        while taken is None:
            taken = await other.acquire("leader", "other", 30)
            await asyncio.sleep(0.05)

    assert SystemClock().monotonic_s() >= held.until  # the old holder knew before the new one began
    with pytest.raises(ConflictError):
        await one.renew(held)


# ---- of this machine only ------------------------------------------------------------------------


async def test_what_was_written_is_there_after_a_restart_with_the_time_that_is_left(tmp_path: Path) -> None:
    async with embedded(tmp_path / "state.db") as state:
        await state.registry.put(NODES, "a", b"1")
        revision = await state.registry.create(NODES, "b", b"2", ttl_s=1)
        await state.registry.create(NODES, "c", b"3", ttl_s=3_600)
    async with embedded(tmp_path / "state.db") as state:
        async with asyncio.timeout(60):
            while await state.registry.get(NODES, "b") is not None:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0.02)

        assert [entry.key for entry in await state.registry.entries(NODES)] == ["a", "c"]
        assert await state.registry.create(NODES, "b", b"") > revision


async def test_a_write_whose_caller_is_gone_is_told_to_watchers(tmp_path: Path) -> None:
    async with embedded(tmp_path / "state.db") as state, watching(state.registry, NODES) as seen:
        task = asyncio.create_task(state.registry.put(NODES, "a", b"1"))
        await asyncio.sleep(0)
        task.cancel()
        await until(lambda: len(seen) == 2)

        assert seen[1] == Change("a", b"1", 1)


async def test_a_watcher_that_is_behind_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.embedded.registry.REGISTRY_WATCH_CHANGES_MAX", 2)
    async with embedded(tmp_path / "state.db") as state:
        async with contextlib.aclosing(state.registry.watch(NODES)) as changes:
            assert await anext(changes) == Snapshot(())
            for number in range(5):
                await state.registry.put(NODES, "a", str(number).encode())

            seen = [await anext(changes) for _ in range(3)]

    assert seen[:2] == [Change("a", b"0", 1), Change("a", b"1", 2)]
    assert seen[2] == Snapshot((Entry("a", b"4", 5),))


# ---- many at once --------------------------------------------------------------------------------


async def test_keys_made_together_stand_one_after_the_other_and_can_be_changed_by_their_revisions(state: State) -> None:
    entries = [(f"k.{number}", str(number).encode()) for number in range(200)]

    revisions = await state.registry.create_all(Bucket.OPS, entries, ttl_s=3600)

    assert revisions == list(range(revisions[0], revisions[0] + 200))
    for place in (0, 77, 199):
        assert await state.other.get(Bucket.OPS, f"k.{place}") == Entry(
            f"k.{place}", str(place).encode(), revisions[place]
        )
    assert await state.other.update(Bucket.OPS, "k.77", b"new", revision=revisions[77]) > revisions[-1]


async def test_of_keys_made_together_none_is_there_when_one_was_before(state: State) -> None:
    await state.other.create(Bucket.OPS, "k.5", b"before")

    with pytest.raises(ConflictError):
        await state.registry.create_all(Bucket.OPS, [(f"k.{number}", b"new") for number in range(10)])

    assert [entry.key for entry in await state.registry.entries(Bucket.OPS)] == ["k.5"]
    assert await state.registry.create_all(Bucket.OPS, []) == []


async def test_of_several_who_make_the_same_keys_together_one_does(state: State) -> None:
    async def create(number: int) -> list[int] | None:
        registry = (state.registry, state.other)[number % 2]
        try:
            return await registry.create_all(Bucket.OPS, [(f"k.{one}", str(number).encode()) for one in range(30)])
        except ConflictError:
            return None

    done = await asyncio.gather(*map(create, range(8)))

    (winner,) = [number for number, revisions in enumerate(done) if revisions]
    values = {entry.value for entry in await state.other.entries(Bucket.OPS)}
    assert values == {str(winner).encode()}


async def test_what_is_made_together_lives_as_long_as_it_is_told(state: State) -> None:
    async with watching(state.other, Bucket.OPS) as seen:
        await state.registry.create_all(Bucket.OPS, [("k.1", b"1"), ("k.2", b"2")], ttl_s=1)
        await until(lambda: len(seen) >= 5)

    over = [change for change in seen[1:] if isinstance(change, Change) and change.value is None]
    assert {change.key for change in over} == {"k.1", "k.2"}
    assert await state.other.entries(Bucket.OPS) == []


async def test_only_keys_that_nodes_do_not_write_are_made_together(registry: Registry) -> None:
    with pytest.raises(InvalidArgumentError):
        await registry.create_all(NODES, [("a", b"")])
    with pytest.raises(InvalidArgumentError):
        await registry.create_all(Bucket.OPS, [("not a key", b"")])
    with pytest.raises(InvalidArgumentError):
        await registry.create_all(Bucket.OPS, [("k", b"")] * (limits.REGISTRY_TOGETHER_MAX + 1))
