"""What every backend offers. Exec, sessions and files are not theirs: the agent speaks them over the channel."""

from __future__ import annotations

import asyncio
import enum
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dsec.backends.forwarding import NetworkPlace
from dsec.core.errors import UnsupportedError
from dsec.core.ids import NodeId, SandboxId
from dsec.core.spec import NetworkMode, SandboxSpec, Substrate
from dsec.core.states import EndCause


class Keeps(enum.StrEnum):
    """What a snapshot or fork carries over (ruling 20)."""

    NOTHING = "nothing"  # the ability is absent
    DISK = "disk"
    DISK_MEMORY = "disk+memory"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What instances of a backend can do on this host. An ability not listed raises UnsupportedError."""

    substrate: Substrate
    networks: frozenset[NetworkMode]
    pause: bool = False
    snapshot: Keeps = Keeps.NOTHING
    fork: Keeps = Keeps.NOTHING
    survives_node: bool = False  # instances run on while the node daemon is away
    memory_limit: bool = False
    cpu_limit: bool = False
    pids_limit: bool = False
    own_machine: bool = False  # its clock, its randomness and its name are its own, and for its agent to set
    warm: bool = False  # instances can be made before anybody asks, and claimed (`shape`, `claim`)
    disk_limit: str | None = None  # mechanism: "project", "image", "tmpfs"; None: not enforced
    disk_limit_reason: str = ""  # why it is none, or no cheaper one
    screen: bool = False  # instances have one (`backends.machines.HasScreen`), and a keyboard and a mouse
    layers: bool = True  # instances are made of an environment's layers; else of a machine image of that name
    volumes: bool = False  # directories of the node can be mounted into instances
    links: bool = False  # the node can listen on an instance's loopback
    links_by_agent: bool = False  # its agent can: its loopback is out of the node's reach
    devices: bool = False  # devices of the host can be given to instances
    network_reason: str = ""  # why there is none but `none`
    resource_view: str = "host"  # live | static | host (ruling 16)
    resource_view_reason: str = ""  # why it is no better


@dataclass(frozen=True, slots=True)
class Weakness:
    """What works less well, or protects less, than it could; told by doctor beside the fact of that name."""

    cost: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Can this host do it; if not, why, in words for a person. Tests skip with that reason."""

    usable: bool
    reason: str = ""
    hint: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # shown by doctor: mechanism → what was found
    weak: dict[str, Weakness] = field(default_factory=dict)  # of these facts


