"""The rows of jobs in the registry: each change by compare-and-set, whichever replica or watcher makes it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from dsec.cluster.registry import Bucket, Registry, Snapshot, key_of
from dsec.core.clock import Clock
from dsec.core.errors import (
    ConflictError,
    LimitError,
    NotFoundError,
    Outcome,
    ProtocolError,
    UnavailableError,
)
from dsec.core.limits import JOB_KEPT_S, JOBS_MAX, JOBS_PER_PROJECT_MAX
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.groups import Across, GroupNote
from dsec.wire.jobs import Because, JobExtend, JobRequest, JobRow, JobState
from dsec.wire.node import team_of

log = get_logger(__name__)

_ROUNDS: Final = 16


@dataclass(slots=True)
class Seen:
    """A row, and when its numbers were first seen as they are, on the clock of who watches."""

    row: JobRow
    revision: int
    beat_at: float
    extended_at: float
    changed_at: float


class Jobs:
    """`start` follows all rows; what it knows of them is a moment old. `get` and changes ask the registry."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._seen: dict[str, Seen] = {}
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Returns when all rows are known. Raises UnavailableError."""
        self._task = asyncio.create_task(self._follow(), name="watch jobs")
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError as error:
            await self.close()
            raise UnavailableError(
                "the registry does not tell which jobs there are", outcome=Outcome.UNCHANGED
            ) from error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def seen(self) -> list[Seen]:
        return list(self._seen.values())

    def known(self, project: str, name: str) -> JobRow | None:
        found = self._seen.get(key_of(project, name))
        return None if found is None else found.row

    def list(self, reaches: Callable[[str], bool]) -> Collection[JobRow]:
        """By project and name, of projects that `reaches` says yes to."""
        found = [seen.row for seen in self._seen.values() if reaches(seen.row.project)]
        return sorted(found, key=lambda row: (row.project, row.name))

    # -- changes -----------------------------------------------------------------------------------

    async def create(
        self, request: JobRequest, *, project: str, principal: str, group: GroupNote | None = None
    ) -> JobRow:
        """The same again is success, and so is one after a job of that name that was stopped whole.

        Raises ConflictError when there is another of that name, LimitError.
        """
        key, now = key_of(project, request.name), self._clock.wall_s()
        row = JobRow(
            id=f"job_{secrets.token_hex(8)}",
            name=request.name,
            project=project,
            principal=principal,
            created_at=now,
            changed_at=now,
            beat_at=now,
            lease_s=request.lease_s,
            on_missed=request.on_missed,
            grace_s=request.grace_s,
            group=group,
        )
        for _ in range(_ROUNDS):
            entry = await self._registry.get(Bucket.JOBS, key)
            try:
                if entry is None:
                    self._check_room(project)
                    self._note(key, row, await self._registry.create(Bucket.JOBS, key, pack(row)))
                    return row
                there = _read(entry.value)
                if there is not None and there.state is not JobState.STOPPED:
                    if (there.group is None) != (group is None):
                        kind = "job" if there.group is None else "group"
                        raise _TakenError(f"there is a {kind} {request.name!r}")
                    if there.group is not None and group is not None and there.group.digest != group.digest:
                        raise _TakenError(f"there is another group {request.name!r}")
                    if group is None and not there.has_terms(request):
                        raise _TakenError(f"there is a job {request.name!r} with another lease, policy or grace")
                    return there
                if there is not None and not there.settled:
                    raise _TakenError(f"job {request.name!r} is being stopped")
                await self._write(row, entry.revision)
                return row
            except _TakenError as error:
                raise ConflictError(str(error), hint="use another name, or `dsec job show` it") from None
            except ConflictError:
                continue
        raise _busy(request.name)

    async def get(self, project: str, name: str) -> JobRow:
        """Raises NotFoundError."""
        return (await self._find(project, name))[0]

    async def beat(self, project: str, name: str) -> JobRow:
        """A sign of life of its client. A job that was paused for the lack of one goes on."""
        return await self.change(project, name, lambda row: _revived(_beaten(row, self._clock.wall_s())))

    async def extend(self, project: str, name: str, request: JobExtend) -> JobRow:
        def extended(row: JobRow) -> JobRow:
            row = _beaten(row, self._clock.wall_s())
            return _revived(
                msgspec.structs.replace(row, extensions=row.extensions + 1, extended_s=float(request.seconds))
            )

        return await self.change(project, name, extended)

    async def started(self, row: JobRow, members: dict[str, str]) -> JobRow:
        """The group of `row` is whole, and has no lease from now on. Raises ConflictError when it was stopped."""

        def whole(now: JobRow) -> JobRow:
            if now.id != row.id or now.group is None:
                raise ConflictError(f"group {row.name} was made anew meanwhile")
            note = msgspec.structs.replace(now.group, members=members)
            return msgspec.structs.replace(now, group=note, lease_s=None)

        return await self.change(row.project, row.name, whole)

    async def placed(self, row: JobRow, nodes: dict[str, str], across: Across) -> JobRow:
        """Where members of the group of `row` are going to be. Raises ConflictError when it was stopped."""

        def there(now: JobRow) -> JobRow:
            if now.id != row.id or now.group is None:
                raise ConflictError(f"group {row.name} was made anew meanwhile")
            return msgspec.structs.replace(now, group=msgspec.structs.replace(now.group, nodes=nodes, across=across))

        return await self.change(row.project, row.name, there)

    async def move(self, project: str, name: str, state: JobState, *, id: str | None = None) -> JobRow:
        """`id`: of this job, and of no later one of the name. Raises ConflictError for a job that is stopped, unless it
        is to be; NotFoundError."""

        def moved(row: JobRow) -> JobRow:
            _check_id(row, id)
            return self._moved(row, state, Because.ASKED)

        return await self.change(project, name, moved)

    async def missed(self, row: JobRow, state: JobState) -> bool:
        """The lease of `row` is over: by one watcher only, and only if nothing was heard of it meanwhile."""
        return await self._swap(row, self._moved(row, state, Because.LEASE))

    async def settle(self, row: JobRow, *, graced: bool = False, swept: bool = False) -> bool:
        """The order of `row` is done everywhere. False when there has been another since. Beats do not matter."""

        def settled(now: JobRow) -> JobRow:
            if (now.id, now.order) != (row.id, row.order):
                return now
            return msgspec.structs.replace(now, settled=True, graced=now.graced or graced, swept=now.swept or swept)

        try:
            now = await self._change(row.project, row.name, settled)
        except NotFoundError:
            return False
        return (now.id, now.order) == (row.id, row.order)

    async def remove(self, project: str, name: str, *, id: str | None = None) -> None:
        """Raises NotFoundError; ConflictError for one that is not stopped on all nodes."""
        for _ in range(_ROUNDS):
            row, revision = await self._find(project, name)
            _check_id(row, id)
            if row.state is not JobState.STOPPED or not row.settled:
                raise ConflictError(
                    f"job {name} is {row.state if row.settled else 'being stopped'}",
                    hint="stop it first: its sandboxes end with it",
                )
            with contextlib.suppress(ConflictError):
                return await self._registry.delete(Bucket.JOBS, key_of(project, name), revision=revision)
        raise _busy(name)

    async def drop(self, project: str) -> int:
        """All of a project that is removed, and has no sandboxes; how many."""
        rows = [seen.row for seen in self.seen() if seen.row.project == project]
        for row in rows:
            await self._registry.delete(Bucket.JOBS, key_of(project, row.name))
        return len(rows)

    async def change(self, project: str, name: str, change: Callable[[JobRow], JobRow]) -> JobRow:
        """Of one that is not stopped. Raises NotFoundError, ConflictError."""

        def checked(row: JobRow) -> JobRow:
            if row.state is JobState.STOPPED:
                new = change(row)
                if new == row:
                    return row
                raise ConflictError(f"job {name} is stopped", hint="make another one")
            return change(row)

        return await self._change(project, name, checked)

    # -- inside ------------------------------------------------------------------------------------

    async def _change(self, project: str, name: str, change: Callable[[JobRow], JobRow]) -> JobRow:
        for _ in range(_ROUNDS):
            row, revision = await self._find(project, name)
            new = change(row)
            if new == row:
                return row
            with contextlib.suppress(ConflictError):
                await self._write(new, revision)
                return new
        raise _busy(name)

    async def _swap(self, old: JobRow, new: JobRow) -> bool:
        try:
            row, revision = await self._find(old.project, old.name)
            if row != old:
                return False
            await self._write(new, revision)
        except (ConflictError, NotFoundError):
            return False
        return True

    async def _write(self, row: JobRow, revision: int) -> None:
        over = row.state is JobState.STOPPED and row.settled
        key = key_of(row.project, row.name)
        ttl_s = JOB_KEPT_S if over else None
        self._note(key, row, await self._registry.update(Bucket.JOBS, key, pack(row), revision=revision, ttl_s=ttl_s))

    async def _find(self, project: str, name: str) -> tuple[JobRow, int]:
        entry = await self._registry.get(Bucket.JOBS, key_of(project, name))
        row = None if entry is None else _read(entry.value)
        if entry is None or row is None:
            raise NotFoundError(
                f"there is no job {name[:80]!r}", hint="`dsec job ls` shows them; other projects' are never shown"
            )
        return row, entry.revision

    def _moved(self, row: JobRow, state: JobState, because: Because) -> JobRow:
        if row.state is state:
            return row
        return _ordered(row, state, because, self._clock.wall_s())

    def _check_room(self, project: str) -> None:
        rows = [seen.row for seen in self._seen.values()]
        if len(rows) >= JOBS_MAX:
            raise LimitError(f"there are {JOBS_MAX} jobs", hint="remove some that are stopped")
        if sum(row.project == project for row in rows) >= JOBS_PER_PROJECT_MAX:
            raise LimitError(f"the project has {JOBS_PER_PROJECT_MAX} jobs", hint="stop and remove some: dsec job rm")
        team = team_of(project)
        if sum(team_of(row.project) == team for row in rows) >= JOBS_MAX // 2:
            raise LimitError(f"{team} and the projects below it have {JOBS_MAX // 2} jobs", hint="remove some")

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._registry.watch(Bucket.JOBS)) as news:
            async for one in news:
                if isinstance(one, Snapshot):
                    for key in self._seen.keys() - {entry.key for entry in one.entries}:
                        del self._seen[key]
                    for entry in one.entries:
                        self._note(entry.key, _read(entry.value), entry.revision)
                    self._ready.set()
                else:
                    self._note(one.key, None if one.value is None else _read(one.value), one.revision)

    def _note(self, key: str, row: JobRow | None, revision: int) -> None:
        """What was written here is known at once; the watch tells of it later, and of older ones too."""
        now, old = self._clock.monotonic_s(), self._seen.get(key)
        if old is not None and old.revision >= revision:
            return
        if row is None:
            self._seen.pop(key, None)
            return
        if old is None or old.row.id != row.id:
            self._seen[key] = Seen(row, revision, now, now, now)
            return
        self._seen[key] = Seen(
            row,
            revision,
            old.beat_at if old.row.beats == row.beats else now,
            old.extended_at if old.row.extensions == row.extensions else now,
            old.changed_at if old.row.order == row.order else now,
        )


def _check_id(row: JobRow, id: str | None) -> None:
    if id is not None and row.id != id:
        raise NotFoundError(f"job {row.name} is another one by now")


def _beaten(row: JobRow, now: float) -> JobRow:
    return msgspec.structs.replace(row, beats=row.beats + 1, beat_at=now)


def _revived(row: JobRow) -> JobRow:
    if row.state is JobState.PAUSED and row.because is Because.LEASE:
        return _ordered(row, JobState.RUNNING, Because.LEASE, row.beat_at)
    return row


def _ordered(row: JobRow, state: JobState, because: Because, now: float) -> JobRow:
    return msgspec.structs.replace(
        row,
        state=state,
        because=because,
        changed_at=now,
        order=row.order + 1,
        settled=False,
        swept=False,
        graced=False,
    )


def _read(value: bytes) -> JobRow | None:
    try:
        return unpack(value, JobRow)
    except ProtocolError:
        log.warning("a row of a job cannot be read")
        return None


def _busy(name: str) -> UnavailableError:
    return UnavailableError(f"job {name} is changed by many at once", outcome=Outcome.UNCHANGED, retry_after_s=1.0)


class _TakenError(Exception):
    pass
