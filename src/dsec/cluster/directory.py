"""Where nodes are: what a replica needs to know of one before it can call it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dsec.core.ids import NodeId


class Address(NamedTuple):
    host: str
    port: int
    term: int  # of the membership that told of it


class Directory(Protocol):
    def address(self, node: NodeId) -> Address:
        """Raises NodeRetiredError for a node that never was a member or has left for good, and UnavailableError for one
        that is away."""
        ...
