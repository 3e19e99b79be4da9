"""All execs of one sandbox: by id, journalled, bounded in number and in recorded bytes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import CapacityError, ConflictError, ExecNotFoundError, StorageError
from dsec.core.limits import EXECS_KEPT_MAX, EXECS_LIVE_MAX, MIB
from dsec.core.states import SandboxState
from dsec.node.execlog import ExecLog
from dsec.node.execs import NodeExec
from dsec.node.record import OutputRecord
from dsec.node.recordplace import RecordPlace
from dsec.node.recordstore import ERR, OUT
from dsec.node.rows import ExecDropEntry, ExecEndEntry, ExecEntry, ExecStartEntry
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.agent import ExecEnd, ExecStatus
from dsec.wire.records import Sandbox

log = get_logger(__name__)

_REMOVE_INLINE_MAX: Final = 64  # files that are unlinked faster than a thread is asked
_REWRITE_BYTES_MIN: Final = 4 * MIB  # a log is rewritten when it is this large and half of it is dead


@dataclass(slots=True)
class Totals:
    """Of the execs that have been dropped or are kept: for metrics."""

    recorded_bytes: int = 0
    dropped_bytes: int = 0


class ExecTable:
    """Only the sandbox's supervisor and its runners change it."""

    def __init__(self, sandbox: str, place: RecordPlace) -> None:
        self.sandbox = sandbox
        self.directory = place.directory / sandbox
        self.totals = Totals()
        self._records_bytes_max = place.bytes_max
        self._has_room = place.has_room
        self._log = ExecLog(self.directory / "execs.log", place.make)
        self._execs: dict[str, NodeExec] = {}  # in order of their start
        self._live = 0
        self._kept_bytes = 0  # of ended ones
        self._logged_bytes = 0  # of the log, that somebody still needs

    # -- reading -----------------------------------------------------------------------------------

    @property
    def live_count(self) -> int:
        return self._live

    def find(self, id: str) -> NodeExec | None:
        return self._execs.get(id)

    def get(self, id: str) -> NodeExec:
        found = self._execs.get(id)
        if found is None:
            raise ExecNotFoundError(
                f"the sandbox has no exec {id}",
                hint=f"the last {EXECS_KEPT_MAX} ended ones are kept",
                sandbox=self.sandbox,
                exec=id,
            )
        return found

    def __iter__(self) -> Iterator[NodeExec]:
        return iter(list(self._execs.values()))

    def output_bytes(self) -> tuple[int, int]:
        """Recorded, and dropped for the budget, over all execs that there have been."""
        recorded, dropped = self.totals.recorded_bytes, self.totals.dropped_bytes
        for exec in self._execs.values():
            if exec.live:
                recorded += exec.record.kept_bytes
                dropped += sum(gap.end - gap.start for gap in exec.record.gaps())
        return recorded, dropped

    # -- changing ----------------------------------------------------------------------------------

    def begin(self, start: ExecStartEntry) -> NodeExec:
        """A new exec, journalled before anything is asked of the agent."""
        if self._live >= EXECS_LIVE_MAX:
            raise CapacityError(
                f"{self._live} execs run in the sandbox, and {EXECS_LIVE_MAX} are the most",
                sandbox=self.sandbox,
                retry_after_s=1.0,
            )
        if start.id in self._execs:
            raise ConflictError(f"exec {start.id} exists already", sandbox=self.sandbox, exec=start.id)
        self._log.append(start)
        return self._add(start)

    def never_started(self, exec: NodeExec) -> None:
        """The agent refused: nothing has run, and the id may be used again."""
        self._remove(exec)

    def forget(self, id: str) -> None:
        """The id of one that has ended may be used again; whoever reads its record reads on."""
        exec = self._execs.get(id)
        if exec is not None and not exec.live:
            self._remove(exec)

    def finish(self, exec: NodeExec, end: ExecEnd, ended_at: float) -> bool:
        """Journals the end with what was recorded. False when the disk refused: then the agent must keep it too."""
        if exec.end is not None:
            return True
        record = exec.record
        if record.broken and end.cause is None:
            end = msgspec.structs.replace(end, cause="disk_full")
        entry = _end_entry(exec, end, ended_at)
        written = True
        try:
            exec.end_position = self._log.append(entry)
        except StorageError as error:
            written = False
            log.error("an exec's end could not be journalled", sandbox=self.sandbox, exec=exec.id, error=str(error))
        exec.end = msgspec.structs.replace(entry, out=b"", err=b"")
        self._live -= 1
        self._note_kept(entry)
        metrics.OUTPUT_RECORDED_BYTES.inc(entry.kept_bytes)
        metrics.OUTPUT_DROPPED_BYTES.inc(sum(gap.end - gap.start for gap in entry.gaps))
        exec.mark_started()
        exec.notify()
        exec.let_go()
        self._drop_surplus()
        return written

    def is_journalled(self, exec: NodeExec) -> bool:
        """Whether an ended exec's end is; one that the disk had refused is tried again."""
        if exec.end is not None and exec.end_position is None:
            with suppress(StorageError):
                exec.end_position = self._log.append(_end_entry(exec, exec.end.end, exec.end.ended_at))
                exec.let_go()
        return exec.end_position is not None

    def close(self) -> None:
        self._log.close()
        for exec in self._execs.values():
            exec.close()

    def move(self, to: Path) -> bool:
        """Where the records of a sandbox that has ended are from now on; whoever reads them reads on. False when there
        are none. Raises OSError."""
        self.close()
        self._log.ended = True
        try:
            self.directory.rename(to)
        except FileNotFoundError:  # no exec has ever run
            return False
        self.directory = to
        self._log.path = to / self._log.path.name
        return True

    async def remove(self) -> None:
        """Nothing of the records is left on the disk."""
        self.close()
        if len(self._execs) > _REMOVE_INLINE_MAX:
            await asyncio.to_thread(_remove_directory, self.directory)
        else:
            _remove_directory(self.directory)

    # -- after a restart ---------------------------------------------------------------------------

    def load(self) -> None:
        """What another node process has left: execs that have ended, and those that may still run."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._take(self._log.load())
        self._remove_strays()

    def read_log(self) -> list[tuple[int, ExecEntry]]:
        """For `load_ended`; may take long. Raises StorageError."""
        return self._log.load()

    def load_ended(self, entries: list[tuple[int, ExecEntry]], sandbox: Sandbox) -> None:
        """Of a sandbox that has ended: to be read only. Execs whose end nobody saw have ended with it."""
        self._log.ended = True
        self._take(entries)
        end = ExecEnd(
            status=ExecStatus.UNKNOWN, cause="agent_lost" if sandbox.state == SandboxState.FAILED else "killed"
        )
        for exec in self._execs.values():
            if exec.live:
                exec.end = _end_entry(exec, end, sandbox.ended_at or exec.start.started_at)
                self._live -= 1
                if exec.end.file:
                    exec.end_position = 0  # the file has its output, not an entry
                    exec.let_go()

    def _take(self, entries: list[tuple[int, ExecEntry]]) -> None:
        for position, entry in entries:
            if isinstance(entry, ExecStartEntry):
                if entry.id not in self._execs:
                    self._add(entry)
            elif isinstance(entry, ExecDropEntry):
                exec = self._execs.pop(entry.id, None)
                if exec is not None:
                    self._live -= exec.live
            else:
                self._load_end(position, entry)
        for exec in self._execs.values():
            exec.mark_started()
            if exec.live:
                exec.record = self._load_record(exec)

    # -- inside ------------------------------------------------------------------------------------

    def _add(self, start: ExecStartEntry) -> NodeExec:
        exec = NodeExec(start, self._read_in)
        self._execs[start.id] = exec
        self._live += 1
        exec.record = OutputRecord(
            start.record_bytes_max,
            one_channel=start.one_channel,
            path=self._path(start.id),
            has_room=self._has_room,
        )
        return exec

    def _path(self, id: str) -> Path:
        return self.directory / f"{id}.out"

    def _read_in(self, exec: NodeExec) -> OutputRecord:
        """The record of an ended exec, from its file or from the log."""
        start, end = exec.start, exec.end
        assert end is not None, "a live exec has its record"
        if end.file:
            return OutputRecord.load(
                self._path(exec.id), budget=start.record_bytes_max, one_channel=start.one_channel, order=end.runs
            )
        if exec.end_position is None:
            raise StorageError(f"the output of exec {exec.id} could not be kept", sandbox=self.sandbox, exec=exec.id)
        return OutputRecord.of_inline(
            self._log.read_end(exec.end_position),
            budget=start.record_bytes_max,
            one_channel=start.one_channel,
            path=self._path(exec.id),
        )

    def _load_record(self, exec: NodeExec) -> OutputRecord:
        start = exec.start
        if self._path(exec.id).exists():
            try:
                return OutputRecord.load(
                    self._path(exec.id),
                    budget=start.record_bytes_max,
                    one_channel=start.one_channel,
                    has_room=self._has_room,
                )
            except StorageError as error:
                # Cut off before its first header: nothing in it was acknowledged, so the agent has it all.
                log.warning("a record is started again", sandbox=self.sandbox, exec=exec.id, error=str(error))
        return exec.record

    def _load_end(self, position: int, entry: ExecEndEntry) -> None:
        exec = self._execs.get(entry.id)
        if exec is None or exec.end is not None:
            return
        exec.end = msgspec.structs.replace(entry, out=b"", err=b"")
        exec.end_position = position
        self._live -= 1
        self._note_kept(entry)
        exec.let_go()

    def _note_kept(self, entry: ExecEndEntry) -> None:
        self._kept_bytes += entry.kept_bytes
        self._logged_bytes += len(entry.out) + len(entry.err)
        self.totals.recorded_bytes += entry.kept_bytes
        self.totals.dropped_bytes += sum(gap.end - gap.start for gap in entry.gaps)

    def _drop_surplus(self) -> None:
        while len(self._execs) - self._live > EXECS_KEPT_MAX or self._kept_bytes > self._records_bytes_max:
            oldest = next((exec for exec in self._execs.values() if not exec.live), None)
            if oldest is None:
                return
            self._remove(oldest)
        if self._log.size > max(_REWRITE_BYTES_MIN, 2 * self._logged_bytes + len(self._execs) * 1024):
            self._rewrite_log()

    def _remove(self, exec: NodeExec) -> None:
        self._execs.pop(exec.id, None)
        if exec.end is None:
            self._live -= 1
        else:
            self._kept_bytes -= exec.end.kept_bytes
            if not exec.end.file:
                self._logged_bytes -= exec.end.kept_bytes
        try:
            self._log.append(ExecDropEntry(id=exec.id))
            if exec.end is None or exec.end.file:
                exec.remove_file(self._path(exec.id))
        except (StorageError, OSError) as error:
            log.warning("an exec's record could not be dropped", sandbox=self.sandbox, exec=exec.id, error=str(error))

    def _rewrite_log(self) -> None:
        entries: list[ExecEntry] = []
        ended: list[tuple[NodeExec, int]] = []
        try:
            for exec in self._execs.values():
                entries.append(exec.start)
                if exec.end_position is not None:
                    ended.append((exec, len(entries)))
                    entries.append(self._log.read_end(exec.end_position))
            positions = self._log.rewrite(entries)
        except StorageError as error:
            log.warning("an exec log could not be rewritten", sandbox=self.sandbox, error=str(error))
            return
        for exec, index in ended:
            exec.end_position = positions[index]

    def _remove_strays(self) -> None:
        known = {self._path(exec.id).name for exec in self._execs.values()} | {self._log.path.name}
        for path in self.directory.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)


def _remove_directory(path: Path) -> None:
    with suppress(FileNotFoundError):  # no exec has ever run
        shutil.rmtree(path)


def _end_entry(exec: NodeExec, end: ExecEnd, ended_at: float) -> ExecEndEntry:
    record = exec.record
    in_file = record.in_file
    return ExecEndEntry(
        id=exec.id,
        ended_at=ended_at,
        end=end,
        out_bytes=record.out_bytes,
        err_bytes=record.err_bytes,
        kept_bytes=record.kept_bytes,
        gaps=record.gaps(),
        runs=record.order.runs,
        file=in_file,
        out=b"" if in_file else record.read_all(OUT),
        err=b"" if in_file else record.read_all(ERR),
    )
