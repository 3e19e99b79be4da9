"""Sandboxes with network `proxied` on a node: attached by the rules that the journal has, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.backends.base import Instance, InstanceSpec, Intend
from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.instance import FakeInstance
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LaunchError, Outcome, SandboxStateError, UnavailableError
from dsec.core.spec import NetworkMode, SandboxSpec, Substrate
from dsec.node.denials import Denials
from dsec.node.origins import Origin
from dsec.testing.faults import Faults, each_nth_failure
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.egress import EgressCounts, EgressDenied
from dsec.wire.events import Denied, Event, EventKind, EventLine, EventQuery
from dsec.wire.frames import FrameType
from dsec.wire.node import Method, SetEgress
from dsec.wire.snapshots import (
    Fork,
    Forked,
    ForkRequest,
    Rollback,
    RollbackRequest,
    SnapshotInfo,
    SnapshotRequest,
    SnapshotTake,
)
from tests.drowsy import DrowsyBackend
from tests.node_calls import create, destroy, get, start


@dataclass
class Machine:
    """`client`: of the node, once it was started."""

    directory: Path
    host: FakeHost
    backend: DrowsyBackend | None = None  # of machines, which can sleep
    client: NodeClient = field(init=False)

    async def create(self, egress: Sequence[str] | None = ("a.example",), **changes: Any) -> str:
        rules = None if egress is None else tuple(egress)
        return (await create(self.client, network=NetworkMode.PROXIED, egress=rules, **changes)).id

    async def set(self, id: str, egress: list[str] | None) -> records.Sandbox:
        request = SetEgress(id, records.EgressRequest(egress=egress))
        return await self.client.call(Method.SET_EGRESS, request, records.Sandbox)

    async def restarted(self) -> None:
        await crash(self.client.node)
        await self.start()

    async def start(self) -> None:
        node = make_fake_node(self.directory, host=self.host)
        if (backend := self.backend) is not None:
            node._make_backends = lambda _: {Substrate.FAKE: backend}
        await node.start()
        self.client = NodeClient(node)

    def reached(self, id: str) -> list[str] | None:
        """As the forwarder has it. Raises KeyError when it does not carry anything of it."""
        rules = self.host.egress[id]
        return None if rules is None else [rule.host for rule in rules]

    async def events(self, kind: EventKind) -> list[Event]:
        async with self.client.stream(Method.EVENTS, EventQuery(follow=False, kinds=(str(kind),))) as stream:
            frames = await stream.all()
        lines = [unpack(frame.body, EventLine) for frame in frames if frame.type != FrameType.END]
        return [line.event for line in lines if line.event is not None]


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path, FakeHost())
    await machine.start()
    try:
        yield machine
    finally:
        await machine.client.node.close()


async def test_it_is_attached_when_its_create_returns_and_detached_when_it_has_ended(machine: Machine) -> None:
    some, all, nothing = await machine.create(), await machine.create(None), await machine.create([])
    none = (await create(machine.client)).id

    assert (machine.reached(some), machine.reached(all), machine.reached(nothing)) == (["a.example"], None, [])
    assert none not in machine.host.egress
    view = await get(machine.client, some)
    assert (view.network, view.egress) == ("proxied", ["a.example"])
    for id in (some, all, nothing, none):
        await destroy(machine.client, id)
    await eventually(lambda: not machine.host.egress)


async def test_ports_and_networks_come_to_the_forwarder_as_they_were_meant(machine: Machine) -> None:
    id = await machine.create(["*.B.example:8000-8010,80", "10.1.0.0/16:5432", "[2001:db8::1]:*"])

    rules = machine.host.egress[id]
    assert rules is not None
    assert [(rule.host, rule.ports) for rule in rules] == [
        ("*.b.example", ((80, 80), (8000, 8010))),
        ("10.1.0.0/16", ((5432, 5432),)),
        ("2001:db8::1/128", ((1, 65_535),)),
    ]


async def test_a_create_that_cannot_be_attached_leaves_nothing(machine: Machine) -> None:
    spec = FAKE_SPEC
    with Faults(1, prefix="fake.egress.attach"), pytest.raises(LaunchError) as caught:
        await create(machine.client, key="k", network=NetworkMode.PROXIED)

    assert (caught.value.step, caught.value.outcome) == ("network", Outcome.GONE)
    assert machine.host.leftovers() == []
    assert not machine.host.egress
    again = await create(machine.client, key="k", network=NetworkMode.PROXIED, memory_bytes=spec.memory_bytes)
    assert machine.reached(again.id) is None


async def test_whatever_fails_of_a_whole_life_nothing_is_left_and_nothing_too_much_is_allowed(tmp_path: Path) -> None:
    async for faults in each_nth_failure("fake.egress."):
        machine = Machine(tmp_path / str(faults.nth), FakeHost())
        await machine.start()
        with faults:
            await _live(machine)
        assert machine.host.leftovers() == []
        await machine.client.node.close()


async def _live(machine: Machine) -> None:
    host = machine.host
    try:
        id = await machine.create(["a.example", "b.example"])
    except LaunchError:
        assert not host.egress
        return
    with suppress(UnavailableError):
        await machine.set(id, ["a.example"])
    await eventually(lambda: id in host.egress and machine.reached(id) == ["a.example"])
    assert (await get(machine.client, id)).egress == ["a.example"]
    await destroy(machine.client, id)
    await eventually(lambda: not host.egress)


async def test_rules_are_replaced_in_place_also_while_it_is_paused(machine: Machine) -> None:
    id = await machine.create()

    assert (await machine.set(id, ["B.example", "b.example:443,80"])).egress == ["b.example"]
    assert machine.reached(id) == ["b.example"]
    await machine.client.call(Method.PAUSE, records.SandboxRef(id), records.Sandbox)
    assert (await machine.set(id, None)).egress is None
    assert machine.reached(id) is None
    assert (await get(machine.client, id)).state == "paused"
    assert (await machine.set(id, [])).egress == []
    assert machine.reached(id) == []


async def test_one_without_a_network_is_given_no_rules(machine: Machine) -> None:
    id = (await create(machine.client)).id

    with pytest.raises(SandboxStateError, match="network none"):
        await machine.set(id, ["a.example"])
    with pytest.raises(InvalidArgumentError):
        SandboxSpec(environment=FAKE_SPEC.environment, egress=("a.example",))


async def test_what_was_told_holds_after_a_kill_of_the_node(machine: Machine) -> None:
    id, gone = await machine.create(), await machine.create()
    await machine.set(id, ["b.example"])
    # As if the forwarder had been away, too, and another one had come; and one ended while nobody looked.
    machine.host.egress[id] = None
    await machine.host.sandboxes[gone].stop("killed")  # type: ignore[index]

    await machine.restarted()

    assert (await get(machine.client, id)).egress == ["b.example"]
    await eventually(lambda: machine.reached(id) == ["b.example"])
    await eventually(lambda: gone not in machine.host.egress)


async def test_rules_that_were_written_and_not_applied_are_by_the_next_process(machine: Machine) -> None:
    id = await machine.create(["a.example", "b.example"])
    with Faults(1, prefix="fake.egress.rules"), pytest.raises(UnavailableError) as caught:
        await machine.set(id, [])
    assert caught.value.outcome is Outcome.UNKNOWN
    await machine.restarted()

    await eventually(lambda: machine.reached(id) == [])


async def test_rules_do_not_give_way_to_those_of_an_attachment_that_was_under_way(tmp_path: Path) -> None:
    held, gate = False, asyncio.Event()

    async def sleep(duration_s: float) -> None:
        await gate.wait()

    host = FakeHost(sleep=sleep, delay_s=lambda step: 1.0 if held and step == "egress.attach" else 0.0)
    machine = Machine(tmp_path, host)
    await machine.start()
    id = await machine.create(["a.example", "b.example"])
    held = True
    await machine.restarted()  # it is attached again, by the rules of now
    await get(machine.client, id)

    host.egress = noted = Noted(host.egress)

    async def set_it() -> int:
        await machine.set(id, [])
        return len(noted.told)

    setting = asyncio.create_task(set_it())
    await eventually(lambda: [row.spec.egress for row in machine.client.node.journal.sandboxes()] == [()])
    for _ in range(50):  # whoever would not wait for the attachment is through by now
        await asyncio.sleep(0)
    gate.set()
    since = await setting
    await eventually(lambda: not machine.client.node._services.egress._again)
    assert noted.told[since - 1] == ()
    assert set(noted.told[since:]) <= {()}
    await machine.client.node.close()


class Noted(dict[str, Any]):
    """Of which rules it was told, in order."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self.told: list[Any] = []

    def __setitem__(self, id: str, rules: Any) -> None:
        self.told.append(rules)
        super().__setitem__(id, rules)


