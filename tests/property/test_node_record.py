"""The output record against a plain model: every byte is either kept as it was, or in a stated gap."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import StorageError
from dsec.node import record as record_module
from dsec.node import recordstore
from dsec.node.record import OutputRecord, plan_layout
from dsec.node.recordstore import ERR, OUT

BUDGETS = st.integers(0, 4_000)
WRITES = st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.integers(1, 900), st.integers(0, 40)), max_size=40)


class Model:
    """All bytes ever produced, and which of them were lost on the way."""

    def __init__(self) -> None:
        self.bytes = {OUT: bytearray(), ERR: bytearray()}
        self.lost: dict[int, set[int]] = {OUT: set(), ERR: set()}

    def produce(self, channel: int, size: int, lost: int) -> tuple[int, bytes]:
        data = self.bytes[channel]
        self.lost[channel].update(range(len(data), len(data) + lost))
        data += b"?" * lost
        offset = len(data)
        payload = bytes((offset + i + channel) % 251 for i in range(size))
        data += payload
        return offset, payload


def fill(record: OutputRecord, model: Model, writes: list[tuple[int, int, int]], *, holes: bool) -> None:
    for sequence, (channel, size, lost) in enumerate(writes):
        offset, payload = model.produce(channel, size, lost if holes and lost > 35 else 0)
        record.write(channel, offset, sequence, payload)


def check(record: OutputRecord, model: Model) -> None:
    for channel in (OUT, ERR):
        produced = model.bytes[channel]
        assert record.tracks[channel].produced == len(produced)
        kept: dict[int, int] = {}
        position = 0
        while (piece := record.read(channel, position, 300)) is not None:
            assert piece.offset >= position
            assert 0 < len(piece.payload) <= 300
            kept.update(zip(range(piece.offset, piece.offset + len(piece.payload)), piece.payload, strict=True))
            position = piece.offset + len(piece.payload)
        gone = {i for gap in record.gaps() if gap.channel == channel for i in range(gap.start, gap.end)}
        assert kept.keys() | gone == set(range(len(produced)))
        assert kept.keys() & gone == set()
        assert all(produced[i] == value for i, value in kept.items())
        assert model.lost[channel] <= gone


def check_head_and_tail(record: OutputRecord, model: Model, *, one_channel: bool) -> None:
    layout = plan_layout(record.budget, one_channel=one_channel)
    total = len(model.bytes[OUT]) + len(model.bytes[ERR])
    assert record.kept_bytes <= record.budget
    if total <= layout.head:
        assert record.gaps() == []
    for channel in (OUT, ERR):
        produced = len(model.bytes[channel])
        tail = min(produced, layout.ring(channel))
        gone = {i for gap in record.gaps() if gap.channel == channel for i in range(gap.start, gap.end)}
        assert gone.isdisjoint(range(produced - tail, produced)), "the tail is kept"


@given(budget=BUDGETS, writes=WRITES, one_channel=st.booleans())
def test_head_and_tail_are_kept_and_the_cut_is_stated(
    budget: int, writes: list[tuple[int, int, int]], one_channel: bool
) -> None:
    if one_channel:
        writes = [(OUT, size, lost) for _, size, lost in writes]
    model = Model()
    record = OutputRecord(budget, one_channel=one_channel, path=Path("unused"))

    fill(record, model, writes, holes=False)

    check(record, model)
    check_head_and_tail(record, model, one_channel=one_channel)


@given(budget=BUDGETS, writes=WRITES)
def test_bytes_that_were_lost_on_the_way_are_gaps(budget: int, writes: list[tuple[int, int, int]]) -> None:
    model = Model()
    record = OutputRecord(budget, one_channel=False, path=Path("unused"))

    fill(record, model, writes, holes=True)

    check(record, model)


@given(budget=BUDGETS, writes=WRITES, inline=st.integers(0, 2_000), holes=st.booleans())
def test_a_record_in_a_file_is_the_same_after_a_restart(
    budget: int, writes: list[tuple[int, int, int]], inline: int, holes: bool
) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory, small_inline(inline):
        path = Path(directory) / "exec.out"
        record = OutputRecord(budget, one_channel=False, path=path)
        fill(record, model, writes, holes=holes)
        if not record.in_file:
            return
        record.close()

        again = OutputRecord.load(path, budget=budget, one_channel=False)

        check_loaded(again, model, record)
        again.close()


@given(budget=st.integers(64, 4_000), writes=WRITES, more=WRITES)
def test_what_is_sent_again_after_a_restart_is_not_kept_twice(
    budget: int, writes: list[tuple[int, int, int]], more: list[tuple[int, int, int]]
) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory, small_inline(0):
        path = Path(directory) / "exec.out"
        record = OutputRecord(budget, one_channel=False, path=path)
        fill(record, model, [*writes, (OUT, 1, 0)], holes=False)
        record.close()
        again = OutputRecord.load(path, budget=budget, one_channel=False)

        for channel in (OUT, ERR):  # all that was produced comes once more, from the start
            again.write(channel, 0, 0, bytes(model.bytes[channel]))
        fill(again, model, more, holes=False)

        check(again, model)
        check_head_and_tail(again, model, one_channel=False)
        again.close()


@given(budget=st.integers(0, 300_000), sizes=st.lists(st.integers(1, 70_000), max_size=20))
def test_the_file_takes_no_more_room_than_the_budget(budget: int, sizes: list[int]) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory, small_inline(0):
        path = Path(directory) / "exec.out"
        record = OutputRecord(budget, one_channel=False, path=path)

        for sequence, size in enumerate(sizes):
            channel = (OUT, ERR)[sequence % 2]
            offset, payload = model.produce(channel, size, 0)
            record.write(channel, offset, sequence, payload)

        if path.exists():
            pages = 6 * 4096  # the header, and the half-filled last page of each part
            assert path.stat().st_blocks * 512 <= budget + pages
        record.close()


@given(writes=WRITES, out=st.integers(0, 3_000), err=st.integers(0, 3_000))
def test_a_reader_gets_everything_once_and_in_the_order_of_arrival(
    writes: list[tuple[int, int, int]], out: int, err: int
) -> None:
    model = Model()
    record = OutputRecord(1 << 20, one_channel=False, path=Path("unused"))
    fill(record, model, writes, holes=False)
    at = {OUT: min(out, len(model.bytes[OUT])), ERR: min(err, len(model.bytes[ERR]))}
    expected = {channel: bytes(model.bytes[channel][at[channel] :]) for channel in at}

    read = {OUT: b"", ERR: b""}
    sequences: list[int] = []
    while (chosen := record.choose(at[OUT], at[ERR])) is not None:
        piece = record.read(chosen[0], at[chosen[0]], min(chosen[1], 100))
        assert piece is not None
        read[piece.channel] += piece.payload
        at[piece.channel] += len(piece.payload)
        sequences.append(piece.sequence)

    assert read == expected
    assert sequences == sorted(sequences)


@given(cut=st.integers(0, 1 << 16), budget=st.integers(100, 2_000), writes=WRITES)
def test_a_damaged_file_is_refused_and_never_believed(
    cut: int, budget: int, writes: list[tuple[int, int, int]]
) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory, small_inline(0):
        path = Path(directory) / "exec.out"
        record = OutputRecord(budget, one_channel=False, path=path)
        fill(record, model, [*writes, (OUT, 1, 0)], holes=False)
        record.close()
        os.truncate(path, min(cut, 50))

        try:
            OutputRecord.load(path, budget=budget, one_channel=False)
        except StorageError:
            return
        raise AssertionError("half a header was believed")


class Killed(BaseException):
    """The process is gone: nothing that comes after it runs."""


class KilledAt:
    """Lets so many writes to the file happen, then half of one, and then none."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def write_at(self, file: int, data: bytes | memoryview, position: int) -> None:
        if self.left == 0:
            os.pwrite(file, bytes(data)[: len(data) // 2], position) if len(data) > 200 else None
            raise Killed
        self.left -= 1
        os.pwrite(file, bytes(data), position)


@given(budget=st.integers(16, 3_000), writes=WRITES, nth=st.integers(0, 80))
def test_a_kill_in_the_middle_of_a_write_leaves_no_byte_that_is_not_true(
    budget: int, writes: list[tuple[int, int, int]], nth: int
) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory, small_inline(0):
        path = Path(directory) / "exec.out"
        record = OutputRecord(budget, one_channel=False, path=path)
        fill(record, model, [(OUT, 1, 0)], holes=False)
        whole = recordstore._write_at
        recordstore._write_at = KilledAt(nth).write_at
        try:
            fill(record, model, writes, holes=False)
        except Killed:
            pass
        finally:
            recordstore._write_at = whole
        record.close()

        again = OutputRecord.load(path, budget=budget, one_channel=False)

        for channel in (OUT, ERR):
            produced = again.tracks[channel].produced
            assert produced <= len(model.bytes[channel])
            del model.bytes[channel][produced:]
        check(again, model)
        again.close()


def check_loaded(again: OutputRecord, model: Model, before: OutputRecord) -> None:
    # What the disk had refused, or what was lost after the last write, is not in the header: it comes again.
    for channel in (OUT, ERR):
        assert again.tracks[channel].produced == before.tracks[channel].produced
    check(again, model)


class small_inline:
    """Records go to their file from this size on."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = record_module.RECORD_INLINE_BYTES_MAX
        record_module.RECORD_INLINE_BYTES_MAX = self._size

    def __exit__(self, *_: object) -> None:
        record_module.RECORD_INLINE_BYTES_MAX = self._before
