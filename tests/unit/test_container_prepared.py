"""Containers that are made ahead: when, for what, and what becomes of those that nobody takes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dsec.backends.container import prepared as prepared_module
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.launcher import Launcher, LauncherRefusal
from dsec.backends.container.plan import under_names
from dsec.backends.container.prepared import PreparedContainers
from dsec.core.errors import CapacityError, InvalidArgumentError, UnavailableError
from dsec.security.idranges import IdRanges
from dsec.testing.waiting import eventually
from dsec.wire.codec import pack
from dsec.wire.launch import LaunchFailure, LaunchOp, LaunchPlan

PLAN = LaunchPlan(
    sandbox="sbx_asked",
    id_base=0,
    lowers=["layer"],
    directory="/state/sbx_asked",
    socket="/run/sbx_asked.sock",
    hostname="asked",
    env={b"SECRET": b"x"},
    user="somebody",
    workdir=b"/tmp",
    cgroup2="/cg2/node/sbx_asked",
    cgroup2_files={"pids.max": "7"},
    cgroup1={"cpu": "/cg1/node/sbx_asked"},
    cgroup1_files={"cpu": {"cpu.cfs_quota_us": "1"}},
)


@dataclass
class FakeLauncher:
    asked: list[tuple[LaunchOp, Any]] = field(default_factory=list)
    failure: Exception | None = None
    connection: int = 1
    is_connected: bool = True

    async def request(self, op: LaunchOp, args: Any, answer: object, *, timeout_s: float = 0) -> None:
        self.asked.append((op, args))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure

    def of(self, op: LaunchOp) -> list[Any]:
        return [args for asked, args in self.asked if asked is op]


@dataclass
class FakeIds:
    free: list[int] = field(default_factory=lambda: list(range(1, 50)))

    def take(self, holder: str) -> int:
        if not self.free:
            raise CapacityError("all are held")
        return self.free.pop(0)

    def give_back(self, base: int) -> None:
        assert base not in self.free
        self.free.append(base)


@dataclass
class Pool:
    wanted: int = 2
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    ids: FakeIds = field(default_factory=FakeIds)
    number: int = 0

    def __post_init__(self) -> None:
        self.prepared = PreparedContainers(
            self.wanted,
            named=self._named,
            ids=cast(IdRanges, self.ids),
            launcher=cast(Launcher, self.launcher),
            boot_id="boot",
        )
        self.prepared.is_known = True

    def _named(self, plan: LaunchPlan) -> LaunchPlan:
        self.number += 1
        config = ContainerConfig(run_dir=Path("/run"), state_dir=Path("/state"))
        return under_names(plan, config, f"sbx_{self.number}")

    def create(self, plan: LaunchPlan = PLAN) -> LaunchPlan | None:
        self.prepared.begin()
        taken = self.prepared.take(plan)
        self.prepared.finish(plan)
        return taken

    async def settled(self) -> None:
        """Whatever was to be made is there, and whatever was to go has gone."""
        filling = self.prepared._filling
        if filling is not None:
            await asyncio.wait([filling])

    async def filled(self) -> None:
        await eventually(lambda: len(self.prepared) == self.wanted)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "_QUIET_S", 0.001)


async def test_the_first_create_finds_none_and_the_next_one_does() -> None:
    pool = Pool()
    assert pool.create() is None
    await pool.filled()

    taken = pool.create(msgspec.structs.replace(PLAN, cgroup2_files={"pids.max": "9"}))

    assert taken is not None
    assert (taken.sandbox, taken.named, taken.id_base) == ("sbx_1", "sbx_asked", 1)
    assert (taken.cgroup2, taken.cgroup1) == ("/cg2/node/sbx_1", {"cpu": "/cg1/node/sbx_1"})
    assert (taken.directory, taken.socket) == ("/state/sandboxes/sbx_1", "/run/sb/sbx_1.sock")
    assert (taken.env, taken.lowers, taken.cgroup2_files) == (PLAN.env, PLAN.lowers, {"pids.max": "9"})
    await pool.prepared.close()


async def test_nothing_of_whoever_asked_last_is_in_what_is_made() -> None:
    pool = Pool()
    pool.create()
    await pool.filled()

    for made in pool.launcher.of(LaunchOp.PREPARE):
        assert (made.env, made.user, made.workdir, made.lowers, made.named) == ({}, None, None, [], "")
        assert b"SECRET" not in pack(made)
        assert b"asked" not in pack(made)
    await pool.prepared.close()


async def test_what_does_not_serve_is_removed_and_its_ids_are_free_again() -> None:
    pool = Pool(wanted=1)
    pool.create()
    await pool.filled()

    assert pool.create(msgspec.structs.replace(PLAN, shm_bytes=1 << 20)) is None

    await eventually(lambda: len(pool.launcher.of(LaunchOp.PREPARE)) == 2)
    assert [args.sandbox for args in pool.launcher.of(LaunchOp.DESTROY)] == ["sbx_1"]
    assert pool.launcher.of(LaunchOp.PREPARE)[-1].shm_bytes == 1 << 20
    await eventually(lambda: 1 in pool.ids.free)
    await pool.prepared.close()


def _shapes(count: int) -> list[LaunchPlan]:
    return [msgspec.structs.replace(PLAN, shm_bytes=(number + 1) << 20) for number in range(count)]


async def test_who_asks_for_two_shapes_in_turn_finds_both() -> None:
    pool = Pool()
    shapes = _shapes(2)
    for shape in shapes:
        pool.create(shape)
        await pool.settled()

    for _ in range(10):
        for shape in shapes:
            taken = pool.create(shape)
            assert taken is not None
            assert taken.shm_bytes == shape.shm_bytes
            await pool.settled()

    # Two for the first that came, of which the other shape has taken the place of one.
    assert len(pool.launcher.of(LaunchOp.DESTROY)) == 1
    await pool.prepared.close()


async def test_for_ever_other_shapes_it_soon_stops_and_goes_on_with_what_is_of_use() -> None:
    pool = Pool()
    for shape in _shapes(40):
        assert pool.create(shape) is None
        await pool.settled()

    assert (len(pool.launcher.of(LaunchOp.PREPARE)), len(pool.launcher.of(LaunchOp.DESTROY))) == (6, 4)
    for _ in range(10):
        assert pool.create(pool.launcher.of(LaunchOp.PREPARE)[5]) is not None
        await pool.settled()
    await pool.prepared.close()


async def test_they_are_replaced_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "_UNUSED_S", 0.0)
    pool = Pool()

    for shape in _shapes(20):
        pool.create(shape)
        await pool.settled()

    assert len(pool.launcher.of(LaunchOp.DESTROY)) == 19
    await pool.prepared.close()


async def test_those_of_a_connection_that_is_gone_are_not_handed_out() -> None:
    pool = Pool()
    for change in ({"connection": 2}, {"is_connected": False}):
        pool.create()
        await pool.filled()
        for name, value in change.items():
            setattr(pool.launcher, name, value)
        assert pool.create() is None
        pool.launcher.is_connected = True
    await pool.prepared.close()
    assert sorted(pool.ids.free) == list(range(1, 50))


@pytest.mark.parametrize(
    "change",
    [
        {"light": True},
        {"upper_tmpfs_bytes": 1},
        {"upper_device": "/dev/x"},
        {"cgroup1_from": {"cpu": "/kept"}},
    ],
)
async def test_what_cannot_be_prepared_is_never_a_pattern(change: dict[str, Any]) -> None:
    pool = Pool(wanted=1)
    pool.create()
    await pool.filled()

    assert pool.create(msgspec.structs.replace(PLAN, **change)) is None

    await pool.filled()
    assert all(not getattr(plan, name) for plan in pool.launcher.of(LaunchOp.PREPARE) for name in change)
    await pool.prepared.close()


async def test_what_cannot_be_prepared_leaves_those_that_wait_for_the_next() -> None:
    pool = Pool()
    pool.create()
    await pool.filled()

    assert pool.create(msgspec.structs.replace(PLAN, light=True)) is None

    assert len(pool.prepared) == 2
    assert pool.create() is not None
    assert pool.launcher.of(LaunchOp.DESTROY) == []
    await pool.prepared.close()


async def test_a_launcher_of_before_is_not_asked_for_any() -> None:
    pool = Pool()
    pool.prepared.is_known = False
    pool.create()
    await asyncio.sleep(0.01)

    assert pool.create() is None
    assert pool.launcher.asked == []
    await pool.prepared.close()


async def test_they_give_way_to_who_finds_no_ids_and_do_not_take_them_again() -> None:
    pool = Pool(ids=FakeIds(free=[1, 2]))
    pool.create()
    await pool.filled()

    assert await pool.prepared.give_way()

    assert sorted(pool.ids.free) == [1, 2]
    pool.create()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not await pool.prepared.give_way()
    assert len(pool.launcher.of(LaunchOp.PREPARE)) == 2
    await pool.prepared.close()


@pytest.mark.parametrize("change", [{"connection": 2}, {"is_connected": False}])
async def test_what_has_ended_with_its_launcher_has_none_started_for_its_removal(change: dict[str, Any]) -> None:
    pool = Pool()
    pool.create()
    await pool.filled()
    for name, value in change.items():
        setattr(pool.launcher, name, value)

    await pool.prepared.close()

    assert pool.launcher.of(LaunchOp.DESTROY) == []


async def test_none_is_made_while_a_create_is_under_way() -> None:
    pool = Pool()
    pool.create()
    pool.prepared.begin()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pool.launcher.asked == []

    pool.prepared.finish(PLAN)

    await pool.filled()
    await pool.prepared.close()


async def test_a_failure_is_not_tried_again_at_once_and_keeps_no_ids() -> None:
    for failure in (UnavailableError("gone"), LauncherRefusal("prepare", LaunchFailure("cgroups", "ENOSPC"))):
        pool = Pool(launcher=FakeLauncher(failure=failure))
        pool.create()
        await eventually(lambda pool=pool: pool.launcher.of(LaunchOp.DESTROY))
        pool.launcher.failure = None
        pool.create()
        for _ in range(50):
            await asyncio.sleep(0)

        assert len(pool.launcher.of(LaunchOp.PREPARE)) == 1
        await pool.prepared.close()


async def test_when_all_ids_are_held_none_is_made() -> None:
    pool = Pool(ids=FakeIds(free=[]))
    pool.create()
    await asyncio.sleep(0.01)

    assert pool.launcher.asked == []
    await pool.prepared.close()


async def test_none_is_left_when_it_is_closed_even_while_one_is_made() -> None:
    pool = Pool(wanted=3)
    pool.create()
    await eventually(lambda: pool.launcher.of(LaunchOp.PREPARE))

    await pool.prepared.close()

    assert len(pool.launcher.of(LaunchOp.DESTROY)) == len(pool.launcher.of(LaunchOp.PREPARE))
    assert sorted(pool.ids.free) == list(range(1, 50))


async def test_the_ids_of_one_that_resists_are_not_given_to_another() -> None:
    pool = Pool(wanted=1)
    pool.create()
    await pool.filled()
    pool.launcher.failure = UnavailableError("gone")

    await pool.prepared.close()

    assert 1 not in pool.ids.free


async def test_none_is_wanted_unless_asked_for() -> None:
    pool = Pool(wanted=0)
    assert pool.create() is None
    await asyncio.sleep(0.01)
    assert pool.launcher.asked == []
    with pytest.raises(InvalidArgumentError, match="prepared must be between"):
        ContainerConfig(run_dir=Path("/r"), state_dir=Path("/s"), prepared=17)
