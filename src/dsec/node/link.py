"""The channel to one sandbox's agent: opened, kept, opened again when it is lost, given up when it cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dsec.agent.client import AgentClient
from dsec.backends.base import Instance
from dsec.core.errors import DsecError, ProtocolError, SandboxFaultError
from dsec.core.limits import CHANNEL_CALM_S, CHANNEL_LOSSES_MAX, PREAMBLE_TIMEOUT_S, RECONNECTS_MAX
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.agent import HelloReply

log = get_logger(__name__)

_RETRY_FIRST_S: Final = 0.05
_RETRY_S_MAX: Final = 1.0


class AgentLink:
    """One at a time has the channel open. `on_hello` runs at every opening, before anybody gets the client."""

    def __init__(
        self,
        instance: Instance,
        *,
        boot_id: str,
        on_hello: Callable[[AgentClient], None],
        on_fault: Callable[[SandboxFaultError], None],
    ) -> None:
        self.boot_id = boot_id  # of the agent; "" until its first hello
        self._instance = instance
        self._on_hello = on_hello
        self._on_fault = on_fault
        self._client: AgentClient | None = None
        self._failure: DsecError | None = None
        self._changed = asyncio.Event()
        self._active = asyncio.Event()
        self._active.set()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, *, timeout_s: float = PREAMBLE_TIMEOUT_S, tries: int = 1) -> AgentClient:
        """The first channel. Raises as AgentClient.connect, or SandboxFaultError when it is another agent."""
        client = await self._try(timeout_s, tries)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(client))
        return client

    def take(self, client: AgentClient) -> None:
        """A channel that is open already, as the first. Raises SandboxFaultError when it is another agent's."""
        self._check_same_agent(client.hello)
        self._on_hello(client)
        self._client = client
        self._changed.set()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(client))

    async def client(self) -> AgentClient:
        """The open channel; waits while it is being opened again. Raises once it is given up."""
        while True:
            client = self._client
            if client is not None and client.channel.failure is None:
                return client
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.channel.failure is None

    @property
    def never_opened(self) -> bool:
        return self._keeper is None

    def suspend(self) -> None:
        """The agent is about to be frozen: a lost channel is nobody's fault until it is thawed."""
        self._active.clear()

    def resume(self) -> None:
        self._active.set()

    async def close(self, reason: DsecError) -> None:
        """Idempotent. Whoever waits for the channel gets `reason`."""
        if self._failure is None:
            self._failure = reason
        keeper, self._keeper = self._keeper, None
        if keeper is not None and keeper is not asyncio.current_task():
            keeper.cancel()
            await asyncio.wait([keeper])
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._changed.set()

    # -- inside ------------------------------------------------------------------------------------

    async def _keep(self, client: AgentClient) -> None:
        loop = asyncio.get_running_loop()
        losses = 0  # in a row, of channels that had just been opened
        while True:
            opened_s = loop.time()
            reason = await client.channel.closed()
            if isinstance(reason, ProtocolError):
                metrics.AGENT_VIOLATIONS.inc()
                self._give_up(reason.message, reason)
                return
            await self._active.wait()
            losses = losses + 1 if loop.time() - opened_s < CHANNEL_CALM_S else 0
            if losses > CHANNEL_LOSSES_MAX:
                self._give_up(f"its agent dropped {losses} connections in a row", reason)
                return
            log.warning("the channel to an agent was lost", sandbox=self._instance.id, reason=str(reason))
            if losses > 1:
                await asyncio.sleep(min(_RETRY_FIRST_S * 2**losses, _RETRY_S_MAX))
            again = await self._reconnect()
            if again is None:
                return
            client = again

    async def _reconnect(self) -> AgentClient | None:
        try:
            return await self._try(PREAMBLE_TIMEOUT_S, RECONNECTS_MAX)
        except DsecError as error:
            self._give_up(f"its agent cannot be reached: {error.message}", error)
            return None

    async def _try(self, timeout_s: float, tries: int) -> AgentClient:
        """With back-off in between. A broken protocol is not tried again."""
        delay_s = _RETRY_FIRST_S
        while True:
            tries -= 1
            try:
                return await self._connect(timeout_s)
            except ProtocolError:
                raise
            except DsecError:
                if tries <= 0:
                    raise
            # When the agent has died, the instance's exit ends this task.
            await asyncio.sleep(delay_s)
            delay_s *= 2

    async def _connect(self, timeout_s: float) -> AgentClient:
        client = await AgentClient.connect(
            self._instance.connect, sandbox=self._instance.id, open_timeout_s=max(timeout_s, 0.001)
        )
        try:
            self._check_same_agent(client.hello)
            self._on_hello(client)
        except BaseException:
            client.close()
            raise
        self._client = client
        self._changed.set()
        return client

    def _check_same_agent(self, hello: HelloReply) -> None:
        if self.boot_id and hello.boot_id != self.boot_id:
            raise SandboxFaultError("another agent answers than before", sandbox=self._instance.id)
        self.boot_id = hello.boot_id

    def _give_up(self, detail: str, cause: DsecError | None) -> None:
        failure = SandboxFaultError(f"the sandbox has failed: {detail}", sandbox=self._instance.id)
        failure.__cause__ = cause
        self._failure = failure
        self._changed.set()
        self._on_fault(failure)
