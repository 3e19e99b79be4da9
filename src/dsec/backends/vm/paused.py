"""The memory of a machine while it is paused: it goes to swap meanwhile, where there is any."""

from __future__ import annotations

import asyncio
import threading

from dsec.core.errors import HostError
from dsec.density.pageout import has_swap, page_out
from dsec.observe.logs import get_logger

log = get_logger(__name__)


class PausedMemory:
    """Of one monitor. Nobody waits for it: a pause is done before, and going on cuts it short."""

    def __init__(self, sandbox: str, pid: int) -> None:
        self._sandbox = sandbox
        self._pid = pid
        self._stop = threading.Event()
        self._work: asyncio.Task[None] | None = None

    @property
    def given_back(self) -> bool:
        """Some of it may be gone."""
        return self._work is not None

    def give_back(self) -> bool:
        """Begins, if the host has swap; else it keeps what it has, and this is False."""
        if self._work is None and has_swap():
            self._stop.clear()
            self._work = asyncio.get_running_loop().create_task(self._page_out())
        return self._work is not None

    async def keep(self) -> None:
        """No more of it is taken when this returns. Idempotent."""
        self._stop.set()
        work, self._work = self._work, None
        if work is not None:
            await asyncio.shield(work)

    def abandon(self) -> None:
        """It ends by itself, soon."""
        self._stop.set()

    async def _page_out(self) -> None:
        try:
            done = await asyncio.to_thread(page_out, self._pid, self._stop)
        except HostError as error:
            if self._stop.is_set():
                return  # it has ended, as was wanted
            log.warning("a paused machine keeps its memory", sandbox=self._sandbox, error=error.message)
            return
        log.info(
            "a paused machine has given memory back",
            sandbox=self._sandbox,
            given_back_bytes=done.given_back_bytes,
            resident_bytes=done.resident_bytes,
            swapped_bytes=done.swapped_bytes,
        )
