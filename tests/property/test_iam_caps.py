"""Caps are never exceeded: by several replicas that lease at once, crash, are told nothing, whose clocks step."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.core.errors import QuotaError, UnavailableError
from dsec.core.limits import RATE_WINDOW_S, SLICE_GRACE_S, SLICE_TTL_S
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.iam.ledger import RATE, Ledger, LocalSlices, caps_of
from dsec.iam.projects import lineage
from dsec.iam.slices import Shared
from dsec.wire.iam import Caps, Quota, amounts_of

PROJECTS = ("/a", "/a/b", "/c")


@dataclass(eq=False)
class Create:
    project: str
    amounts: dict[str, int]
    admitted_at: float
    visible: bool = False
    over: bool = False  # it never came, or has ended


@dataclass
class Steps:
    """A replica's own clock: it began whenever, and the wall's steps."""

    world: World
    offset: float

    def wall_s(self) -> float:
        return self.world.draw.uniform(-1e6, 1e6)

    def monotonic_s(self) -> float:
        return self.world.now + self.offset


class SlowSlices(LocalSlices):
    """Others have their turns meanwhile."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw

    async def read(self, project: str) -> tuple[int, Shared]:
        await turns(self._draw)
        return await super().read(project)

    async def write(self, project: str, shared: Shared, *, expect: int) -> int | None:
        await turns(self._draw)
        done = await super().write(project, shared, expect=expect)
        await turns(self._draw)
        return done


async def turns(draw: random.Random) -> None:
    for _ in range(draw.randrange(4)):
        await asyncio.sleep(0)


