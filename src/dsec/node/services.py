"""What the parts of a node share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec.core.clock import Clock
from dsec.node.config import NodeConfig
from dsec.node.journal import Journal
from dsec.node.recordplace import RecordPlace
from dsec.node.tasks import Tasks

if TYPE_CHECKING:
    from dsec.backends.base import Layer
    from dsec.node.egress import NodeEgress
    from dsec.node.environments import Hold
    from dsec.node.jobs import NodeJobs
    from dsec.node.links import NodeLinks
    from dsec.node.memoryqueue import MemoryQueue
    from dsec.node.volumes import Volumes

Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class Services:
    """One record for all supervisors of a node. `closing` is set once, when the node begins to stop."""

    config: NodeConfig
    journal: Journal
    clock: Clock
    sleep: Sleep
    tasks: Tasks  # of the node: they outlive a sandbox
    schedule: Callable[[str, float], None]  # wake the reaper for a sandbox (monotonic time)
    forget: Callable[[str], None]  # a sandbox of this id has ended, and nothing of it is left
    collect: Callable[[], None]  # soon, for layers that nothing may name any more
    records: RecordPlace
    read_failure: Callable[[Sequence[str], float], Awaitable[str | None]]  # as of Environments
    layers: Callable[[Sequence[str]], Awaitable[tuple[Hold, tuple[Layer, ...]]]]  # as of Environments
    volumes: Volumes
    links: NodeLinks
    egress: NodeEgress
    jobs: NodeJobs
    memory: MemoryQueue
    closing: bool = False
