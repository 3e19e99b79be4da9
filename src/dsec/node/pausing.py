"""Stopping everything inside a sandbox and letting it go on: for a pause, for a rest, and for the moment of a snapshot.

All of it happens in the sandbox's turn (`Supervisor.serially`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from dsec.backends.machines import GivesBack, Sleeps
from dsec.core import limits
from dsec.core.clock import Clock
from dsec.core.errors import (
    DeadlineError,
    DsecError,
    NotFoundError,
    SandboxStateError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.rungs import Rung
from dsec.core.states import EndCause, SandboxState
from dsec.node.events import event_of
from dsec.node.lifetime import resumed_row
from dsec.node.services import Services
from dsec.observe.logs import get_logger
from dsec.wire.events import EventKind

if TYPE_CHECKING:
    from dsec.node.supervisor import Supervisor

log = get_logger(__name__)


class Pausing:
    def __init__(self, sandbox: Supervisor, services: Services) -> None:
        self._sandbox = sandbox
        self._services = services
        self._held_bytes = sandbox.row.slept_bytes  # in memory, when it was paused

    async def pause(self, *, deep: bool = False) -> None:
        """`deep`: its memory goes to the disk, and nothing of it is left to run. Should that fail, it is paused."""
        sandbox, clock = self._sandbox, self._services.clock
        sandbox.check_alive()
        if deep and not (isinstance(sandbox.instance, Sleeps) and sandbox.instance.can_sleep):
            raise UnsupportedError(
                f"{sandbox.row.spec.substrate} sandboxes on this node cannot be paused deeply", sandbox=sandbox.id
            )
        if sandbox.state is not SandboxState.PAUSED:
            await self._pause(clock)
        elif sandbox.lifetime.resting:
            sandbox.lifetime.pause()
            await sandbox.move_anyway(SandboxState.PAUSED, resting=False)
        if deep:
            await self._sleep()

    async def rest(self, rung: Rung) -> bool:
        """In the sandbox's turn, if nobody uses it or wants it paused. False if it is not so, or cannot be of this one.
        Raises as `pause`."""
        return await self._sandbox.serially(lambda: self._rest(rung))

    async def _rest(self, rung: Rung) -> bool:
        sandbox, clock = self._sandbox, self._services.clock
        due = sandbox.lifetime.next_deadline()
        if not sandbox.lifetime.is_idle or due is None or due[1] is not rung or due[0] > clock.monotonic_s():
            return False  # it was used meanwhile
        sandbox.lifetime.climb()
        if not await self._take(rung):
            return False
        log.info("nobody uses a sandbox", sandbox=sandbox.id, rung=str(rung))
        with suppress(DsecError):  # it rests, whoever is told
            event = event_of(sandbox.row, EventKind.RESTED, clock.wall_s(), detail=str(rung))
            await self._services.journal.note([event])
        return True

    async def _take(self, rung: Rung) -> bool:
        sandbox = self._sandbox
        instance = sandbox.instance
        if rung is Rung.PAUSE:
            if sandbox.state is not SandboxState.RUNNING:
                return False
            await self._pause(self._services.clock, resting=True)
            return True
        if sandbox.state is not SandboxState.PAUSED:
            return False
        if rung is Rung.PAGE_OUT:
            return isinstance(instance, GivesBack) and instance.give_back()
        if not (isinstance(instance, Sleeps) and instance.can_sleep):
            return False
        try:
            with sandbox.changing_disk(""):
                pass
        except SandboxStateError:  # a snapshot is being made of what would go
            sandbox.lifetime.touch()
            return False
        await self._sleep()
        return True

    async def _pause(self, clock: Clock, *, resting: bool = False) -> None:
        sandbox = self._sandbox
        await sandbox.sample()
        self._held_bytes = min(sandbox.meter.memory_bytes, sandbox.row.spec.memory_bytes)
        await self._stop()
        left = sandbox.lifetime.running_left_s
        sandbox.lifetime.pause(resting=resting)
        await sandbox.move_anyway(
            SandboxState.PAUSED,
            resting=resting,
            paused_at=clock.wall_s(),
            paused_monotonic_s=clock.monotonic_s(),
            running_until=None,
            running_left_s=left,
        )

    async def _sleep(self) -> None:
        """What the journal says decides: from that on it sleeps, whatever still runs of it."""
        sandbox = self._sandbox
        instance = sandbox.instance
        assert isinstance(instance, Sleeps)
        if not instance.asleep:
            await instance.save()
            try:
                await sandbox.move(
                    SandboxState.PAUSED, record=sandbox.instance.record, asleep=True, slept_bytes=self._held_bytes
                )
            except BaseException:
                await instance.stay()
                raise
        await instance.sleep()
        self._services.memory.wake()

    async def _wake(self) -> None:
        """It stands still again; what the journal says of that comes before it goes on."""
        sandbox = self._sandbox
        instance = sandbox.instance
        if not isinstance(instance, Sleeps) or not instance.asleep:
            return
        try:
            hold, layers = await self._services.layers(sandbox.row.layers)
        except NotFoundError as error:
            raise StorageError(f"a layer of the sandbox is lost: {error.message}") from error
        try:
            await instance.wake(layers)
        finally:
            hold.release()  # the sandbox has its own
        try:
            await self._services.egress.follow(sandbox)
            await sandbox.move(SandboxState.RESUMING, record=sandbox.instance.record, asleep=False)
        except BaseException:
            await instance.sleep_on()  # as the journal has it
            raise

    async def resume_when_there_is_memory(self) -> None:
        """In the sandbox's turn. Raises ResumeNoMemoryError: it is paused as before (ruling 19)."""
        sandbox, services = self._sandbox, self._services
        if sandbox.state is SandboxState.PAUSED and self._has_given_back():
            wait_s = services.config.idle.resume_wait_s
            async with services.memory.room(sandbox.id, sandbox.row.project, self._held_bytes, wait_s):
                await sandbox.serially(self._resume)
        else:
            await sandbox.serially(self._resume)

    def _has_given_back(self) -> bool:
        instance = self._sandbox.instance
        asleep = isinstance(instance, Sleeps) and instance.asleep
        return asleep or (isinstance(instance, GivesBack) and instance.gave_back)

    async def _resume(self) -> None:
        sandbox = self._sandbox
        sandbox.check_alive()
        if sandbox.state is SandboxState.RUNNING:
            return
        if sandbox.state is not SandboxState.PAUSED or sandbox.instance is None:
            raise SandboxStateError(f"the sandbox is {sandbox.row.state} and cannot be resumed", sandbox=sandbox.id)
        await sandbox.move(SandboxState.RESUMING)
        try:
            await self._wake()
            await sandbox.instance.resume()
        except BaseException:
            await sandbox.move_anyway(SandboxState.PAUSED)
            raise
        await self.reach_agent(self.note_resumed())
        await sandbox.move_anyway(SandboxState.RUNNING)
        sandbox.arm()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nothing inside runs within the block; afterwards it is as it was. Should this process end in between, the
        next one finds the sandbox as it was being paused, and lets it go on."""
        sandbox = self._sandbox
        sandbox.check_alive()
        if sandbox.state is SandboxState.PAUSED:
            yield
            return
        began_s = self._services.clock.monotonic_s()
        await self._stop()
        try:
            yield
        finally:
            await self._go_on(began_s)

    async def _stop(self) -> None:
        """Frozen, in state `pausing`; or it runs on and this raises."""
        sandbox = self._sandbox
        instance, link = sandbox.running_instance(), sandbox.open_link()
        await sandbox.move(SandboxState.PAUSING)
        try:
            await sandbox.short.drain()
            link.suspend()
            with suppress(DsecError):
                await (await link.client()).freeze_prepare()
            await instance.pause(deadline_s=self._services.config.pause_deadline_s)
        except BaseException:
            link.resume()
            with suppress(DsecError):
                await (await link.client()).clock(paused_s=0.0)
            await sandbox.move_anyway(SandboxState.RUNNING)
            raise

    async def _go_on(self, began_s: float) -> None:
        sandbox = self._sandbox
        instance = sandbox.instance
        assert instance is not None
        try:
            await instance.resume()
        except DsecError as error:
            sandbox.open_link().resume()
            sandbox.fail(EndCause.PLATFORM_FAILURE, f"it could not be let go on after a snapshot: {error.message}")
            raise
        await self.reach_agent(max(0.0, self._services.clock.monotonic_s() - began_s))
        await sandbox.move_anyway(SandboxState.RUNNING)

    async def reach_agent(self, paused_s: float) -> None:
        """Tells the agent how long it slept. One that was frozen when this node started is connected to only now."""
        sandbox = self._sandbox
        link = sandbox.open_link()
        link.resume()
        try:
            client = await link.open(tries=limits.RECONNECTS_MAX) if link.never_opened else await link.client()
            with suppress(DeadlineError, UnavailableError):
                await client.set_time(self._services.clock, paused_s=paused_s)
        except DsecError as error:
            sandbox.fail(EndCause.SANDBOX_FAULT, f"its agent does not answer after a pause: {error.message}")
            raise

    def note_resumed(self) -> float:
        """Both clocks go on; the row holds it until it is journalled with the next move."""
        sandbox = self._sandbox
        now = self._services.clock.monotonic_s()
        sandbox.row, paused_s = resumed_row(sandbox.row, sandbox.lifetime, now)
        return paused_s
