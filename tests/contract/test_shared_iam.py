"""Projects, tokens and caps of several replicas: in this process and on NATS the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from dsec.api import iambase
from dsec.api.sharediam import SharedIamStore, SharedSlices
from dsec.cluster.registry import Bucket, Registry
from dsec.core.clock import SystemClock
from dsec.core.errors import AuthError, ConflictError, DsecError, QuotaError, UnavailableError
from dsec.core.spec import Environment, SandboxSpec
from dsec.iam.ledger import Ledger
from dsec.iam.peers import Peer, local_principal
from dsec.iam.service import Iam
from dsec.iam.slices import Shared, Slice
from dsec.iam.store import Batch, Entry, OvertakenError
from dsec.testing.clock import ManualClock
from dsec.testing.nats_servers import NatsServers
from dsec.testing.shared_state import FORMS, State, state_of
from dsec.wire.iam import Quota, amounts_of
from tests.contract.served import until

ROOT = local_principal(Peer(1, 0, 0))
SPEC = SandboxSpec(environment=Environment("base"))


@pytest.fixture(params=FORMS)
async def state(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[State]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state


@contextlib.asynccontextmanager
async def replica(registry: Registry, directory: Path) -> AsyncIterator[Iam]:
    directory.mkdir()
    store = SharedIamStore(registry)
    await store.start()
    iam = await Iam.shared(store, directory)
    try:
        yield iam
    finally:
        await iam.close()
        await store.stop()


async def test_what_one_replica_changes_the_other_knows(state: State, tmp_path: Path) -> None:
    async with replica(state.registry, tmp_path / "1") as one, replica(state.other, tmp_path / "2") as two:
        text, token = await one.tokens.create("ci", project="/team", right="manage", by=ROOT)

        def known() -> bool:
            two.directory.refresh()
            return two.directory.view.token(token.id) is not None

        await until(known)
        who = two.directory.authenticate(text)
        await two.projects.create("/team/run", by=who)
        await two.tokens.revoke(token.id, by=ROOT)

        def revoked() -> bool:
            one.directory.refresh()
            with contextlib.suppress(AuthError):
                one.directory.authenticate(text)
                return False
            return True

        await until(revoked)
        assert [row.path for row in one.projects.visible(by=ROOT)] == ["/", "/team", "/team/run"]
        with pytest.raises(ConflictError):
            await one.projects.create("/team/run", by=ROOT)


async def test_replicas_that_change_at_once_lose_nothing_and_come_to_the_same(state: State, tmp_path: Path) -> None:
    async with replica(state.registry, tmp_path / "1") as one, replica(state.other, tmp_path / "2") as two:
        done = await asyncio.gather(
            *(
                which.tokens.create(f"n{number}", project=f"/t{number % 2}", right="use", by=ROOT)
                for number in range(5)
                for which in (one, two)
            ),
            return_exceptions=True,
        )
        made = {each[1].id for each in done if not isinstance(each, BaseException)}
        assert all(isinstance(each, DsecError) for each in done if isinstance(each, BaseException))

        def same() -> bool:
            one.directory.refresh()
            two.directory.refresh()
            return one.directory.view.rows == two.directory.view.rows

        await until(same)
        assert made
        assert made <= {token.id for token in one.tokens.list(by=ROOT)}
        assert one.directory.view.revisions == two.directory.view.revisions
    async with replica(state.other, tmp_path / "3") as later:
        assert made <= {token.id for token in later.tokens.list(by=ROOT)}
        assert [row.path for row in later.projects.visible(by=ROOT)] == ["/", "/t0", "/t1"]


async def test_a_batch_of_the_cluster_happens_whole_or_not_at_all(state: State) -> None:
    one, two = SharedIamStore(state.registry), SharedIamStore(state.other)
    await one.start()
    await two.start()
    await one.apply(Batch({"project/a": b"1", "project/b": b"1"}, {"project/a": 0}))
    await until(lambda: two.changes(0) is not None)

    with pytest.raises(OvertakenError):
        await two.apply(Batch({"project/a": b"2", "project/c": b"2"}, {"project/b": 99}))
    both = await asyncio.gather(
        *(
            store.apply(Batch({"project/a": name, "project/b": name}, {"project/a": 1}))
            for store, name in ((one, b"x"), (two, b"y"))
        ),
        return_exceptions=True,
    )

    assert sorted(isinstance(each, OvertakenError) for each in both) == [False, True]
    await until(lambda: one.changes(0) == two.changes(0))
    found = {entry.key: entry.value for entry in one.changes(0).entries}  # type: ignore[union-attr]
    assert found["project/a"] == found["project/b"] != b"1"
    assert "project/c" not in found
    assert len(await state.registry.entries(Bucket.IAM)) == 2
    await one.stop()
    await two.stop()


async def _changed(store: SharedIamStore, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await store.apply(Batch({f"project/{number % 50}": b"%d" % number, f"gone/{number}": b"x"}, {}))
        await store.apply(Batch({f"gone/{number}": None}, {}))


def known(store: SharedIamStore) -> dict[str, tuple[int, bytes | None]]:
    changes = store.changes(0)
    assert changes is not None
    return {entry.key: (entry.revision, entry.value) for entry in changes.entries if entry.value is not None}


async def test_many_changes_are_summed_up_and_those_who_begin_or_are_behind_come_to_the_same(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.api.sharediam.IAM_BATCHES_MAX", 40)
    monkeypatch.setattr("dsec.api.iambase.IAM_BATCHES_KEPT", 5)
    monkeypatch.setattr("dsec.api.iambase._PART_BYTES", 300)
    one, behind = SharedIamStore(state.registry), SharedIamStore(state.other)
    await one.start()
    await behind.start()
    await behind.stop()  # it hears of nothing now
    await _changed(one, 45)
    await until(lambda: one._summed_to >= 40 and one._summing is not None and one._summing.done())

    entries = await state.registry.entries(Bucket.IAM)
    numbers = [int(entry.key) for entry in entries if entry.key.isdecimal()]
    assert len(numbers) <= 90 - 40 + 5 + 40
    assert min(numbers) > 1
    assert sum(entry.key.startswith("base.") for entry in entries) > 1
    # Its number is free again, and what it writes there counts for nothing.
    monkeypatch.setattr("dsec.api.sharediam._CATCH_UP_S", 0.05)
    with pytest.raises((OvertakenError, UnavailableError)):
        await behind.apply(Batch({"project/evil": b"stale"}, {}))
    monkeypatch.setattr("dsec.api.sharediam._CATCH_UP_S", 10.0)
    await behind.start()
    later = SharedIamStore(state.other)
    await later.start()
    await until(lambda: one._applied == behind._applied == later._applied)

    assert known(one) == known(behind) == known(later)
    assert "project/evil" not in known(later)
    assert later.changes(1).whole  # type: ignore[union-attr]
    await later.apply(Batch({"project/0": b"last"}, {"project/0": known(later)["project/0"][0]}))
    await until(lambda: known(one) == known(behind) == known(later))
    assert known(one)["project/0"][1] == b"last"
    for store in (one, behind, later):
        await store.stop()


async def test_of_two_who_sum_up_at_once_one_is_taken_and_it_is_whole(state: State) -> None:
    clock = SystemClock()
    entries = [Entry(f"k{number}", number, b"x" * 200) for number in range(1, 1_001)]
    done = await asyncio.gather(
        *(
            iambase.write(registry, clock, upto, upto, entries[:upto])
            for registry, upto in ((state.registry, 900), (state.other, 1_000), (state.other, 800))
        )
    )

    base, found = await iambase.load(state.registry)
    assert sum(done) >= 1
    assert (len(found), base.upto) == (base.upto, base.revision)
    assert not await iambase.write(state.registry, clock, base.upto, 1, [])
    assert (await iambase.load(state.other)).base == base


async def test_one_that_died_while_it_summed_up_leaves_what_was(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    assert await iambase.write(state.registry, clock, 5, 5, [Entry("a", 1, b"1")])

    async def dies(*_: object, **__: object) -> int:
        raise UnavailableError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(state.registry, "update", dies)
        with pytest.raises(UnavailableError):
            await iambase.write(state.registry, clock, 9, 9, [Entry("a", 9, b"9")])
    assert (await iambase.load(state.registry)).entries == {"a": Entry("a", 1, b"1")}
    await clock.advance(4_000)
    assert await iambase.write(state.registry, clock, 10, 10, [Entry("a", 10, b"10")])
    left = [entry.key for entry in await state.registry.entries(Bucket.IAM)]
    assert len(left) == 2  # the base, and its part: of the others nothing is left


async def test_slices_are_changed_by_one_replica_at_a_time(state: State) -> None:
    one, two = SharedSlices(state.registry), SharedSlices(state.other)
    long = "/" + "/".join(["a." * 20 + "b"] * 12)
    for project in ("/", "/team/run-7", long):
        first = await one.write(project, Shared({"r": Slice({"cpu": 1}, 1)}), expect=0)
        assert first is not None

        assert await two.write(project, Shared(), expect=0) is None
        assert await two.read(project) == (first, Shared({"r": Slice({"cpu": 1}, 1)}))
        assert await two.write(project, Shared(), expect=first) is not None
        assert await one.write(project, Shared(), expect=first) is None


async def test_replicas_together_do_not_exceed_a_cap(state: State) -> None:
    live: list[SandboxSpec] = []

    async def holdings(projects: Sequence[str]) -> dict[str, dict[str, int]]:
        await asyncio.sleep(0)
        held = {cap: amount * len(live) for cap, amount in amounts_of(SPEC).items()}
        return dict.fromkeys(projects, held)

    ledgers = [Ledger(SharedSlices(registry), holdings) for registry in (state.registry, state.other, state.other)]
    rules = [("/", Quota(sandboxes=9)), ("/team", Quota(sandboxes=7))]
    refused = 0

    async def create(ledger: Ledger) -> None:
        nonlocal refused
        try:
            charge = await ledger.take(rules, SPEC)
        except QuotaError:
            refused += 1
            return
        await asyncio.sleep(0.001)
        live.append(SPEC)
        assert len(live) <= 7
        charge.settle()

    async with asyncio.timeout(60):
        while len(live) < 7 or not refused:
            done = await asyncio.gather(
                *(create(ledger) for ledger in ledgers for _ in range(2)), return_exceptions=True
            )
            # Where many change one record at once some are told to try again.
            assert [each for each in done if each is not None and not isinstance(each, UnavailableError)] == []
            for ledger in ledgers:
                await ledger.tend()

    assert len(live) == 7
    for ledger in ledgers:
        await ledger.close()
