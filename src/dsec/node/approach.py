"""A channel to an agent that is only coming to be: it finds our hello when it begins, and may have answered before its
backend has told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dsec.agent.client import AgentClient
from dsec.backends.base import Entrance
from dsec.core.errors import DsecError, SandboxFaultError
from dsec.node.tasks import Tasks

_FIRST_S: Final = 0.002  # by then a launch on an idle machine listens for us
_TRIES: Final = 6  # each after twice as long


class Approach:
    """Tries to reach the agent of one sandbox until somebody asks for the client, or a few times. Whoever made it calls
    `client` or `close`."""

    def __init__(self, entrance: Entrance, *, sandbox: str, tasks: Tasks) -> None:
        self._entrance = entrance
        self._sandbox = sandbox
        self._reached = False
        self._task = tasks.spawn(self._run(), awaited=True)

    async def client(self) -> AgentClient | None:
        """Of an agent that runs by now. None: it has not been reached this way."""
        if not self._reached:
            self._task.cancel()
            return None
        return await self._task

    def close(self) -> None:
        """Idempotent. The client that was given out is closed as well."""
        self._task.cancel()
        if self._task.done() and not self._task.cancelled() and (client := self._task.result()) is not None:
            client.close()

    async def _run(self) -> AgentClient | None:
        pause_s = 0.0  # one that was prepared listens already
        for _ in range(_TRIES):
            await asyncio.sleep(pause_s)
            pause_s = 2 * pause_s or _FIRST_S
            if not self._entrance.exists():
                continue  # in a burst a launch waits for its turn, and trying to connect is dear
            try:
                return await AgentClient.connect(self._reach, sandbox=self._sandbox)
            except SandboxFaultError:
                pass
            except DsecError:
                break  # it, or the launch, has failed: that is told by whoever finds out
        return None

    async def _reach(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        transport = await self._entrance.connect(factory)
        self._reached = True
        return transport