def require_root(who: str) -> None:
    """Before anything of an instance is made. Raises UnsupportedError."""
    if os.geteuid() != 0:
        raise UnsupportedError(f"{who} need root on the node", hint="start `dsec up` as root")


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only layer on this node's disk."""

    digest: str
    kind: str  # "erofs" | "directory"
    meta: str  # image file, or the directory
    blob: str | None = None


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """A directory of the node that is to be at a path of the instance."""

    path: str  # in the instance
    source: str  # the directory; with an image only its name
    image: str | None = None  # file with an ext4
    inode: int = 0  # of the directory, so that another one is not taken for it
    readonly: bool = False
    file: bool = False  # the source is a file, and so is what it covers


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device of the host that is to be in the instance, for everybody there."""

    path: str  # in the instance, below /dev
    major: int
    minor: int
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance as a backend gets it: the environment is resolved, defaults are filled in."""

    id: SandboxId
    node: NodeId
    spec: SandboxSpec
    layers: tuple[Layer, ...]  # lowest first
    env: dict[str, str]  # environment's and spec's, merged
    user: str | None
    workdir: str | None
    spare: bool = False  # for nobody yet: it runs nothing before it is claimed
    volumes: tuple[VolumeSource, ...] = ()
    upper_in_memory: bool = False  # what it writes is in memory whatever its disk would be, and goes with it
    background: bool = False  # runs when no other instance of the node wants the processor
    cpus: str | None = None  # such as "0-3,8": on these processors alone
    devices: tuple[DeviceNode, ...] = ()
    machine: str = ""  # id of the one, kept by the backend, that it goes on from; it becomes another one
    # By a backend whose instances run from the start, while they stand still yet: their network leads somewhere then.
    attach: Callable[[NetworkPlace], Awaitable[None]] | None = field(default=None, compare=False)

    @property
    def hostname(self) -> str:
        return (self.spec.name or self.id.replace("_", "-")).lower()[:63].rstrip("-.")


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """None: this host cannot tell."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    oom_kills: int | None = None
    pids: int | None = None
    disk_used_bytes: int | None = None
    disk_full: bool = False  # at its limit, of bytes or of files
    cpu_pressure_s: float | None = None
    memory_pressure_s: float | None = None
    frozen_s: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceExit:
    cause: EndCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    digest: str
    size_bytes: int  # on the disk of the node
    entries: int
    notes: str = ""  # what of it a layer cannot hold, in words
    merged: bool = False  # it has what the layers right below it had, too
    machine: str = ""  # no layer, but a machine that stands still, which its backend keeps by this id


class Capture(Protocol):
    """A layer in the making, of what an instance has written. One call at a time, in this order; then `close`.

    What goes wrong raises what the disk raises, LimitError, or SandboxFaultError; the instance is not touched by it.
    """

    async def look(self) -> bool:
        """Copies what is there while the instance runs; any number of times. True: another would hardly find more."""
        ...

    async def take(self, *, within_s: float) -> int:
        """Copies what has changed since; nothing inside may run meanwhile. How many bytes. Raises DeadlineError."""
        ...

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        """Makes the layer, one with `run` (layers right below it, lowest first, held by the caller) where that can be.

        It is held until `close`; who wants it for longer holds it by then.
        """
        ...

    async def close(self) -> None:
        """Whatever happened before: nothing of it is left but the layer. Idempotent."""
        ...


class Instance(Protocol):
    """A running instance. Only the node's supervisor calls these, one at a time but for `wait` and `usage`."""

    @property
    def id(self) -> SandboxId: ...

    @property
    def record(self) -> bytes:
        """Plain data from which `adopt` and `discard` work after a restart of the node."""
        ...

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A new byte channel to the agent; it supersedes the one of before. Raises SandboxFaultError."""
        ...

    async def usage(self) -> InstanceUsage: ...

    async def bound_memory(self, memory_bytes: int) -> None:
        """Another limit than that of its spec from now on. What it uses already may be above: then that is the limit,
        as near as the kernel comes. Raises HostError, or UnsupportedError where capabilities have no such limit."""
        ...

    def memory_now(self) -> int | None:
        """What it uses, in bytes. None: this host cannot tell."""
        ...

    def forget_memory_peak(self) -> None:
        """`memory_events` tells the peak from now on, where the host can do that; else None."""
        ...

    def memory_events(self) -> tuple[int | None, int]:
        """The peak in bytes, and processes killed for memory so far."""
        ...

    async def listen(self, address: str, port: int) -> socket.socket:
        """A TCP socket that listens on the instance's own loopback, at one of its 127.0.0.0/8; it does not block, and
        is the caller's to close. Raises OSError, such as EADDRINUSE where something inside has the port already;
        UnsupportedError where capabilities say so."""
        ...

    async def pause(self, *, deadline_s: float) -> None:
        """Nothing inside runs afterwards. Raises FreezeTimeoutError, and then everything runs on."""
        ...

    async def resume(self) -> None: ...

    async def snapshot(self) -> Capture:
        """Begins one; nothing has been copied yet. Raises UnsupportedError where capabilities say so."""
        ...

    async def wait(self) -> InstanceExit:
        """Returns when the agent has ended, however that came. Several may wait."""
        ...

    async def destroy(self) -> None:
        """Nothing is left on the host: process, mount, cgroup, id range, file. May be called at any time, twice."""
        ...


Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[asyncio.Transport]]
"""`Instance.connect`: a new byte channel to the agent."""

Intend = Callable[[bytes], Awaitable[None]]
"""Awaited by `create` with the instance's record before anything on the host is touched; it is kept when it returns."""


class Entrance(NamedTuple):
    """Where an agent is going to listen."""

    connect: Connect  # as `Instance.connect`; raises SandboxFaultError while nobody listens
    exists: Callable[[], bool]  # quick; nobody can listen before it does


class Backend(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    async def probe(self) -> Probe:
        """Tried, not inferred; cached by the backend for its lifetime."""
        ...

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> Instance:
        """Something running and reachable; or raises LaunchError (step named) and nothing is left on the host."""
        ...

    def approach(self, record: bytes) -> Entrance | None:
        """Of the agent that `create`, which has intended this record, is about to start. None: it cannot be reached
        before `create` returns."""
        ...

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        """What a spare must have been made with to become this instance: equal shapes, and `claim` can do the rest.
        None: no spare can. Raises as `create` for what this backend cannot give."""
        ...

    async def claim(self, spare: Instance, instance: InstanceSpec) -> Instance:
        """The spare (made by `create` with `spare`, of the same shape) as this instance, with its id and record; its
        agent is told by the caller. Raises LaunchError: the spare is to be destroyed then. Writes nothing down."""
        ...

    async def adopt(self, id: SandboxId, record: bytes) -> Instance:
        """The instance of a journalled record, still running. Raises GoneError with the cause if it is not."""
        ...

    async def discard(self, id: SandboxId, record: bytes) -> None:
        """Remove whatever of a recorded instance is on the host, running or half made. Idempotent."""
        ...

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Let go of every layer that is not among these, so that the room of its removed files is free again.

        An instance that uses one goes on. Raises UnavailableError or HostError, and then some are kept.
        """
        ...

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        """What things on the node's disk are called that belong to the instances of these records."""
        ...

    async def sweep(self, records: Collection[bytes]) -> None:
        """Remove, in time, what is on the disk of instances that none of these records names: none runs any more."""
        ...

    async def close(self) -> None:
        """Release what the backend holds in this process. Instances that survive the node run on."""
        ...
