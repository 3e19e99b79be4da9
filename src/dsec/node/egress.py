"""Sandboxes with network `proxied`: attached to the node's forwarder while they live, by the rules that they have.

The journal has the rules; what is carried follows it. Nothing is carried for a sandbox that is not attached, so that
whatever fails here cuts connections off, and lets nothing through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.backends.forwarding import NETWORK, HasNetwork, MakeForwarder, NetworkPlace, Rules
from dsec.backends.machines import Sleeps
from dsec.core import limits
from dsec.core.egress import parse_egress
from dsec.core.errors import DsecError, LaunchError, Outcome, SandboxStateError, UnavailableError, UnsupportedError
from dsec.core.spec import NetworkMode
from dsec.node.denials import Denials
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.egress import EgressCounts, EgressRule

if TYPE_CHECKING:
    from dsec.core.clock import Clock
    from dsec.node.journal import Journal
    from dsec.node.registry import Registry
    from dsec.node.services import Sleep
    from dsec.node.supervisor import Supervisor
    from dsec.node.tasks import Tasks

log = get_logger(__name__)

_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 30.0
_AGAIN_S: Final = 10.0  # to wait for an attachment that is under way
_COUNTS_S: Final = 0.25  # an answer of all is good for so long


class NodeEgress:
    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        clock: Clock,
        tasks: Tasks,
        sleep: Sleep,
        make_forwarder: MakeForwarder | None,
    ) -> None:
        """`make_forwarder` None: this node has no sandboxes with that network."""
        self._registry = registry
        self._tasks = tasks
        self._sleep = sleep
        self._clock = clock
        self._again: dict[str, asyncio.Task[None]] = {}
        self._denials = Denials(registry, journal, clock, tasks, sleep)
        self._forwarder = None if make_forwarder is None else make_forwarder(self._denials.note)
        self._counted: dict[str, EgressCounts] = {}
        self._counted_at = -_COUNTS_S
        self._counting = asyncio.Lock()

    def opener(self, sandbox: Supervisor) -> Callable[[NetworkPlace], Awaitable[None]] | None:
        """For its backend, where it runs as soon as it is made; None for one without a network."""
        return partial(self._open, sandbox) if _is_proxied(sandbox) else None

    async def open(self, sandbox: Supervisor) -> None:
        """Before anybody uses it. Raises LaunchError."""
        if _is_proxied(sandbox):
            await self._open(sandbox)

    async def _open(self, sandbox: Supervisor, place: NetworkPlace | None = None) -> None:
        try:
            await self._attach(sandbox, place)
        except DsecError as error:
            metrics.EGRESS_ATTACH_FAILURES.inc()
            raise LaunchError(
                f"the sandbox has no way out: {error.message}", hint=error.hint, step=NETWORK, sandbox=sandbox.id
            ) from error

    async def follow(self, sandbox: Supervisor) -> None:
        """Of one that wakes as another process, and stands still yet. Raises what attaching raises."""
        if _is_proxied(sandbox):
            await self._attach(sandbox)

    def reopen(self, sandbox: Supervisor) -> None:
        """After a restart of the node or a rollback, and in the background, until it is so or the sandbox has ended;
        one that sleeps is attached when it wakes."""
        if not _is_proxied(sandbox) or _is_asleep(sandbox) or sandbox.id in self._again:
            return
        task = self._tasks.spawn(self._until_attached(sandbox))
        self._again[sandbox.id] = task
        task.add_done_callback(lambda _: self._again.pop(sandbox.id, None))

    def drop(self, sandbox: Supervisor) -> None:
        """It has ended, and its processes with it: what is left of it is sockets of the forwarder."""
        self._denials.forget(sandbox.id)
        if not _is_proxied(sandbox):
            return
        task = self._again.pop(sandbox.id, None)
        if task is not None:
            task.cancel()
        with suppress(DsecError):  # a node that stops sweeps at its next start
            self._tasks.spawn(self._detach(sandbox.id))

    def tell_soon(self, id: str) -> None:
        """A command of a caller has ended there: what it was refused is told without waiting."""
        self._denials.tell_soon(id)

    async def set(self, sandbox: Supervisor, egress: tuple[str, ...] | None) -> None:
        """Journalled first: what a caller was told to hold is what the next process makes hold.

        Raises SandboxStateError, GoneError, StorageError (nothing has changed); UnavailableError: it will hold as soon
        as the forwarder can be reached.
        """

        async def act() -> None:
            sandbox.check_alive()
            if not _is_proxied(sandbox):
                raise SandboxStateError(
                    f"the sandbox has network {sandbox.row.spec.network}, and reaches nothing",
                    sandbox=sandbox.id,
                    hint="a network is chosen at the create: network='proxied'",
                )
            spec = msgspec.structs.replace(sandbox.row.spec, egress=egress)
            await sandbox.move(sandbox.state, spec=spec)
            if _is_asleep(sandbox):
                return
            try:
                await self._apply(sandbox)
            except DsecError as error:
                raise UnavailableError(
                    f"the rules are kept, and do not hold yet: {error.message}",
                    sandbox=sandbox.id,
                    outcome=Outcome.UNKNOWN,
                    retry_after_s=1.0,
                ) from error

        await sandbox.serially(act)

    async def measure(self, sandbox: Supervisor) -> None:
        """What has passed since it was attached is told to its meter."""
        if self._forwarder is None or not _is_proxied(sandbox):
            return
        async with self._counting:  # many are measured in a row: one answer is of all
            if self._clock.monotonic_s() - self._counted_at >= _COUNTS_S:
                try:
                    self._counted = await self._forwarder.counts()
                except DsecError:
                    return
                self._counted_at = self._clock.monotonic_s()
        found = self._counted.get(sandbox.id)
        if found is not None:
            sent, received = sandbox.meter.note_traffic(found.up_bytes, found.down_bytes)
            metrics.EGRESS_BYTES.labels("sent").inc(sent)
            metrics.EGRESS_BYTES.labels("received").inc(received)

    async def sweep(self) -> None:
        """At the start: what an earlier process could not detach any more."""
        if self._forwarder is None:
            return
        with suppress(DsecError):
            for id in await self._forwarder.counts():
                # A sandbox is known before it is attached: one of which nothing is known here has ended.
                if self._registry.find(id) is None:
                    await self._forwarder.detach(id)

    async def close(self) -> None:
        """What is attached stays so."""
        if self._forwarder is not None:
            await self._forwarder.close()

    # -- inside ------------------------------------------------------------------------------------

    async def _attach(self, sandbox: Supervisor, place: NetworkPlace | None = None) -> None:
        """`place`: of an instance that is being made."""
        if place is None and isinstance(sandbox.instance, HasNetwork):
            place = sandbox.instance.network_place
        if self._forwarder is None or place is None:
            raise UnsupportedError("sandboxes of this node have no network")
        await self._forwarder.attach(sandbox.id, place.pid, place.start_ticks, _rules_of(sandbox))

    async def _apply(self, sandbox: Supervisor) -> None:
        assert self._forwarder is not None
        again = self._again.get(sandbox.id)
        if again is not None:  # it may be on its way with the rules of before
            await asyncio.wait([again], timeout=_AGAIN_S)
            if not again.done():
                raise UnavailableError("its network is still being attached")
        try:
            await self._forwarder.rules(sandbox.id, _rules_of(sandbox))
        except BaseException:
            # Whether it has them, or those of before, is not known.
            self.reopen(sandbox)
            raise

    async def _until_attached(self, sandbox: Supervisor) -> None:
        retry_s = _RETRY_S
        while not sandbox.ended and not _is_asleep(sandbox):
            before = sandbox.row.spec.egress, sandbox.instance
            try:
                await self._attach(sandbox)
                if before == (sandbox.row.spec.egress, sandbox.instance):
                    return
                continue  # there are other rules meanwhile, or it was rolled back
            except DsecError as error:
                metrics.EGRESS_ATTACH_FAILURES.inc()
                log.warning("a sandbox could not be attached to its network", sandbox=sandbox.id, error=str(error))
            with suppress(DsecError):
                await self._detach_now(sandbox.id)  # by rules that are no more it must not go on
            await self._sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_S_MAX)

    async def _detach(self, id: str) -> None:
        retry_s = _RETRY_S
        for _ in range(limits.RECONNECTS_MAX):
            try:
                await self._detach_now(id)
                return
            except DsecError as error:
                log.warning("a sandbox could not be detached from its network", sandbox=id, error=str(error))
            await self._sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_S_MAX)

    async def _detach_now(self, id: str) -> None:
        if self._forwarder is not None:
            await self._forwarder.detach(id)


def _is_proxied(sandbox: Supervisor) -> bool:
    return sandbox.row.spec.network is NetworkMode.PROXIED


def _is_asleep(sandbox: Supervisor) -> bool:
    """No process of it runs."""
    return isinstance(sandbox.instance, Sleeps) and sandbox.instance.asleep


def _rules_of(sandbox: Supervisor) -> Rules:
    egress = sandbox.row.spec.egress
    return None if egress is None else tuple(EgressRule(rule.host, rule.ports) for rule in parse_egress(egress))
