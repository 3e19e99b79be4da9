"""A node's service as the cluster may use it: nothing new while it is not wanted, nothing at all once it is fenced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsec.cluster.members.membership import Membership, Standing
from dsec.core.errors import CapacityError, Outcome, UnavailableError
from dsec.wire.node import Caller, Method, NodeService, Stream
from dsec.wire.records import NodeLoad

_NEW: Final = frozenset((Method.CREATE, Method.CREATE_MANY, Method.FORK, Method.CALL))


class FencedService:
    """Between the listener and the node (`wire.node.NodeService`)."""

    def __init__(
        self, service: NodeService, membership: Membership, *, knows: Callable[[str, str], bool] = lambda *_: False
    ) -> None:
        """`knows`: whether the node has a create of this project and key. Such a one is not new."""
        self._service = service
        self._membership = membership
        self._knows = knows

    def load(self) -> NodeLoad:
        return self._service.load()

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        self._check(method, caller, key)
        return await self._service.call(method, body, caller=caller, key=key, timeout_s=timeout_s)

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        self._check(method, caller, None)
        await self._service.serve_stream(method, body, stream, caller=caller)

    def _check(self, method: Method, caller: Caller, key: str | None) -> None:
        member = self._membership
        standing = member.standing
        if standing in (Standing.FENCED, Standing.OUTSIDE):
            raise UnavailableError(
                f"this process is not in charge of node {member.node}", outcome=Outcome.UNCHANGED, retry_after_s=1.0
            )
        if method not in _NEW or member.admits:
            return
        if method == Method.CREATE and key is not None and self._knows(caller.project, key):
            return  # what came of it is asked for
        if standing == Standing.LAPSED:
            raise UnavailableError(
                f"node {member.node} has no contact with the cluster and begins nothing new",
                outcome=Outcome.UNCHANGED,
                retry_after_s=1.0,
            )
        raise CapacityError(
            f"node {member.node} takes nothing new: {member.wanted}", detail={"reason": str(member.wanted)}
        )
