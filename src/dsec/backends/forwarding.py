"""What carries the connections of instances with network `proxied`: nothing else of a network reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, runtime_checkable

from dsec.wire.egress import AttachAnswer, EgressCounts, EgressDenied, EgressRule

NETWORK: Final = "network"  # the step of a create

Rules = tuple[EgressRule, ...] | None
"""None: all that is public."""


class NetworkPlace(NamedTuple):
    """A process of this host, in whose network namespace an instance is."""

    pid: int
    start_ticks: int


@runtime_checkable
class HasNetwork(Protocol):
    """An instance whose connections can be forwarded."""

    @property
    def network_place(self) -> NetworkPlace: ...


class Forwarder(Protocol):
    """One per node (`backends.egress.Egress`). It outlives the node's process; when it has died itself, another is
    started and all that was attached is attached again: nothing is carried before."""

    async def attach(self, sandbox: str, pid: int, start_ticks: int, rules: Rules) -> AttachAnswer:
        """From here on what it asks for is carried, by these rules; those of before are replaced. Idempotent.

        Raises NotFoundError when that process has ended, HostError, CapacityError, UnavailableError, DeadlineError.
        """
        ...

    async def rules(self, sandbox: str, rules: Rules) -> None:
        """Of one that is attached. Connections that are still allowed go on, the others are cut. Raises as `attach`."""
        ...

    async def detach(self, sandbox: str) -> EgressCounts:
        """Nothing of it is carried any more. Idempotent. Raises UnavailableError, DeadlineError."""
        ...

    async def counts(self) -> dict[str, EgressCounts]:
        """Of all that it has. Raises as `detach`."""
        ...

    async def close(self) -> None:
        """It goes on by itself. Idempotent."""
        ...


MakeForwarder = Callable[[Callable[[EgressDenied], None]], Forwarder]
"""Given whom to tell of what was refused."""