async def test_what_nobody_knows_any_more_is_detached_at_the_start(machine: Machine) -> None:
    id = await machine.create()
    machine.host.egress["sbx_of_before"] = None

    await machine.restarted()

    await eventually(lambda: list(machine.host.egress) == [id])


async def test_snapshots_forks_and_rollbacks_keep_the_rules(machine: Machine) -> None:
    id, client = await machine.create(), machine.client
    await client.call(Method.SNAPSHOT_TAKE, SnapshotTake(id, SnapshotRequest(name="s")), SnapshotInfo)
    forked = await client.call(Method.FORK, Fork(id, ForkRequest(count=2)), Forked)
    for child in forked.sandboxes:
        assert machine.reached(child.id) == ["a.example"]

    asked = msgspec.structs.replace(FAKE_SPEC, network=NetworkMode.PROXIED)
    made = await client.call(Method.CREATE, records.CreateRequest(spec=asked, snapshot="s"), records.Sandbox)
    assert machine.reached(made.id) == ["a.example"]

    await machine.set(id, ["b.example"])  # of the sandbox, and not of its disk
    del machine.host.egress[id]
    await client.call(Method.ROLLBACK, Rollback(id, RollbackRequest("s")), records.Sandbox)
    await eventually(lambda: id in machine.host.egress and machine.reached(id) == ["b.example"])