@dataclass
class World:
    draw: random.Random
    quotas: dict[str, Quota]
    now: float = 0.0
    creates: list[Create] = field(default_factory=list)
    refused: int = 0
    admitted: int = 0

    def __post_init__(self) -> None:
        self.slices = SlowSlices(self.draw)
        self.replicas = [self.replica() for _ in range(self.draw.randint(1, 3))]
        self.tasks: dict[Ledger, set[asyncio.Task[None]]] = {}
        self.orphans: list[Create] = []

    def replica(self) -> Ledger:
        clock = Steps(self, self.draw.uniform(-1e6, 1e6))
        ledger = Ledger(self.slices, self.holdings, clock=clock, unknown_s=SLICE_GRACE_S)
        ledger._closed = True  # it is tended by the test, in the test's time
        return ledger

    async def holdings(self, projects: Sequence[str]) -> dict[str, dict[str, int]]:
        await turns(self.draw)
        found = {path: self.held(path, visible=True) for path in projects}
        await turns(self.draw)
        return {path: dict(held) for path, held in found.items()}

    def held(self, path: str, *, visible: bool = False) -> Counter[str]:
        total: Counter[str] = Counter()
        for create in self.creates:
            if not create.over and path in lineage(create.project) and (create.visible or not visible):
                total.update(create.amounts)
        return total

    def check(self) -> None:
        for path, quota in self.quotas.items():
            held = self.held(path)
            recent = [
                c for c in self.creates if path in lineage(c.project) and c.admitted_at > self.now - RATE_WINDOW_S
            ]
            held[RATE] = len(recent)
            for cap, limit in caps_of(quota).items():
                assert held[cap] <= limit, f"{path} has {held[cap]} of {limit} {cap}"

    # -- what happens ------------------------------------------------------------------------------

    async def create(self, ledger: Ledger) -> None:
        project = self.draw.choice(PROJECTS)
        spec = SandboxSpec(
            environment=Environment("base"),
            substrate=self.draw.choice((Substrate.CONTAINER, Substrate.FAKE)),
            cpu=self.draw.choice((0.5, 1.0, 2.0)),
            memory_bytes=self.draw.choice((1, 4)) << 30,
            disk_bytes=1 << 30,
        )
        rules = [(path, self.quotas[path]) for path in lineage(project) if path in self.quotas]
        try:
            charge = await ledger.take(rules, spec)
        except (QuotaError, UnavailableError):
            self.refused += 1
            return
        create = Create(project, amounts_of(spec), self.now)
        self.creates.append(create)
        self.admitted += 1
        self.check()
        try:
            for _ in range(self.draw.randrange(20)):
                await asyncio.sleep(0)
            create.visible = True
            for _ in range(self.draw.choice((0, 0, 1, 30))):
                await asyncio.sleep(0)
            how = self.draw.random()
            if how < 0.2:
                create.over = True
            if how < 0.9:
                charge.settle()
            else:
                charge.leave()
        except asyncio.CancelledError:
            if not create.visible:
                self.orphans.append(create)
            raise

    def step(self) -> None:
        match self.draw.choice(("create",) * 12 + ("end",) * 5 + ("tend", "time", "time", "crash")):
            case "create":
                ledger = self.draw.choice(self.replicas)
                for _ in range(self.draw.choice((1, 1, 5))):
                    self.spawn(ledger, self.create(ledger))
            case "end":
                live = [create for create in self.creates if create.visible and not create.over]
                for create in self.draw.sample(live, min(len(live), 3)):
                    create.over = True
            case "tend":
                for ledger in self.replicas:
                    self.spawn(ledger, ledger.tend())
            case "time":
                self.pass_time(self.draw.choice((0.3, 1.1, SLICE_TTL_S / 3)))
            case "crash":
                place = self.draw.randrange(len(self.replicas))
                for task in self.tasks.pop(self.replicas[place], set()):
                    task.cancel()
                self.replicas[place] = self.replica()

    def pass_time(self, seconds: float) -> None:
        """Replicas that live show it in time, and what they had sent arrives in time, or never."""
        self.now += seconds
        for create in self.orphans:
            if create.admitted_at < self.now - SLICE_GRACE_S / 2:
                create.visible, create.over = True, self.draw.random() < 0.5
        self.orphans = [create for create in self.orphans if not create.visible]
        for ledger in self.replicas:
            self.spawn(ledger, ledger.tend())

    def spawn(self, ledger: Ledger, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self.tasks.setdefault(ledger, set()).add(task)

    async def settle(self) -> None:
        for tasks in list(self.tasks.values()):
            await asyncio.gather(*tasks)
            tasks.clear()


QUOTAS = (
    {
        "/": Quota(sandboxes=7),
        "/a": Quota(sandboxes=4, cpu=5),
        "/a/b": Quota(substrates={Substrate.FAKE: Caps(sandboxes=1)}),
    },
    {"/": Quota(sandboxes=500, memory_bytes=900 << 30), "/a": Quota(sandboxes=300)},
    {"/": Quota(creates_per_s=6, sandboxes=40), "/c": Quota(creates_per_s=1)},
    {"/": Quota(creates_per_s=300), "/a": Quota(disk_bytes=3 << 30, substrates={Substrate.CONTAINER: Caps(cpu=2)})},
)  # fmt: skip


async def live_through(draw: random.Random, steps: int) -> World:
    world = World(draw, draw.choice(QUOTAS))
    for _ in range(steps):
        world.step()
        for _ in range(draw.randrange(12)):
            await asyncio.sleep(0)
    await world.settle()
    world.check()
    return world


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(5, 120))
def test_no_history_exceeds_a_cap(seed: int, steps: int) -> None:
    asyncio.run(live_through(random.Random(seed), steps))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(50, 600))
def test_no_long_history_does_either(seed: int, steps: int) -> None:
    asyncio.run(live_through(random.Random(seed), steps))


async def filled(world: World, ledger: Ledger, count: int) -> int:
    before = world.admitted
    for _ in range(count):
        await world.create(ledger)
    return world.admitted - before


class Even(random.Random):
    """Everything succeeds, at once."""

    def random(self) -> float:
        return 0.5

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 0


async def test_what_is_left_of_a_cap_can_be_used_whoever_asks() -> None:
    world = World(Even(), {"/": Quota(sandboxes=10)})
    one, two = world.replica(), world.replica()

    assert await filled(world, one, 4) == 4
    await one.tend()
    assert await filled(world, two, 10) == 6
    world.creates[0].over = True
    await two.tend()
    assert await filled(world, one, 3) == 1


