"""The memory of an instance while it is paused: it goes to swap meanwhile, where there is any, and what of it was used
the last time is read ahead when it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from dsec.core.errors import HostError
from dsec.density.pagein import Part, page_in
from dsec.density.pageout import PagedOut, has_swap, page_out
from dsec.density.swapping import CgroupMemory
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_GIVE_S: Final = 60.0  # of one sandbox: what it has made of its memory may be made to take long
# Of all: many that are paused at once leave the threads of everybody else alone, and the disk some of its time.
_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="page-out")
_AHEAD: Final = ThreadPoolExecutor(2, thread_name_prefix="page-in")
_AHEAD_S: Final = 2.0  # after it goes on: then it has what it needs, page by page
_AHEAD_PARTS_MAX: Final = 8192  # of all its processes


class PausedMemory:
    """Of processes that stand still. Nobody waits for it: a pause is done before, and going on cuts it short."""

    def __init__(
        self, sandbox: str, processes: Callable[[], Iterable[int]], counted: CgroupMemory, *, monitor: bool = False
    ) -> None:
        """`monitor`: they run a program of the host, and what sandboxes run is in its memory."""
        self._sandbox = sandbox
        self._processes = processes
        self._counted = counted
        self._monitor = monitor
        self._stop = threading.Event()
        self._work: asyncio.Task[None] | None = None
        self._job: Future[PagedOut] | None = None
        self._used: dict[int, tuple[Part, ...]] = {}  # by process: what it may need first when it goes on
        self._enough = threading.Event()  # of what is read ahead

    @property
    def given_back(self) -> bool:
        """Some of it may be gone."""
        return self._work is not None

    def give_back(self) -> bool:
        """Begins, if the host has swap; else it keeps what it has, and this is False."""
        self._enough.set()
        if self._work is None and has_swap():
            self._stop.clear()
            job = self._job = _THREADS.submit(self._give)
            self._work = asyncio.get_running_loop().create_task(self._page_out(job))
        return self._work is not None

    async def keep(self) -> None:
        """No more of it is taken when this returns, and no more read ahead. Idempotent."""
        self._stop.set()
        self._enough.set()
        work, self._work = self._work, None
        if self._job is not None:
            self._job.cancel()  # it has its turn no more; one that has begun ends soon
        if work is not None:
            await asyncio.shield(work)
        with contextlib.suppress(OSError):  # an earlier process may have paused it; and it may have ended
            self._counted.allow_swap(False)

    async def come_back(self) -> None:
        """As `keep`, before it goes on. What it is likely to need comes meanwhile; nobody waits for that."""
        await self.keep()
        used, self._used = self._used, {}
        if used:
            self._enough = threading.Event()
            _AHEAD.submit(self._read_ahead, used, self._enough, time.monotonic() + _AHEAD_S)

    def abandon(self) -> None:
        """It ends by itself, soon."""
        self._stop.set()
        self._enough.set()

    async def _page_out(self, job: Future[PagedOut]) -> None:
        try:
            done = await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            if job.cancelled():
                return
            raise
        except (HostError, OSError) as error:
            if self._stop.is_set():
                return  # it has ended, as was wanted
            log.warning("a paused sandbox keeps its memory", sandbox=self._sandbox, error=str(error))
            return
        log.info(
            "a paused sandbox has given memory back",
            sandbox=self._sandbox,
            given_back_bytes=done.given_back_bytes,
            resident_bytes=done.resident_bytes,
            swapped_bytes=done.swapped_bytes,
        )

    def _read_ahead(self, used: dict[int, tuple[Part, ...]], enough: threading.Event, until_s: float) -> None:
        timer = threading.Timer(max(0.0, until_s - time.monotonic()), enough.set)
        timer.daemon = True
        timer.start()
        try:
            for pid in self._processes():
                # Of one that has ended nobody has the number yet: all stood still.
                if pid in used and not enough.is_set():
                    with contextlib.suppress(HostError):
                        page_in(pid, used[pid], enough, touch=self._monitor)
        except OSError as error:
            log.warning("a sandbox that goes on has nothing read ahead", sandbox=self._sandbox, error=str(error))
        finally:
            timer.cancel()

    def _give(self) -> PagedOut:
        """All of its processes, and then what only the cgroup has. Raises HostError: none of them is there."""
        timer = threading.Timer(_GIVE_S, self._stop.set)
        timer.daemon = True
        timer.start()
        try:
            return self._given()
        finally:
            timer.cancel()

    def _given(self) -> PagedOut:
        self._counted.allow_swap(True)
        found: list[PagedOut] = []
        used: dict[int, tuple[Part, ...]] = {}
        parts = 0
        failure: HostError | None = None
        for pid in self._processes():
            if self._stop.is_set():
                break
            try:
                found.append(page_out(pid, self._stop))
            except HostError as error:
                failure = error  # one of several has been killed
                continue
            if found[-1].used and (parts := parts + len(found[-1].used)) <= _AHEAD_PARTS_MAX:
                used[pid] = found[-1].used
        self._used = used
        if failure is not None and not found:
            raise failure
        if not self._stop.is_set():
            self._counted.push_out(self._stop)
        return PagedOut(
            sum(each.resident_before_bytes for each in found),
            sum(each.resident_bytes for each in found),
            sum(each.swapped_bytes for each in found),
        )