async def test_who_does_not_ask_for_a_network_has_none_whatever_the_snapshot_had(machine: Machine) -> None:
    id, client = await machine.create(), machine.client
    await client.call(Method.SNAPSHOT_TAKE, SnapshotTake(id, SnapshotRequest(name="s")), SnapshotInfo)

    made = await client.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC, snapshot="s"), records.Sandbox)

    assert (made.network, made.egress) == ("none", None)
    assert made.id not in machine.host.egress


@pytest.mark.parametrize(
    ("asked", "machine", "found"),
    [
        ({}, "", ("none", None)),
        ({}, "m", ("proxied", ())),  # its card is part of it
        ({"network": "proxied"}, "m", ("proxied", ("a.example",))),
        ({"network": "proxied", "egress": ("b.example",)}, "", ("proxied", ("b.example",))),
    ],
)
def test_a_network_is_asked_for(asked: dict[str, Any], machine: str, found: tuple[str, tuple[str, ...] | None]) -> None:
    spec = msgspec.convert({"environment": {"base": "e"}, "network": "proxied", "egress": ["a.example"]}, SandboxSpec)
    origin = Origin(spec, (), machine=machine)

    asked_for = msgspec.convert({"environment": {"base": "e"}, **asked}, SandboxSpec)
    made, fork = origin.spec_for(asked_for), replace(origin, is_fork=True).spec_for(asked_for)

    assert (made.network, made.egress) == found
    assert fork.network == "proxied"