class Hooked(LocalSlices):
    """Something happens while a record is written."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    async def write(self, project: str, shared: Shared, *, expect: int) -> int | None:
        self.meanwhile()
        return await super().write(project, shared, expect=expect)

    async def write_anyway(self, project: str, shared: Shared) -> None:
        revision, _ = await self.read(project)
        await super().write(project, shared, expect=revision)


@pytest.mark.parametrize("shrinking", [False, True])
async def test_what_is_settled_while_the_record_is_written_is_not_had_twice(shrinking: bool) -> None:
    live: list[str] = []

    async def holdings(projects: Sequence[str]) -> dict[str, dict[str, int]]:
        return {path: {"sandboxes": len(live)} for path in projects}

    slices = Hooked()
    ledger = Ledger(slices, holdings)
    rules, spec = [("/", Quota(sandboxes=2))], SandboxSpec(environment=Environment("base"))
    first = await ledger.take(rules, spec)
    if shrinking:
        done = await ledger.take(rules, spec)
        live.append("one that has ended since")
        done.settle()
        live.clear()

    def meanwhile() -> None:
        slices.meanwhile = lambda: None
        live.append("the first")
        first.settle()

    slices.meanwhile = meanwhile
    if shrinking:
        await ledger.tend()
    (await ledger.take(rules, spec)).settle()
    live.append("the second")

    with pytest.raises(QuotaError):
        await ledger.take(rules, spec)
    await ledger.close()


async def test_after_a_write_whose_outcome_nobody_knows_nothing_is_used_of_what_was_leased() -> None:
    async def holdings(projects: Sequence[str]) -> dict[str, dict[str, int]]:
        return {path: {} for path in projects}

    slices = Hooked()
    one, other = Ledger(slices, holdings), Ledger(slices, holdings)
    rules, spec = [("/", Quota(sandboxes=300))], SandboxSpec(environment=Environment("base"))
    (await one.take(rules, spec)).settle()

    def lost() -> None:
        raise UnavailableError("nobody knows")

    slices.meanwhile = lost
    with pytest.raises(UnavailableError):
        await one.tend()
    await slices.write_anyway("/", Shared())
    slices.meanwhile = lambda: None
    for _ in range(300):
        await other.take(rules, spec)

    with pytest.raises(QuotaError):
        await one.take(rules, spec)
    for ledger in (one, other):
        await ledger.close()


async def test_what_a_replica_that_crashed_had_leased_comes_back() -> None:
    world = World(Even(), {"/": Quota(sandboxes=400)})
    dead, alive = world.replica(), world.replica()
    await filled(world, dead, 1)
    (_, shared) = await world.slices.read("/")
    assert next(iter(shared.slices.values())).amounts["sandboxes"] == 4  # one part in a hundred

    assert await filled(world, alive, 400) == 395  # of the other's one lives, and four are in its slice
    world.now += SLICE_TTL_S + SLICE_GRACE_S + 1
    assert await filled(world, alive, 6) == 4


async def test_a_cap_on_creations_a_second_lets_as_many_through_the_next_second() -> None:
    world = World(Even(), {"/": Quota(creates_per_s=5)})
    ledger = world.replica()

    rules = list(world.quotas.items())

    async def reserved() -> float:
        return sum(use.reserved for use in await ledger.uses(rules))

    assert await filled(world, ledger, 20) == 5
    assert await reserved() == 5
    world.now += RATE_WINDOW_S + 0.01
    assert await reserved() == 0, "those of the second before are told as used"
    assert await filled(world, ledger, 20) == 5


async def test_a_refusal_says_which_cap_of_which_project_and_what_is_used_of_it() -> None:
    world = World(Even(), {"/": Quota(sandboxes=100), "/a": Quota(cpu=1.5)})
    ledger = world.replica()
    spec = SandboxSpec(environment=Environment("base"), cpu=1.0)
    rules = list(world.quotas.items())
    charge = await ledger.take(rules, spec)
    world.creates.append(Create("/a", amounts_of(spec), 0.0, visible=True))
    charge.settle()

    with pytest.raises(QuotaError) as refused:
        await ledger.take(rules, spec)

    assert refused.value.detail == {
        "project": "/a", "cap": "cpu", "limit": 1.5, "used": 1.0, "reserved": 0.0, "asked": 1.0,
    }  # fmt: skip
    assert refused.value.retry_after_s is None
    uses = {(use.project, use.cap): (use.used, use.limit, use.reserved) for use in await ledger.uses(rules)}
    assert uses == {("/", "sandboxes"): (1, 100, 0), ("/a", "cpu"): (1.0, 1.5, 0)}
