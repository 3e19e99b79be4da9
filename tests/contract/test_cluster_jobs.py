"""Jobs, their leases and their orders: the same on shared state in this process and on NATS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.cluster.jobs.keeper import JobKeeper
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.core.errors import ConflictError, DeadlineError, LimitError, NotFoundError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.spec import Substrate
from dsec.node.node import Node
from dsec.testing.clock import ManualClock
from dsec.testing.nats_servers import NatsServers
from dsec.testing.nodes import FAKE_SPEC, FakeEnvironments, NodeClient, caller_of, fake_config
from dsec.testing.shared_state import FORMS, State, state_of
from dsec.wire.codec import pack
from dsec.wire.jobs import Because, JobExtend, JobOrder, JobOrderKind, JobPart, JobRequest, JobState, OnMissed
from dsec.wire.node import Caller, Method
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef
from tests.contract.served import until

CALLER = caller_of("/team")
LEASE = JobRequest(name="train", lease_s=60.0, grace_s=300.0)


@pytest.fixture(params=FORMS)
async def state(request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServers) -> AsyncIterator[State]:
    async with state_of(request.param, tmp_path, nats) as state:
        yield state


@dataclass
class Fakes:
    """Nodes on the fake backend, and what a replica has to do with nodes (`Rpc`, `Fleet`)."""

    nodes_by_id: dict[NodeId, Node] = field(default_factory=dict)
    away: set[NodeId] = field(default_factory=set)
    hangs: set[NodeId] = field(default_factory=set)  # their calls end by their time alone
    orders: list[JobOrder] = field(default_factory=list)

    def nodes(self) -> Sequence[NodeId]:
        return [node for node in self.nodes_by_id if node not in self.away]

    def silent(self) -> Sequence[NodeId]:
        return sorted(self.away)

    absent = silent

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        if node in self.away:
            raise UnavailableError(f"node {node} is away")
        if node in self.hangs:
            self.orders.append(msgspec.msgpack.decode(body, type=JobOrder))
            raise DeadlineError(f"{method} was not done within {timeout_s:g} s")
        if method is Method.JOB_ACT:
            self.orders.append(msgspec.msgpack.decode(body, type=JobOrder))
        service = NodeClient(self.nodes_by_id[node]).service
        return await service.call(method, body, caller=caller, key=key, timeout_s=timeout_s)

    async def create(self, node: NodeId, job: str | None = "train") -> str:
        spec = msgspec.structs.replace(FAKE_SPEC, job=job)
        client = NodeClient(self.nodes_by_id[node], CALLER)
        return (await client.call(Method.CREATE, CreateRequest(spec=spec), Sandbox)).id

    def states(self) -> list[str]:
        return sorted(str(one.state) for node in self.nodes_by_id.values() for one in node.registry)


@contextlib.asynccontextmanager
async def fakes(directory: Path, *, pause: Sequence[bool] = (True, True)) -> AsyncIterator[Fakes]:
    found = Fakes()
    async with contextlib.AsyncExitStack() as stack:
        for index, able in enumerate(pause):
            backend = FakeBackend(pause=able)

            def make(_: NodeId, backend: FakeBackend = backend) -> dict[Substrate, Any]:
                return {Substrate.FAKE: backend}

            node = Node(
                fake_config(directory / f"node-{index}"),
                make_backends=make,
                environments=FakeEnvironments(),
                boot_id="boot",
            )
            await node.start()
            stack.push_async_callback(node.close)
            found.nodes_by_id[node.id] = node
        yield found


@dataclass
class Watching:
    """One watcher's jobs and their keeper, on a clock of the test."""

    jobs: Jobs
    orders: Orders
    keeper: JobKeeper
    clock: ManualClock

    async def after(self, seconds: float) -> None:
        """So much later it has looked, and done what it began."""
        await self.clock.advance(seconds)
        await self.look()

    async def look(self) -> None:
        await self.keeper.look()  # what is to be
        await self.keeper.look()  # is done
        await self.keeper.settled()

    async def sees(self, condition: Callable[[], Any]) -> None:
        """The news are on their way."""
        await until(condition)


@contextlib.asynccontextmanager
async def watching(state: State, fakes: Fakes, clock: ManualClock | None = None) -> AsyncIterator[Watching]:
    clock = clock or ManualClock()
    jobs = Jobs(state.registry, clock)
    await jobs.start()
    orders = Orders(fakes, fakes)  # type: ignore[arg-type]
    keeper = JobKeeper(jobs, orders, clock)
    try:
        yield Watching(jobs, orders, keeper, clock)
    finally:
        await keeper.close()
        await jobs.close()