async def test_traffic_is_in_the_usage_of_one_that_has_ended(machine: Machine) -> None:
    id = await machine.create()
    machine.host.traffic[id] = EgressCounts(sandbox=id, up_bytes=700, down_bytes=9_000)
    ended = await destroy(machine.client, id)

    assert ended.usage is not None
    assert (ended.usage.sent_bytes, ended.usage.received_bytes) == (700, 9_000)


def refused(id: str, target: str, *, count: int = 1, port: int = 443) -> EgressDenied:
    return EgressDenied(sandbox=id, target=target, port=port, protocol="tcp", reason="rules", count=count)


async def test_what_is_refused_is_told_in_few_words_however_much_it_is(machine: Machine) -> None:
    id = await machine.create()
    for number in range(5_000):
        machine.host.tell_denied(refused(id, f"host{number}.example"))
    machine.host.tell_denied(refused(id, "host0.example", count=3))
    machine.host.tell_denied(refused("sbx_of_nobody", "x.example"))

    async def told() -> list[Event]:
        return await machine.events(EventKind.EGRESS_DENIED)

    (event,) = await eventually(told)
    assert (event.sandbox, event.project) == (id, "/test")
    assert event.detail is not None
    assert event.detail.startswith("host0.example:443 (rules, 4 times); ")
    assert event.denied[0] == Denied(host="host0.example", port=443, reason="rules", count=4)
    assert len(event.denied) == limits.EGRESS_DENIALS_TOLD_MAX
    assert event.denied_more == 5_000 - limits.EGRESS_DENIALS_TOLD_MAX
    assert event.detail.endswith(f"and others, {5_000 - limits.EGRESS_DENIALS_TOLD_MAX} times")


async def test_a_name_that_a_sandbox_has_chosen_is_shown_without_what_is_not_seen(machine: Machine) -> None:
    id = await machine.create()
    machine.host.tell_denied(refused(id, "\x1b[2Jx\n\u202e.example" + "y" * 500, port=0))

    async def told() -> list[Event]:
        return await machine.events(EventKind.EGRESS_DENIED)

    (event,) = await eventually(told)
    assert event.detail is not None
    assert event.detail.startswith("?[2Jx??.exampleyyy")
    assert len(event.detail) < 100


async def test_one_that_goes_on_asking_is_told_of_ever_more_seldom(machine: Machine) -> None:
    node = machine.client.node
    waits: list[float] = []
    turns = asyncio.Semaphore(0)

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)
        await turns.acquire()

    denials = Denials(node.registry, node.journal, node.clock, node._tasks, sleep)
    id = await machine.create()

    async def are_told(times: int) -> bool:
        return len(await machine.events(EventKind.EGRESS_DENIED)) == times and len(waits) == times + 1

    for times in (1, 2, 3):
        denials.note(refused(id, "a.example"))
        denials.note(refused(id, "b.example"))
        turns.release()
        await eventually(lambda wanted=times: are_told(wanted))
    assert waits == [0.2, 30.0, 60.0, 120.0]
    turns.release()  # nothing was asked for meanwhile: it is at once again
    await eventually(lambda: not denials._of)
    denials.note(refused(id, "a.example"))
    await eventually(lambda: len(waits) == 5)
    assert waits[-1] == 0.2


async def test_a_command_that_has_ended_ends_the_quiet_for_what_it_was_refused(machine: Machine) -> None:
    node = machine.client.node
    never = asyncio.Event()

    async def sleep(duration_s: float) -> None:
        if duration_s > 1:
            await never.wait()

    denials = Denials(node.registry, node.journal, node.clock, node._tasks, sleep)
    id = await machine.create()

    async def are_told(*hosts: str) -> bool:
        told = await machine.events(EventKind.EGRESS_DENIED)
        return [one.host for event in told for one in event.denied] == list(hosts)

    denials.note(refused(id, "a.example"))
    await eventually(lambda: are_told("a.example"))
    denials.note(refused(id, "b.example"))
    denials.tell_soon(id)
    await eventually(lambda: are_told("a.example", "b.example"))
    denials.note(refused(id, "late.example"))  # of the same command, and heard of after its end
    await eventually(lambda: are_told("a.example", "b.example", "late.example"))


