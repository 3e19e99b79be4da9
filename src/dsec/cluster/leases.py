"""Who may do what only one may do at a time: a key with a time to live that its holder refreshes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from dsec.cluster.registry import Bucket, Registry
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that was got. Later holders have larger tokens: who is handed one refuses what comes with a smaller."""

    name: str
    holder: str
    ttl_s: float
    token: int
    until: float  # on the holder's monotonic clock; from then on it must act as if it had lost the lease


class Lease(Protocol):
    async def acquire(self, name: str, holder: str, ttl_s: float) -> Held | None:
        """None while somebody has it, `holder` included: a name of one life of one process."""
        ...

    async def renew(self, held: Held) -> Held:
        """Raises ConflictError when it was lost, UnavailableError when that cannot be said: then try until `until`."""
        ...

    async def release(self, held: Held) -> None:
        """Lost already is no error."""
        ...

    async def holder(self, name: str) -> str | None: ...


class RegistryLease:
    """On the compare-and-set and the times to live of a Registry, whichever form it has."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Held | None:
        until = self._clock.monotonic_s() + ttl_s
        try:
            token = await self._registry.create(Bucket.LEASES, name, holder.encode(), ttl_s=ttl_s)
        except ConflictError:
            return None
        return Held(name, holder, ttl_s, token, until)

    async def renew(self, held: Held) -> Held:
        # Counted from before the request: its time to live may begin as soon as it is sent.
        until = self._clock.monotonic_s() + held.ttl_s
        token = await self._registry.update(
            Bucket.LEASES, held.name, held.holder.encode(), revision=held.token, ttl_s=held.ttl_s
        )
        return replace(held, token=token, until=until)

    async def release(self, held: Held) -> None:
        try:
            await self._registry.delete(Bucket.LEASES, held.name, revision=held.token)
        except ConflictError:
            return

    async def holder(self, name: str) -> str | None:
        entry = await self._registry.get(Bucket.LEASES, name)
        return None if entry is None else entry.value.decode("utf-8", "replace")
