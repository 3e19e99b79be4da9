"""What a cgroup is told when its processes' memory is in swap, and an instance that gives its memory back."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from dsec.backends import pausedmemory
from dsec.backends.pausedmemory import PausedMemory
from dsec.core.errors import HostError
from dsec.core.limits import MIB
from dsec.density import swapping
from dsec.density.pagein import Part
from dsec.density.pageout import PagedOut
from dsec.density.swapping import CgroupMemory, processes_below
from dsec.testing.waiting import eventually


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    for name, text in (("current", f"{100 * MIB}"), ("stat", f"anon {90 * MIB}"), ("swap.max", "0"), ("reclaim", "")):
        (tmp_path / f"memory.{name}").write_text(text)
    return tmp_path


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    for name, text in (("stat", "writeback 0"), ("swappiness", "60\n"), ("force_empty", "")):
        (tmp_path / f"memory.{name}").write_text(text)
    return tmp_path


def test_a_controller_is_where_its_directory_is(v2: Path) -> None:
    assert CgroupMemory.of(str(v2), {"memory": "/v1"}) == CgroupMemory(None, Path("/v1"))
    assert CgroupMemory.of(str(v2), {}) == CgroupMemory(v2, None)
    (v2 / "memory.current").unlink()
    assert CgroupMemory.of(str(v2), {}) == CgroupMemory(None, None)


def test_version_2_has_swap_for_as_long_as_it_is_told(v2: Path) -> None:
    memory = CgroupMemory(v2, None)
    memory.allow_swap(True)
    assert (v2 / "memory.swap.max").read_text() == "max"
    memory.allow_swap(False)
    assert (v2 / "memory.swap.max").read_text() == "0"


def test_version_2_gives_piece_by_piece_until_no_more_goes(v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reclaim(file: Path, text: str) -> int:
        asked.append(text)
        if "swappiness" in text:
            return errno.EINVAL  # a kernel that does not know it
        left = 90 * MIB - 40 * MIB * (len(asked) // 2) if len(asked) < 5 else 10 * MIB
        (v2 / "memory.stat").write_text(f"anon {left}")
        (v2 / "memory.current").write_text(f"{left + 10 * MIB}")
        return errno.EAGAIN

    monkeypatch.setattr(swapping, "_written", reclaim)
    CgroupMemory(v2, None).push_out(threading.Event())

    assert asked == [
        *(f"{64 * MIB} swappiness=200", f"{64 * MIB}"),
        *(f"{50 * MIB} swappiness=200", f"{50 * MIB}"),
        *(f"{10 * MIB} swappiness=200", f"{10 * MIB}"),  # nothing has gone: enough
    ]


def test_version_2_is_asked_for_nothing_when_nothing_is_left(v2: Path) -> None:
    (v2 / "memory.stat").write_text(f"anon {MIB - 1}\nfile {50 * MIB}")
    CgroupMemory(v2, None).push_out(threading.Event())

    assert (v2 / "memory.reclaim").read_text() == ""


def test_version_1_is_emptied_without_pages_of_files(v1: Path) -> None:
    CgroupMemory(None, v1).push_out(threading.Event())

    assert (v1 / "memory.force_empty").read_text() == "1\n"
    assert (v1 / "memory.swappiness").read_text() == "60"


async def test_whoever_is_to_run_again_ends_it(v1: Path) -> None:
    (v1 / "memory.force_empty").unlink()
    os.mkfifo(v1 / "memory.force_empty")  # it would take for ever
    stop = threading.Event()
    work = asyncio.create_task(asyncio.to_thread(CgroupMemory(None, v1).push_out, stop))
    await eventually(lambda: (v1 / "memory.swappiness").read_text() == "200")

    stop.set()
    async with asyncio.timeout(60):
        await work

    assert (v1 / "memory.swappiness").read_text() == "60"


def test_what_is_on_its_way_to_swap_is_waited_for(v1: Path) -> None:
    (v1 / "memory.stat").write_text("writeback 4096")
    stop = threading.Event()
    written = threading.Timer(0.1, lambda: (v1 / "memory.stat").write_text("writeback 0"))
    written.start()
    CgroupMemory(None, v1).push_out(stop)
    written.join()

    assert (v1 / "memory.force_empty").read_text() == "1\n"


def test_processes_are_those_of_a_cgroup_and_of_all_below(tmp_path: Path) -> None:
    for place, pids in (("", ""), ("work", "7\n8\n"), ("agent", "9\n"), ("work/below", "10\n")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "cgroup.procs").write_text(pids)

    assert sorted(processes_below(tmp_path)) == [7, 8, 9, 10]
    assert list(processes_below(tmp_path / "gone")) == []


# ---- one instance ------------------------------------------------------------------------------------


class Kernel:
    def __init__(self, gone: set[int]) -> None:
        self.gone = gone
        self.paged: list[int] = []

    def page_out(self, pid: int, stop: threading.Event) -> PagedOut:
        if pid in self.gone:
            raise HostError(f"{pid} has ended")
        self.paged.append(pid)
        return PagedOut(MIB, 0, MIB)


def paused(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, counted: CgroupMemory) -> PausedMemory:
    monkeypatch.setattr(pausedmemory, "page_out", kernel.page_out)
    monkeypatch.setattr(pausedmemory, "has_swap", lambda: True)
    return PausedMemory("sbx_test", lambda: (1, 2, 3), counted)


async def test_all_processes_go_but_one_that_has_ended_and_going_on_ends_the_swap(
    v2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel({2})
    memory = paused(monkeypatch, kernel, CgroupMemory(v2, None))

    assert memory.give_back()
    await eventually(lambda: (v2 / "memory.reclaim").read_text())
    assert (kernel.paged, memory.given_back) == ([1, 3], True)
    assert (v2 / "memory.swap.max").read_text() == "max"

    await memory.keep()
    assert not memory.given_back
    assert (v2 / "memory.swap.max").read_text() == "0"


async def test_an_instance_that_has_ended_is_no_failure(v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = paused(monkeypatch, Kernel({1, 2, 3}), CgroupMemory(v2, None))

    assert memory.give_back()
    await memory.keep()

    assert (v2 / "memory.reclaim").read_text() == ""


async def test_without_swap_nothing_is_given(v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = paused(monkeypatch, Kernel(set()), CgroupMemory(v2, None))
    monkeypatch.setattr(pausedmemory, "has_swap", lambda: False)

    assert not memory.give_back()
    assert not memory.given_back
    await memory.keep()


async def test_one_whose_turn_has_not_come_goes_on_at_once_and_keeps_all(
    v2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few give at once, and none for longer than it may."""
    begun, over = threading.Semaphore(0), threading.Event()

    def busy(_: int, stop: threading.Event) -> PagedOut:
        begun.release()
        over.wait(60)
        return PagedOut(MIB, 0, MIB)

    memories = [paused(monkeypatch, Kernel(set()), CgroupMemory(v2, None)) for _ in range(3)]
    monkeypatch.setattr(pausedmemory, "page_out", busy)
    try:
        for memory in memories:
            assert memory.give_back()
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)

        async with asyncio.timeout(60):
            await memories[2].keep()
        assert not over.is_set()
    finally:
        over.set()
        await asyncio.gather(*(memory.keep() for memory in memories))