async def test_the_end_of_an_exec_lets_refusals_be_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(machine.client.node._services.egress, "tell_soon", told.append)
    id = await machine.create()
    await start(machine.client, id, "true")

    assert id in told


# ---- machines, which run from the start --------------------------------------------------------------


class EagerBackend(DrowsyBackend):
    """What it makes may run on where it was as soon as it is there."""

    def __init__(self, host: FakeHost) -> None:
        super().__init__(host)
        self.began_with: list[list[str]] = []  # what was attached when it did

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> Instance:
        made = await super().create(instance, intend=intend, deadline_s=deadline_s)
        assert isinstance(made, FakeInstance)
        try:
            if instance.attach is not None:
                await instance.attach(made.network_place)
        except BaseException:
            await made.destroy()
            raise
        self.began_with.append(sorted(self.host.egress))
        return made


async def test_a_machine_is_attached_before_it_runs(tmp_path: Path) -> None:
    host = FakeHost()
    backend = EagerBackend(host)
    machine = Machine(tmp_path, host, backend)
    await machine.start()
    try:
        some = await machine.create()
        await create(machine.client)
        assert backend.began_with == [[some], [some]]

        with Faults(1, prefix="fake.egress.attach"), pytest.raises(LaunchError, match="no way out") as caught:
            await machine.create()
        assert (caught.value.step, caught.value.outcome) == ("network", Outcome.GONE)
        assert len(backend.began_with) == 2
        await eventually(lambda: set(host.egress) == {some})
    finally:
        await machine.client.node.close()


# ---- machines that sleep -----------------------------------------------------------------------------


@asynccontextmanager
async def sleeper(directory: Path) -> AsyncIterator[tuple[Machine, DrowsyBackend, str]]:
    """One that has gone to the disk."""
    host = FakeHost()
    backend = DrowsyBackend(host)
    machine = Machine(directory, host, backend)
    await machine.start()
    try:
        id = await machine.create()
        await machine.client.call(Method.PAUSE, records.PauseRequest(id, deep=True), records.Sandbox)
        assert backend.asleep == {id}
        yield machine, backend, id
    finally:
        await machine.client.node.close()


async def test_what_sleeps_is_attached_by_its_newest_rules_before_it_goes_on(tmp_path: Path) -> None:
    async with sleeper(tmp_path) as (machine, backend, id):
        machine.host.egress.clear()  # its process has ended

        assert (await machine.set(id, ["b.example"])).egress == ["b.example"]
        assert machine.host.egress == {}, "there is nothing that could be attached"
        assert (await start(machine.client, id, "echo", "back")).out == b"back\n"
        assert not backend.asleep
        assert machine.reached(id) == ["b.example"]


async def test_what_cannot_be_attached_sleeps_on(tmp_path: Path) -> None:
    async with sleeper(tmp_path) as (machine, backend, id):
        machine.host.egress.clear()
        with Faults(1, prefix="fake.egress.attach"), pytest.raises(UnavailableError):
            await machine.client.call(Method.RESUME, records.SandboxRef(id), records.Sandbox)

        assert backend.asleep == {id}
        assert (await get(machine.client, id)).state == "paused"
        await machine.client.call(Method.RESUME, records.SandboxRef(id), records.Sandbox)
        assert machine.reached(id) == ["a.example"]


async def test_a_node_that_starts_lets_sleepers_be(tmp_path: Path) -> None:
    async with sleeper(tmp_path) as (machine, _, id):
        machine.host.egress.clear()
        await machine.restarted()
        other = await machine.create(["c.example"])

        assert (await get(machine.client, id)).asleep
        assert machine.host.egress.keys() == {other}
        assert (await start(machine.client, id, "echo", "back")).out == b"back\n"
        assert machine.reached(id) == ["a.example"]
