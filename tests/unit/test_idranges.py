"""Ranges of host ids: never two holders of one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, HostError
from dsec.security import idranges
from dsec.security.idranges import FIRST_ID, IDS_PER_RANGE, SLOTS, STRIDE, IdRanges
from dsec.testing.faults import Faults


@pytest.fixture
def ranges(tmp_path: Path) -> Iterator[IdRanges]:
    opened = IdRanges(tmp_path / "ids", subid_files=())
    opened.open()
    yield opened
    opened.close()


def test_each_lease_is_a_range_of_its_own(ranges: IdRanges) -> None:
    bases = sorted(ranges.take("") for _ in range(100))

    assert bases[0] >= FIRST_ID
    assert all(low + IDS_PER_RANGE <= high for low, high in pairwise(bases))
    assert FIRST_ID + SLOTS * STRIDE <= 0x8000_0000


def test_the_kernel_finds_the_user_of_a_sandbox_among_few(ranges: IdRanges) -> None:
    """By the low seven bits of id + id / 128: with all in one chain each setuid(2) is as slow as there are many."""
    bases = [ranges.take("") for _ in range(512)]

    for inner in (0, IDS_PER_RANGE - 1):
        chains = Counter((base + inner + ((base + inner) >> 7)) & 127 for base in bases)
        assert max(chains.values()) <= 2 * len(bases) // 128


def test_another_process_does_not_get_a_held_range(ranges: IdRanges, tmp_path: Path) -> None:
    mine = {ranges.take("") for _ in range(3)}
    program = (
        "import sys; from pathlib import Path; from dsec.security.idranges import IdRanges\n"
        "r = IdRanges(Path(sys.argv[1]), subid_files=()); r.open(); print(*[r.take('') for _ in range(3)])"
    )

    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ids")], capture_output=True, text=True, check=True, timeout=30
    )

    assert not mine & {int(base) for base in out.stdout.split()}


def test_a_range_whose_sandbox_outlives_its_node_is_not_given_to_another(tmp_path: Path) -> None:
    holder = tmp_path / "cgroup"
    holder.mkdir()
    first = IdRanges(tmp_path / "ids", subid_files=())
    first.open()
    base = first.take(str(holder))
    first.close()  # as a kill of the node does
    second = IdRanges(tmp_path / "ids", subid_files=())
    second.open()

    assert second.take("") != base
    second.retake(base)  # the node that adopts it may
    second.close()


def test_a_range_whose_sandbox_has_gone_too_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idranges, "SLOTS", 1)
    first = IdRanges(tmp_path / "ids", subid_files=())
    first.open()
    base = first.take(str(tmp_path / "never-made"))
    first.close()
    second = IdRanges(tmp_path / "ids", subid_files=())
    second.open()

    assert second.take("") == base
    second.close()


def test_a_range_held_by_another_daemon_cannot_be_retaken(ranges: IdRanges, tmp_path: Path) -> None:
    base = ranges.take("")
    other = IdRanges(tmp_path / "ids", subid_files=())
    other.open()

    with pytest.raises(HostError, match="held by another node"):
        other.retake(base)
    other.close()


def test_when_all_are_held_the_error_says_so_and_giving_back_helps(
    ranges: IdRanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idranges, "SLOTS", 2)
    first, _ = ranges.take(""), ranges.take("")

    with pytest.raises(CapacityError) as caught:
        ranges.take("")
    ranges.give_back(first)
    ranges.give_back(first)

    assert caught.value.retry_after_s
    assert ranges.take("") == first


def test_a_range_of_before_is_adopted_and_overlaps_no_other(ranges: IdRanges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idranges, "SLOTS", 8)
    old = [FIRST_ID + slot * IDS_PER_RANGE for slot in (3, 4)]  # as they were when all began at multiples
    for base in old:
        ranges.retake(base)
    ranges.give_back(old[0])

    taken = [ranges.take("") for _ in range(5)]

    assert all(abs(base - held) >= IDS_PER_RANGE for base in taken for held in old)
    with pytest.raises(CapacityError):
        ranges.take("")
    with pytest.raises(HostError):
        ranges.retake(FIRST_ID - 1)


def test_ranges_that_subuid_gives_to_a_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idranges, "SLOTS", 4)
    subuid = tmp_path / "subuid"
    subuid.write_text(f"someone:{FIRST_ID + STRIDE - 1}:2\nbroken line\nother:x:y\n")
    ranges = IdRanges(tmp_path / "ids", subid_files=(subuid, tmp_path / "absent"))
    ranges.open()

    assert {ranges.take(""), ranges.take("")} == {FIRST_ID + 2 * STRIDE, FIRST_ID + 3 * STRIDE}
    ranges.close()


def test_a_range_that_cannot_be_noted_is_free_again_and_the_error_says_where(
    ranges: IdRanges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idranges, "SLOTS", 1)
    with Faults(1, prefix="idranges.mark"), pytest.raises(HostError, match=str(tmp_path)):
        ranges.take("")

    assert ranges.take("") == FIRST_ID
