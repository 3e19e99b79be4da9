"""Projects, tokens and caps of several replicas: in this process and on NATS the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from dsec.api.sharediam import SharedIamStore, SharedSlices
from dsec.cluster.registry import Bucket, Registry
from dsec.core.errors import AuthError, ConflictError, DsecError, QuotaError, UnavailableError
from dsec.core.spec import Environment, SandboxSpec
from dsec.iam.ledger import Ledger
from dsec.iam.peers import Peer, local_principal
from dsec.iam.service import Iam
from dsec.iam.slices import Shared, Slice
from dsec.iam.store import Batch, OvertakenError
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