# ---- leases --------------------------------------------------------------------------------------


async def test_a_missed_lease_pauses_the_job_on_all_nodes_and_a_heartbeat_lets_it_go_on(
    state: State, tmp_path: Path
) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        for node in nodes.nodes():
            await nodes.create(node)
            await nodes.create(node, job=None)

        await watcher.after(59.0)
        assert nodes.states() == ["running"] * 4

        await watcher.after(2.0)
        row = await watcher.jobs.get("/team", "train")
        assert nodes.states() == ["paused", "paused", "running", "running"]
        assert (row.state, row.because, row.settled) == (JobState.PAUSED, Because.LEASE, True)

        await watcher.jobs.beat("/team", "train")
        await watcher.look()
        row = await watcher.jobs.get("/team", "train")
        assert nodes.states() == ["running"] * 4
        assert (row.state, row.settled) == (JobState.RUNNING, True)


async def test_steps_of_the_wall_clock_end_no_lease(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")

        for step in (7 * 86_400.0, -30 * 86_400.0):
            watcher.clock.step_wall(step)
            await watcher.after(10.0)

        assert (await watcher.jobs.get("/team", "train")).state is JobState.RUNNING


async def test_heartbeats_and_extensions_make_it_last(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        jobs = watcher.jobs
        await jobs.create(LEASE, project="/team", principal="p")

        await watcher.after(50.0)
        await jobs.beat("/team", "train")
        await watcher.after(50.0)
        await jobs.extend("/team", "train", JobExtend(seconds=500.0))
        await watcher.after(400.0)
        await jobs.beat("/team", "train")  # does not shorten it
        await watcher.after(90.0)
        assert (await jobs.get("/team", "train")).state is JobState.RUNNING

        await watcher.after(20.0)
        assert (await jobs.get("/team", "train")).state is JobState.PAUSED


async def test_what_cannot_be_paused_is_stopped_after_the_grace(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path, pause=(True, False)) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        for node in nodes.nodes():
            await nodes.create(node)

        await watcher.after(61.0)
        assert nodes.states() == ["paused", "running"]

        await watcher.after(301.0)
        assert nodes.states() == ["paused"]
        assert (await watcher.jobs.get("/team", "train")).graced


async def test_with_the_policy_stop_all_are_stopped_after_lease_and_grace(state: State, tmp_path: Path) -> None:
    terms = msgspec.structs.replace(LEASE, on_missed=OnMissed.STOP)
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(terms, project="/team", principal="p")
        for node in nodes.nodes():
            await nodes.create(node)

        await watcher.after(350.0)
        assert nodes.states() == ["running", "running"]

        await watcher.after(20.0)
        assert nodes.states() == []
        with pytest.raises(ConflictError):
            await watcher.jobs.beat("/team", "train")


async def test_a_job_that_its_client_has_paused_and_left_is_stopped_if_that_is_the_policy(
    state: State, tmp_path: Path
) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        jobs = watcher.jobs
        for name, policy in (("stops", OnMissed.STOP), ("stays", OnMissed.PAUSE)):
            terms = msgspec.structs.replace(LEASE, name=name, on_missed=policy)
            await jobs.create(terms, project="/team", principal="p")
            await jobs.settle(await jobs.move("/team", name, JobState.PAUSED))

        await watcher.after(361.0)

        assert [(await jobs.get("/team", name)).state for name in ("stops", "stays")] == ["stopped", "paused"]


async def test_no_time_counts_while_verdicts_are_frozen(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")

        await watcher.clock.advance(1_000.0)
        watcher.keeper.freeze()
        await watcher.after(50.0)
        assert (await watcher.jobs.get("/team", "train")).state is JobState.RUNNING

        await watcher.after(20.0)
        assert (await watcher.jobs.get("/team", "train")).state is JobState.PAUSED


async def test_a_watcher_that_is_started_again_keeps_leases_and_counts_anew(state: State, tmp_path: Path) -> None:
    clock = ManualClock()
    async with fakes(tmp_path) as nodes:
        async with watching(state, nodes, clock) as first:
            await first.jobs.create(LEASE, project="/team", principal="p")
            await first.after(50.0)
        async with watching(state, nodes, clock) as second:
            await second.after(50.0)
            assert (await second.jobs.get("/team", "train")).state is JobState.RUNNING

            await second.after(20.0)
            assert (await second.jobs.get("/team", "train")).state is JobState.PAUSED


async def test_two_watchers_at_once_do_it_once(state: State, tmp_path: Path) -> None:
    clock = ManualClock()
    async with fakes(tmp_path) as nodes, watching(state, nodes, clock) as one, watching(state, nodes, clock) as other:
        await one.jobs.create(LEASE, project="/team", principal="p")
        await other.sees(lambda: other.jobs.known("/team", "train"))
        await clock.advance(61.0)

        row = one.jobs.known("/team", "train")
        assert row is not None
        won = [await jobs.missed(row, JobState.PAUSED) for jobs in (one.jobs, other.jobs)]

        assert won == [True, False]
        assert (await one.jobs.get("/team", "train")).order == 1


async def test_a_heartbeat_that_came_before_the_verdict_wins(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        old = await watcher.jobs.create(LEASE, project="/team", principal="p")
        await watcher.jobs.beat("/team", "train")

        assert not await watcher.jobs.missed(old, JobState.PAUSED)


# ---- orders --------------------------------------------------------------------------------------


async def test_an_order_tells_of_every_sandbox_and_of_nodes_that_do_not_answer(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path, pause=(True, False, True)) as nodes, watching(state, nodes) as watcher:
        able, unable, away = nodes.nodes()
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        ids = {node: await nodes.create(node) for node in (able, unable, away)}
        nodes.away.add(away)

        row = await watcher.jobs.move("/team", "train", JobState.PAUSED)
        async with contextlib.aclosing(watcher.orders.give(row, JobOrderKind.PAUSE)) as parts:
            found = {part.node: part async for part in parts}

        assert [(item.sandbox, item.state) for item in found[able].items] == [(ids[able], "paused")]
        (failed,) = found[unable].items
        assert failed.error is not None
        assert (failed.sandbox, failed.error.code) == (ids[unable], "unsupported")
        told = found[away].error
        assert told is not None
        assert told.code == "unavailable"


async def test_a_node_that_never_comes_to_an_end_or_speaks_for_another_is_given_up(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.jobs.orders.JOB_PARTS_MAX", 20)
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        endless, liar = nodes.nodes()

        async def call(node: NodeId, method: Method, body: bytes, **_: object) -> bytes:
            after = msgspec.msgpack.decode(body, type=JobOrder).after
            return pack(JobPart(node=endless, next=f"{after}a" if node == endless else None))

        monkeypatch.setattr(nodes, "call", call)
        row = await watcher.jobs.create(LEASE, project="/team", principal="p")
        async with contextlib.aclosing(watcher.orders.give(row, JobOrderKind.PAUSE)) as given:
            parts = [part async for part in given]

        assert {part.node for part in parts if part.error is not None} == {endless, liar}
        assert len(parts) == 22


async def test_what_a_replica_leaves_undone_is_done_when_the_node_is_back(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        here, away = nodes.nodes()
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        await nodes.create(here)
        await nodes.create(away)
        nodes.away.add(away)
        await watcher.jobs.move("/team", "train", JobState.STOPPED)

        await watcher.after(10.0)
        assert nodes.states() == ["running", "running"]  # the replica that was asked is at it

        await watcher.after(121.0)
        assert nodes.states() == ["running"]
        with pytest.raises(ConflictError):
            await watcher.jobs.remove("/team", "train")

        nodes.away.clear()
        await watcher.after(11.0)
        assert nodes.states() == []
        await watcher.jobs.remove("/team", "train")


async def test_what_came_late_into_a_stopped_job_is_swept(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        (node, _) = nodes.nodes()
        row = await watcher.jobs.create(LEASE, project="/team", principal="p")
        row = await watcher.jobs.move("/team", "train", JobState.STOPPED)
        await watcher.jobs.settle(row)
        await nodes.create(node)

        await watcher.after(61.0)

        assert nodes.states() == []
        assert (await watcher.jobs.get("/team", "train")).swept


async def test_an_order_that_comes_late_changes_nothing(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        (node, _) = nodes.nodes()
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        await nodes.create(node)
        late = await watcher.jobs.move("/team", "train", JobState.PAUSED)
        row = await watcher.jobs.move("/team", "train", JobState.RUNNING)

        assert await watcher.orders.carry_out(row, JobOrderKind.RESUME, going=lambda: True)
        assert not await watcher.orders.carry_out(late, JobOrderKind.PAUSE, going=lambda: True)

        assert nodes.states() == ["running"]


async def test_a_node_that_hangs_is_waited_for_by_one_order_and_not_by_all(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        (hung, other) = nodes.nodes()
        row = await watcher.jobs.create(LEASE, project="/team", principal="p")
        for node in (hung, other):
            await nodes.create(node)
        nodes.hangs.add(hung)
        row = await watcher.jobs.move("/team", "train", JobState.PAUSED)

        for _ in range(3):
            assert not await watcher.orders.carry_out(row, JobOrderKind.PAUSE, going=lambda: True)
        assert len(nodes.orders) == 1 + 3  # of the one that hangs, and of the other
        assert nodes.states() == ["paused", "running"]

        nodes.hangs.clear()
        watcher.orders._mute.clear()
        assert await watcher.orders.carry_out(row, JobOrderKind.PAUSE, going=lambda: True)
        assert nodes.states() == ["paused", "paused"]


async def test_many_sandboxes_are_acted_on_with_few_calls(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.core.limits.JOB_SLICE_ITEMS_MAX", 10)
    async with fakes(tmp_path, pause=(True,)) as nodes, watching(state, nodes) as watcher:
        (node,) = nodes.nodes()
        row = await watcher.jobs.create(LEASE, project="/team", principal="p")
        ids = [await nodes.create(node) for _ in range(25)]
        row = await watcher.jobs.move("/team", "train", JobState.STOPPED)
        parts: list[JobPart] = []

        async with contextlib.aclosing(watcher.orders.give(row, JobOrderKind.STOP)) as told:
            parts += [part async for part in told]

        assert sorted(item.sandbox for part in parts for item in part.items) == sorted(ids)
        assert [len(part.items) for part in parts] == [10, 10, 5]
        assert nodes.states() == []


# ---- which jobs there are ------------------------------------------------------------------------


async def test_a_job_is_made_once_and_its_name_is_free_when_it_was_stopped(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        jobs = watcher.jobs
        first = await jobs.create(LEASE, project="/team", principal="p")

        assert await jobs.create(LEASE, project="/team", principal="q") == first
        with pytest.raises(ConflictError):
            await jobs.create(JobRequest(name="train", lease_s=61.0), project="/team", principal="p")
        other = await jobs.create(LEASE, project="/team/below", principal="p")
        assert other.id != first.id

        row = await jobs.move("/team", "train", JobState.STOPPED)
        with pytest.raises(ConflictError):
            await jobs.create(LEASE, project="/team", principal="p")  # it is on its way
        await jobs.settle(row)
        again = await jobs.create(LEASE, project="/team", principal="p")
        assert again.id != first.id
        with pytest.raises(NotFoundError):
            await jobs.move("/team", "train", JobState.STOPPED, id=first.id)  # who stopped the first comes late
        assert {(one.project, one.name) for one in jobs.list(lambda _: True)} == {
            ("/team", "train"),
            ("/team/below", "train"),
        }


async def test_one_project_with_all_below_it_leaves_room_for_jobs_of_others(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.jobs.table.JOBS_MAX", 4)
    async with fakes(tmp_path, pause=()) as nodes, watching(state, nodes) as watcher:
        for number in range(2):
            await watcher.jobs.create(LEASE, project=f"/team/{number}", principal="p")
        with pytest.raises(LimitError, match="/team and the projects below it"):
            await watcher.jobs.create(LEASE, project="/team/new", principal="p")

        await watcher.jobs.create(LEASE, project="/other", principal="p")


async def test_what_is_done_with_a_job_that_is_not_there_is_not_found(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")

        with pytest.raises(NotFoundError):
            await watcher.jobs.beat("/other", "train")
        with pytest.raises(NotFoundError):
            await watcher.jobs.remove("/team", "trai")


async def test_a_stopped_job_stays_stopped(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        await watcher.jobs.create(LEASE, project="/team", principal="p")
        stopped = await watcher.jobs.move("/team", "train", JobState.STOPPED)

        assert await watcher.jobs.move("/team", "train", JobState.STOPPED) == stopped
        for state_wanted in (JobState.RUNNING, JobState.PAUSED):
            with pytest.raises(ConflictError):
                await watcher.jobs.move("/team", "train", state_wanted)


async def test_a_sandbox_that_has_ended_by_itself_is_done_with(state: State, tmp_path: Path) -> None:
    async with fakes(tmp_path) as nodes, watching(state, nodes) as watcher:
        (node, _) = nodes.nodes()
        row = await watcher.jobs.create(LEASE, project="/team", principal="p")
        id = await nodes.create(node)
        await nodes.call(node, Method.DESTROY, pack(SandboxRef(id)), caller=CALLER, timeout_s=30.0)
        row = await watcher.jobs.move("/team", "train", JobState.STOPPED)

        assert await watcher.orders.carry_out(row, JobOrderKind.STOP, going=lambda: True)
