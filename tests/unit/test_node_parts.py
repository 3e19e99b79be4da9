"""The node's small pure parts: admission, timers, lifetime, cursors, the exec log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.backends.base import InstanceUsage
from dsec.core.errors import CapacityError, InvalidArgumentError, StorageError
from dsec.core.limits import GIB
from dsec.core.states import EndCause
from dsec.node.accounting import UsageMeter
from dsec.node.admission import Room, refusal
from dsec.node.execlog import ExecLog
from dsec.node.lifetime import Lifetime
from dsec.node.rows import ExecDropEntry, ExecEndEntry, ExecStartEntry
from dsec.node.timers import Timers
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import FAKE_SPEC
from dsec.wire.agent import ExecEnd
from dsec.wire.cursors import Place, decode_cursor, encode_cursor

ROOM = Room(
    sandboxes=3,
    sandboxes_max=10,
    memory_promised_bytes=2 * GIB,
    memory_total_bytes=4 * GIB,
    memory_available_bytes=GIB,
    memory_available_bytes_min=0,
    memory_overcommit=1.0,
    disk_free_bytes=20 * GIB,
    disk_free_bytes_min=1 * GIB,
)


def replaced(**changes: object) -> Room:
    return Room(**{**{name: getattr(ROOM, name) for name in Room.__slots__}, **changes})  # type: ignore[arg-type]


# ---- admission -----------------------------------------------------------------------------------


def test_what_fits_is_admitted() -> None:
    assert refusal(FAKE_SPEC, ROOM) is None


def test_memory_is_admitted_up_to_the_last_byte() -> None:
    left = ROOM.memory_total_bytes - ROOM.memory_promised_bytes

    assert refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=left), ROOM) is None
    assert refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=left + 1), ROOM) is not None


@pytest.mark.parametrize(
    "room",
    [
        replaced(sandboxes=10),
        replaced(memory_promised_bytes=4 * GIB),
        replaced(disk_free_bytes=GIB - 1),
        replaced(memory_available_bytes=GIB - 1, memory_available_bytes_min=GIB),
        replaced(closing=True),
    ],
    ids=["count", "memory", "disk", "memory left", "closing"],
)
def test_what_does_not_fit_is_refused_with_when_to_try_again(room: Room) -> None:
    refused = refusal(FAKE_SPEC, room)

    assert isinstance(refused, CapacityError)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 0


@pytest.mark.parametrize(("overcommit", "says"), [(200.0, "that the machine has"), (0.5, "memory_overcommit")])
def test_more_memory_than_one_could_ever_use_is_refused_for_good(overcommit: float, says: str) -> None:
    most = int(4 * GIB * min(overcommit, 1.0))
    room = replaced(memory_overcommit=overcommit, memory_promised_bytes=0)

    assert refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=most), room) is None
    refused = refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=most + 1), room)
    assert refused is not None
    assert says in f"{refused.message} {refused.hint}"
    assert (refused.retry_after_s, refused.detail) == (None, {"never": True})


def test_what_a_sandbox_has_by_default_is_promised_on_the_smallest_machine() -> None:
    small = replaced(memory_overcommit=200.0, memory_promised_bytes=0, memory_total_bytes=GIB // 2)

    assert refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=GIB), small) is None
    assert refusal(msgspec.structs.replace(FAKE_SPEC, memory_bytes=GIB + 1), small) is not None


def test_overcommit_multiplies_the_memory() -> None:
    full = replaced(memory_promised_bytes=4 * GIB)

    assert refusal(FAKE_SPEC, full) is not None
    assert refusal(FAKE_SPEC, replaced(memory_promised_bytes=4 * GIB, memory_overcommit=2.0)) is None


# ---- timers --------------------------------------------------------------------------------------


def test_timers_come_due_in_order_and_once() -> None:
    timers = Timers()
    timers.schedule("b", 2.0)
    timers.schedule("a", 1.0)
    timers.schedule("c", 3.0)

    assert timers.due(2.5) == ["a", "b"]
    assert timers.due(2.5) == []
    assert timers.next_at() == 3.0


def test_a_sooner_moment_replaces_a_later_one_and_not_the_other_way() -> None:
    timers = Timers()

    assert timers.schedule("a", 5.0)
    assert not timers.schedule("a", 9.0)
    assert timers.schedule("a", 1.0)
    assert timers.due(10.0) == ["a"]
    assert len(timers) == 0


def test_rescheduling_often_does_not_grow_the_heap() -> None:
    timers = Timers()
    for i in range(10_000):
        timers.schedule("a", 100.0 + i)

    assert len(timers._heap) == 1


def test_a_cancelled_timer_never_comes_due() -> None:
    timers = Timers()
    timers.schedule("a", 1.0)

    timers.cancel("a")

    assert timers.next_at() is None
    assert timers.due(10.0) == []


# ---- lifetime ------------------------------------------------------------------------------------


async def test_idle_counts_from_the_end_of_the_last_use() -> None:
    clock = ManualClock()
    lifetime = Lifetime(clock, running_left_s=None, ttl_idle_s=10.0)
    lifetime.begin()
    await clock.advance(100)
    assert lifetime.next_deadline() is None

    lifetime.finish()

    assert lifetime.next_deadline() == (clock.monotonic_s() + 10.0, EndCause.TTL_IDLE)


async def test_running_counts_from_the_start_whatever_is_done() -> None:
    clock = ManualClock()
    end = clock.monotonic_s() + 60.0
    lifetime = Lifetime(clock, running_left_s=60.0, ttl_idle_s=None)
    lifetime.begin()

    await clock.advance(10)

    assert lifetime.next_deadline() == (end, EndCause.TTL_RUNNING)
    assert lifetime.running_left_s == 50.0


async def test_both_clocks_stand_still_while_paused() -> None:
    clock = ManualClock()
    lifetime = Lifetime(clock, running_left_s=60.0, ttl_idle_s=20.0)
    await clock.advance(5)
    lifetime.pause()
    await clock.advance(1_000)
    assert lifetime.next_deadline() is None
    assert lifetime.running_left_s == 55.0

    assert lifetime.resume() == 1_000.0

    assert lifetime.next_deadline() == (clock.monotonic_s() + 15.0, EndCause.TTL_IDLE)
    assert lifetime.running_left_s == 55.0


async def test_a_step_of_the_wall_clock_ends_nothing() -> None:
    clock = ManualClock()
    lifetime = Lifetime(clock, running_left_s=60.0, ttl_idle_s=20.0)

    clock.step_wall(1_000_000.0)

    due = lifetime.next_deadline()
    assert due is not None
    assert due[0] > clock.monotonic_s()


# ---- accounting ----------------------------------------------------------------------------------


def test_memory_is_counted_over_time_and_cpu_never_falls() -> None:
    meter = UsageMeter(0.0)
    meter.sample(InstanceUsage(cpu_s=1.0, memory_bytes=GIB), 10.0)
    meter.sample(InstanceUsage(cpu_s=0.5, memory_bytes=3 * GIB), 20.0)

    assert meter.memory_gib_s == pytest.approx(10.0 + 20.0)
    assert meter.cpu_s == 1.0


def test_a_host_that_cannot_tell_adds_nothing() -> None:
    meter = UsageMeter(0.0)
    meter.sample(InstanceUsage(), 10.0)

    assert (meter.cpu_s, meter.memory_gib_s, meter.oom_kills) == (0.0, 0.0, 0)


# ---- cursors -------------------------------------------------------------------------------------


def test_a_cursor_survives_the_way_to_the_caller_and_back() -> None:
    place = Place(1795992953.6684124, "sbx_abcdefgh_abcdefghijklmnop")

    assert decode_cursor(encode_cursor(place)) == place


@pytest.mark.parametrize("text", ["", "x", "1.0:", ":sbx_abcdefgh_abcdefghijklmnop", "nan-ish:zzz", "1.0:../../etc"])
def test_a_cursor_that_is_none_is_a_typed_error(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        decode_cursor(text)


# ---- the exec log --------------------------------------------------------------------------------

START = ExecStartEntry(id="exe_a", command="true", request_hash=b"h", started_at=1.0)
END = ExecEndEntry(id="exe_a", ended_at=2.0, end=ExecEnd(status="exited", code=0), out=b"out", err=b"err")


def test_entries_are_read_back_with_their_positions(tmp_path: Path) -> None:
    log = ExecLog(tmp_path / "log")
    positions = [log.append(START), log.append(END), log.append(ExecDropEntry(id="exe_a"))]
    log.close()

    again = ExecLog(tmp_path / "log")
    found = again.load()

    assert found == list(zip(positions, [START, END, ExecDropEntry(id="exe_a")], strict=True))
    assert again.read_end(positions[1]) == END
    again.close()


def test_a_half_written_entry_is_cut_off_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = ExecLog(path)
    whole.append(START)
    size = whole.size
    whole.append(END)
    whole.close()
    for cut in range(size, path.stat().st_size):
        data = path.read_bytes()[:cut]
        damaged = tmp_path / "damaged"
        damaged.write_bytes(data)

        log = ExecLog(damaged)

        assert [entry for _, entry in log.load()] == [START]
        log.append(END)
        assert [entry for _, entry in log.load()] == [START, END]
        log.close()


def test_a_flipped_bit_ends_the_log_before_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ExecLog(path)
    log.append(START)
    log.append(END)
    log.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    assert [entry for _, entry in ExecLog(path).load()] == [START]


def test_rewriting_keeps_what_is_given_and_gives_new_positions(tmp_path: Path) -> None:
    log = ExecLog(tmp_path / "log")
    for _ in range(100):
        log.append(START)
    before = log.size

    positions = log.rewrite([START, END])

    assert log.size < before
    assert log.read_end(positions[1]) == END
    assert [entry for _, entry in log.load()] == [START, END]
    log.close()


def test_reading_an_end_where_there_is_none_is_a_typed_error(tmp_path: Path) -> None:
    log = ExecLog(tmp_path / "log")
    log.append(START)

    for position in (0, 3, 10_000):
        with pytest.raises(StorageError):
            log.read_end(position)
    log.close()