async def test_one_that_takes_too_long_keeps_the_rest(v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: int, stop: threading.Event) -> PagedOut:
        stop.wait(60)
        return PagedOut(MIB, MIB, 0)

    memory = paused(monkeypatch, Kernel(set()), CgroupMemory(v2, None))
    monkeypatch.setattr(pausedmemory, "page_out", endless)
    monkeypatch.setattr(pausedmemory, "_GIVE_S", 0.01)
    assert memory.give_back()
    assert memory._job is not None
    await eventually(memory._job.done)

    assert (v2 / "memory.reclaim").read_text() == "", "what is left is left"
    await memory.keep()


# ---- and has it again ----------------------------------------------------------------------------------


PART = Part(0x1000, 0x2000, of_file=False)


class Ahead:
    """What is read ahead, as it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: dict[int, tuple[Part, ...]]) -> None:
        self.asked: list[tuple[int, tuple[Part, ...], bool]] = []
        self.enough: list[threading.Event] = []
        monkeypatch.setattr(pausedmemory, "page_out", lambda pid, _: PagedOut(MIB, 0, MIB, used.get(pid, ())))
        monkeypatch.setattr(pausedmemory, "page_in", self._page_in)
        monkeypatch.setattr(pausedmemory, "has_swap", lambda: True)

    def _page_in(self, pid: int, parts: tuple[Part, ...], stop: threading.Event, *, touch: bool) -> None:
        self.asked.append((pid, parts, touch))
        self.enough.append(stop)


async def given(memory: PausedMemory, v1: Path) -> None:
    """Once all of it has gone."""
    assert memory.give_back()
    await eventually(lambda: (v1 / "memory.force_empty").read_text() == "1\n")
    await eventually(lambda: memory._work is not None and memory._work.done())


async def test_what_was_used_the_last_time_is_read_ahead_once(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead(monkeypatch, {2: (PART,)})
    memory = PausedMemory("sbx_test", lambda: (1, 2), CgroupMemory(None, v1), monitor=True)
    await given(memory, v1)

    await memory.come_back()
    await eventually(lambda: ahead.asked == [(2, (PART,), True)])
    await memory.come_back()  # nothing has gone since

    assert memory.give_back()  # it stands still again: whoever reads ahead ends
    assert ahead.enough[0].is_set()
    await memory.keep()
    assert len(ahead.asked) == 1


async def test_nothing_is_read_ahead_of_who_ends_or_has_ended(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead(monkeypatch, {1: (PART,), 2: (PART,)})
    alive = [1, 2]
    memory = PausedMemory("sbx_test", lambda: tuple(alive), CgroupMemory(None, v1))
    await given(memory, v1)
    await memory.keep()  # as before its end
    assert ahead.asked == []

    alive.remove(1)
    await memory.come_back()
    await eventually(lambda: ahead.asked == [(2, (PART,), False)])


async def test_very_many_parts_are_not_kept(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausedmemory, "_AHEAD_PARTS_MAX", 1)
    ahead = Ahead(monkeypatch, {1: (PART,), 2: (PART, PART)})
    memory = PausedMemory("sbx_test", lambda: (1, 2), CgroupMemory(None, v1))
    await given(memory, v1)

    await memory.come_back()
    await eventually(lambda: ahead.asked == [(1, (PART,), False)])
