"""Removing instances that are nobody's sandbox: until it is done, however often that takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dsec.backends.base import Backend
from dsec.core import limits
from dsec.core.errors import DsecError
from dsec.core.ids import SandboxId
from dsec.core.spec import Substrate
from dsec.node.rows import SpareRow
from dsec.node.services import Services
from dsec.node.tasks import Tasks
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_FIRST_PAUSE_S = 0.5


class Removal:
    """What it gives up on when `tasks` end is in the journal still, and the next process begins with it."""

    def __init__(self, services: Services, tasks: Tasks, backends: Callable[[Substrate], Backend]) -> None:
        self._services = services
        self._tasks = tasks
        self._backends = backends
        self.closed = False  # nothing is tried again

    async def discard(self, row: SpareRow) -> None:
        backend = self._backends(Substrate(row.substrate))
        await self.until_done(lambda: backend.discard(SandboxId(row.id), row.record), row.id)

    async def until_done(self, remove: Callable[[], Awaitable[None]], id: str) -> None:
        """With growing back-off. Whoever waits for the first try need not wait for the others."""
        if await self._tried(remove, id):
            return

        async def again() -> None:
            delay_s = _FIRST_PAUSE_S
            while True:
                await self._services.sleep(delay_s)
                if await self._tried(remove, id):
                    return
                delay_s = min(2 * delay_s, limits.DESTROY_RETRY_S_MAX)

        if not self.closed:
            self._tasks.spawn(again())

    async def _tried(self, remove: Callable[[], Awaitable[None]], id: str) -> bool:
        try:
            await remove()
            await self._services.journal.forget_spare(id)
        except DsecError as error:
            log.warning("an instance could not be removed yet", instance=id, error=str(error))
            return False
        return True
