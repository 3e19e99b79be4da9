"""The forwarder of fake instances: it notes what it was told, and carries nothing."""

from __future__ import annotations

from collections.abc import Callable

from dsec.backends.fake.host import FakeHost
from dsec.backends.forwarding import Rules
from dsec.core.errors import NotFoundError, UnavailableError
from dsec.core.faults import fault_point
from dsec.wire.egress import AttachAnswer, EgressCounts, EgressDenied


class FakeForwarder:
    """Of a host: it goes on when a node's process ends. Failures come through the fault points `fake.egress.attach`,
    `fake.egress.rules` and `fake.egress.detach`."""

    def __init__(self, host: FakeHost, denied: Callable[[EgressDenied], None]) -> None:
        self._host = host
        host.tell_denied = denied

    async def attach(self, sandbox: str, pid: int, start_ticks: int, rules: Rules) -> AttachAnswer:
        self._fail("attach")
        await self._host.delay("egress.attach")
        fresh = sandbox not in self._host.egress
        self._host.egress[sandbox] = rules
        return AttachAnswer(fresh=fresh, ipv6=False)

    async def rules(self, sandbox: str, rules: Rules) -> None:
        self._fail("rules")
        if sandbox not in self._host.egress:
            raise NotFoundError(f"sandbox {sandbox} has no network")
        self._host.egress[sandbox] = rules

    async def detach(self, sandbox: str) -> EgressCounts:
        self._fail("detach")
        self._host.egress.pop(sandbox, None)
        return self._host.traffic.pop(sandbox, EgressCounts(sandbox=sandbox))

    async def counts(self) -> dict[str, EgressCounts]:
        return {id: self._host.traffic.get(id, EgressCounts(sandbox=id, alive=True)) for id in self._host.egress}

    async def close(self) -> None:
        """It is the host's."""

    def _fail(self, step: str) -> None:
        try:
            fault_point(f"fake.egress.{step}")
        except OSError as error:
            raise UnavailableError(f"the forwarder does not answer: {error}") from error
