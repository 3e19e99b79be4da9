"""The record of one exec's output, within a budget: head and tail are kept, the middle is dropped, and the cut stated.

Half of the budget is the head, shared by both channels in order of arrival. The other half is two rings for what comes
after, three quarters of it stdout's. A channel is kept as [0, head) and [produced - ring, produced).

Small output stays in memory: the agent has it until it is acknowledged. Beyond RECORD_INLINE_BYTES_MAX it is in a file,
in the page cache when `write` returns, so that it survives kill -9 of the node and may be acknowledged.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dsec.core.faults import fault_point
from dsec.core.limits import RECORD_HOLES_MAX, RECORD_INLINE_BYTES_MAX, RECORD_RUNS_MAX
from dsec.node.recordstore import ERR, OUT, FileStore, Layout, MemoryStore, Position, Store
from dsec.node.rows import ExecEndEntry
from dsec.wire.records import Gap


def plan_layout(budget: int, *, one_channel: bool) -> Layout:
    head = budget - budget // 2
    ring_err = 0 if one_channel else (budget // 2) // 4
    return Layout(head, budget // 2 - ring_err, ring_err)


class Piece(NamedTuple):
    """Recorded bytes. When `offset` is above what was asked for, what lies between is a gap."""

    channel: int
    offset: int
    sequence: int
    payload: bytes


class Track:
    """Where one channel stands."""

    __slots__ = ("channel", "head", "holes", "produced", "ring")

    def __init__(self, channel: int, ring: int) -> None:
        self.channel = channel
        self.ring = ring
        self.produced = 0
        self.head = 0  # bytes [0, head) are in the head
        self.holes: list[tuple[int, int]] = []  # lost before they reached the record

    @property
    def tail_start(self) -> int:
        return max(self.head, self.produced - self.ring)

    @property
    def kept(self) -> int:
        return self.head + self.produced - self.tail_start

    def gaps(self) -> list[Gap]:
        cuts = list(self.holes)
        if self.tail_start > self.head:
            cuts.append((self.head, self.tail_start))
        return [Gap(self.channel, start, end) for start, end in _merged(cuts)]


class Order:
    """Which channel's bytes came when: the runs of bytes of one channel, as far as RECORD_RUNS_MAX of them go."""

    __slots__ = ("_by_channel", "_last", "runs")

    def __init__(self, runs: Sequence[tuple[int, int, int]] = ()) -> None:
        self.runs: list[tuple[int, int, int]] = []  # (channel, offset, sequence)
        self._by_channel: dict[int, list[tuple[int, int, int]]] = {OUT: [], ERR: []}  # (offset, index, sequence)
        self._last = 0
        for run in runs:
            self.note(*run)

    def note(self, channel: int, offset: int, sequence: int) -> None:
        if channel != self._last and len(self.runs) < RECORD_RUNS_MAX:
            self._by_channel[channel].append((offset, len(self.runs), sequence))
            self.runs.append((channel, offset, sequence))
            self._last = channel

    def at(self, channel: int, offset: int) -> tuple[int, int, int | None]:
        """The run that holds this byte: its place among all runs, its sequence number, where it ends (None: open)."""
        own = self._by_channel[channel]
        found = bisect_right(own, offset, key=lambda run: run[0]) - 1
        if found < 0:
            return 0, 0, own[0][0] if own else None
        end = own[found + 1][0] if found + 1 < len(own) else None
        return own[found][1], own[found][2], end


