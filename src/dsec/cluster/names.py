"""Names of sandboxes, unique within a project over all nodes: one entry each, taken before the node is asked."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from dsec.cluster.registry import Bucket, Entry, Registry, key_of
from dsec.core.clock import Clock, SteadyWall
from dsec.core.errors import ConflictError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import CREATE_TIMEOUT_S_MAX
from dsec.wire.codec import pack, unpack

_ROUNDS: Final = 8


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """NAMES/<project>.<name>."""

    node: str
    operation: str  # the key of the create, or a random word
    at: float
    sandbox: str | None = None  # None until it is there


@dataclass(frozen=True, slots=True)
class Claim:
    place: str
    holder: Holder
    revision: int


# Whether the sandbox that an entry speaks of still has the name. Raises UnavailableError when that cannot be said.
StillThere = Callable[[Holder, str, str], Awaitable[bool]]


class Names:
    """Entries of sandboxes that have ended stay until the watcher takes them away (`endednames`), or somebody wants the
    name: then their node is asked."""

    def __init__(self, registry: Registry, clock: Clock, still_there: StillThere) -> None:
        self._registry = registry
        self._wall = SteadyWall(clock)
        self._still_there = still_there

    async def claim(self, project: str, name: str, node: NodeId, key: str | None) -> Claim:
        """Raises ConflictError when another sandbox has it, or another create is about to."""
        place = key_of(project, name)
        holder = Holder(node=node, operation=key or f"once-{secrets.token_hex(12)}", at=self._wall.now_s())
        for _ in range(_ROUNDS):
            entry = await self._registry.get(Bucket.NAMES, place)
            try:
                if entry is None:
                    return Claim(place, holder, await self._registry.create(Bucket.NAMES, place, pack(holder)))
                await self._check_free(entry, project, name, holder)
                return await self._write(Claim(place, holder, entry.revision))
            except _TakenError as error:
                raise ConflictError(
                    f"the name {name!r} is in use",
                    hint=f"choose another name, or end the sandbox that has it: `dsec rm {name}`",
                    sandbox=error.sandbox,
                ) from None
            except ConflictError:
                continue  # somebody else has written it meanwhile
        raise UnavailableError(f"the name {name!r} changes hands all the time", retry_after_s=1.0)

    async def keep(self, claim: Claim, sandbox: str) -> None:
        """The sandbox is there."""
        await self._try(claim, msgspec.structs.replace(claim.holder, sandbox=sandbox))

    async def move(self, claim: Claim, node: NodeId) -> Claim:
        """Raises ConflictError when it was lost meanwhile."""
        return await self._write(Claim(claim.place, msgspec.structs.replace(claim.holder, node=node), claim.revision))

    async def drop(self, claim: Claim) -> None:
        """The create has failed for sure."""
        try:
            await self._registry.delete(Bucket.NAMES, claim.place, revision=claim.revision)
        except (ConflictError, UnavailableError):
            return  # it is not ours any more, or will be found to be nobody's

    async def _try(self, claim: Claim, holder: Holder) -> None:
        try:
            await self._write(Claim(claim.place, holder, claim.revision))
        except (ConflictError, UnavailableError):
            return  # the node answers for it

    async def _write(self, claim: Claim) -> Claim:
        revision = await self._registry.update(Bucket.NAMES, claim.place, pack(claim.holder), revision=claim.revision)
        return Claim(claim.place, claim.holder, revision)

    async def _check_free(self, entry: Entry, project: str, name: str, ours: Holder) -> None:
        holder = unpack(entry.value, Holder)
        if holder.operation == ours.operation:
            return  # asked for again
        if await self._still_there(holder, project, name):
            raise _TakenError(holder.sandbox)
        if holder.sandbox is None and ours.at - holder.at < CREATE_TIMEOUT_S_MAX:
            raise _TakenError(None)  # on its way to its node, for all we know


class _TakenError(Exception):
    def __init__(self, sandbox: str | None) -> None:
        super().__init__(sandbox)
        self.sandbox = sandbox