class OutputRecord:
    """Written by one task; read by any number between its writes."""

    def __init__(
        self, budget: int, *, one_channel: bool, path: Path, has_room: Callable[[], bool] = lambda: True
    ) -> None:
        self.layout = plan_layout(budget, one_channel=one_channel)
        self.budget = budget
        self.one_channel = one_channel
        self.path = path
        self.tracks = {OUT: Track(OUT, self.layout.ring_out), ERR: Track(ERR, self.layout.ring_err)}
        self.order = Order()
        self.sequence = 0
        self.broken = False  # the disk refused: what came since is a gap
        self._has_room = has_room
        self._store: Store = MemoryStore()

    @property
    def in_file(self) -> bool:
        return isinstance(self._store, FileStore)

    @property
    def out_bytes(self) -> int:
        return self.tracks[OUT].produced

    @property
    def err_bytes(self) -> int:
        return self.tracks[ERR].produced

    @property
    def kept_bytes(self) -> int:
        return self.tracks[OUT].kept + self.tracks[ERR].kept

    @property
    def acknowledgeable(self) -> bool:
        """What was written survives kill -9 of the node, or is lost already."""
        return self.in_file or self.broken

    def settle(self) -> None:
        """Makes what was written acknowledgeable: it goes to a file, or is lost and said to be. Never raises."""
        if self.acknowledgeable:
            return
        try:
            self._spill()
        except OSError:
            self.broken = True

    def gaps(self) -> list[Gap]:
        return self.tracks[OUT].gaps() + self.tracks[ERR].gaps()

    def write(self, channel: int, offset: int, sequence: int, payload: bytes) -> None:
        """Bytes known already are skipped; bytes that are missing before `offset` become a gap. Never raises for the
        disk: then `broken` is set and what cannot be kept is dropped."""
        track = self.tracks[channel]
        if offset < track.produced:
            payload = payload[track.produced - offset :]
            offset = track.produced
        if not payload:
            return
        self.sequence = max(self.sequence, sequence)
        self.order.note(channel, offset, sequence)
        if offset > track.produced:
            self._lose(track, offset)
        if self.broken:
            self._lose(track, offset + len(payload))
            return
        try:
            self._spill_if_large(len(payload))
            if isinstance(self._store, FileStore) and not self._has_room():
                raise OSError(errno.ENOSPC, "the node's disk is at its reserve")
            if self.in_file:
                fault_point("node.record.write")
            self._keep(track, payload)
        except OSError:
            self.broken = True
            self._lose(track, offset + len(payload))

    def read(self, channel: int, offset: int, size: int) -> Piece | None:
        """The first kept bytes of `channel` at or after `offset`, at most `size`; None when there are none yet."""
        track = self.tracks[channel]
        start, end = self._next_kept(track, offset)
        if start >= end:
            return None
        end = min(end, start + size)
        if start < track.head:
            data = self._store.read_head(channel, start, end - start)
        else:
            data = self._read_ring(track, start, end)
        return Piece(channel, start, self.order.at(channel, start)[1], data)

    def read_all(self, channel: int) -> bytes:
        """All that is kept of a channel; `gaps` says what is missing in between."""
        parts: list[bytes] = []
        position = 0
        while (piece := self.read(channel, position, 1 << 62)) is not None:
            parts.append(piece.payload)
            position = piece.offset + len(piece.payload)
        return b"".join(parts)

    def choose(self, out: int, err: int) -> tuple[int, int] | None:
        """Which channel a reader at these offsets takes next, and at most how much of it, so that the order of the
        two is kept. None: it has all there is so far."""
        found: list[tuple[int, int, int]] = []
        for channel, offset in ((OUT, out), (ERR, err)):
            produced = self.tracks[channel].produced
            if offset < produced:
                place, _, end = self.order.at(channel, offset)
                found.append((place, channel, (produced if end is None else min(end, produced)) - offset))
        if not found:
            return None
        _, channel, size = min(found)
        return channel, size

    def close(self) -> None:
        if isinstance(self._store, FileStore):
            self._store.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    # -- inside ------------------------------------------------------------------------------------

    def _keep(self, track: Track, payload: bytes) -> None:
        view = memoryview(payload)
        room = self.layout.head - self.tracks[OUT].head - self.tracks[ERR].head
        # Only an unbroken beginning is head: what follows a cut belongs to the tail.
        into_head = min(room, len(view)) if track.head == track.produced else 0
        end = track.produced + len(view)
        if into_head:
            self._store.write_head(track.channel, track.produced, view[:into_head])
            track.head += into_head
            track.produced += into_head
        if into_head < len(view):
            self._write_ring(track, view[into_head:], end)
        track.produced = end
        if isinstance(self._store, FileStore):
            self._store.write_header(self.layout, self._position())

    def _write_ring(self, track: Track, view: memoryview, end: int) -> None:
        if isinstance(self._store, FileStore) and end - track.ring > track.tail_start:
            # What the ring is about to overwrite is given up first: a kill -9 in between must not leave old offsets
            # pointing at new bytes.
            self._store.write_header(self.layout, self._position({track.channel: end}))
        if track.ring == 0:
            return
        if len(view) > track.ring:
            view = view[len(view) - track.ring :]
        position = (end - len(view)) % track.ring
        first = min(len(view), track.ring - position)
        self._store.write_ring(track.channel, position, view[:first])
        if first < len(view):
            self._store.write_ring(track.channel, 0, view[first:])

    def _read_ring(self, track: Track, start: int, end: int) -> bytes:
        position = start % track.ring
        first = min(end - start, track.ring - position)
        data = self._store.read_ring(track.channel, position, first)
        if first < end - start:
            data += self._store.read_ring(track.channel, 0, end - start - first)
        return data

    def _next_kept(self, track: Track, offset: int) -> tuple[int, int]:
        start = offset
        while True:
            if track.head <= start < track.tail_start:
                start = track.tail_start
            hole = next((h for h in track.holes if h[0] <= start < h[1]), None)
            if hole is None:
                break
            start = hole[1]
        end = track.head if start < track.head else track.produced
        return start, min([end, *(h[0] for h in track.holes if h[0] > start)])

    def _lose(self, track: Track, end: int) -> None:
        """Bytes [produced, end) are not to be had. The file's header learns of it with the next write."""
        holes = track.holes
        if holes and (holes[-1][1] == track.produced or len(holes) >= RECORD_HOLES_MAX):
            holes[-1] = (holes[-1][0], end)
        else:
            holes.append((track.produced, end))
        track.produced = end

    def _spill_if_large(self, more: int) -> None:
        if not self.in_file and self.out_bytes + self.err_bytes + more > RECORD_INLINE_BYTES_MAX:
            self._spill()

    def _spill(self) -> None:
        memory = self._store
        assert isinstance(memory, MemoryStore)
        store = FileStore.create(self.path, self.layout)
        try:
            memory.copy_to(store)
            store.write_header(self.layout, self._position())
        except BaseException:
            store.close()
            self.path.unlink(missing_ok=True)
            raise
        self._store = store

    def _position(self, dirty: dict[int, int] | None = None) -> Position:
        out, err = self.tracks[OUT], self.tracks[ERR]
        until = dirty or {}
        return Position(
            sequence=self.sequence,
            produced=(out.produced, err.produced),
            head=(out.head, err.head),
            dirty=(until.get(OUT, out.produced), until.get(ERR, err.produced)),
            holes=tuple((t.channel, *hole) for t in (out, err) for hole in t.holes),
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        budget: int,
        one_channel: bool,
        has_room: Callable[[], bool] = lambda: True,
        order: Sequence[tuple[int, int, int]] = (),
    ) -> OutputRecord:
        """The record of a file as another node left it. Raises StorageError when it is not one."""
        record = cls(budget, one_channel=one_channel, path=path, has_room=has_room)
        store, position = FileStore.open(path, record.layout)
        record._store = store
        record.sequence = position.sequence
        for index, track in enumerate(record.tracks.values()):
            track.produced, track.head = position.produced[index], position.head[index]
            track.holes = [(start, end) for channel, start, end in position.holes if channel == track.channel]
            overwritten = min(position.dirty[index] - track.ring, track.produced)
            if overwritten > track.tail_start:
                track.holes.append((track.tail_start, overwritten))
            if track.produced and not order:
                record.order.note(track.channel, 0, 0)  # the order of the two died with the node that knew it
        for run in order:
            record.order.note(*run)
        return record

    @classmethod
    def of_inline(cls, entry: ExecEndEntry, *, budget: int, one_channel: bool, path: Path) -> OutputRecord:
        """The record of an ended exec whose output is kept in its end entry."""
        record = cls(budget, one_channel=one_channel, path=path)
        record.order = Order(entry.runs)
        for channel, data, total in ((OUT, entry.out, entry.out_bytes), (ERR, entry.err, entry.err_bytes)):
            track = record.tracks[channel]
            track.produced = track.head = total
            track.holes = [(gap.start, gap.end) for gap in entry.gaps if gap.channel == channel]
            taken, offset = 0, 0
            for start, end in [*track.holes, (total, total)]:
                record._store.write_head(channel, offset, data[taken : taken + start - offset])
                taken, offset = taken + start - offset, end
        return record


def _merged(cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(cuts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
