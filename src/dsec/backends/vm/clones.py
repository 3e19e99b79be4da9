"""Clones: who each of them is, which the machine that they all were does not know; and how large they are."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection
from functools import partial
from typing import Any, Final, Protocol

from dsec.agent.client import AgentClient
from dsec.backends.base import InstanceSpec
from dsec.backends.vm.instance import MachineInstance
from dsec.backends.vm.saved import SavedMachine
from dsec.core.errors import DsecError, InvalidArgumentError, LaunchError, UnsupportedError
from dsec.core.limits import MIB
from dsec.core.spec import NetworkMode, SandboxSpec
from dsec.core.units import format_size
from dsec.wire.agent import ClaimArgs

_PROCESSORS_MAX: Final = 64
_SEED_BYTES: Final = 64


class Sized(Protocol):
    """What a machine is made of, as far as the host has to give it."""

    @property
    def processors(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def disk_bytes(self) -> int: ...

    @property
    def network(self) -> bool: ...


async def awaken(
    made: MachineInstance[Any],
    instance: InstanceSpec,
    args: ClaimArgs | None,
    saved: SavedMachine | None,
    *,
    wait_s: float,
) -> None:
    """Before anything of a user runs in it: its randomness, its clock, its name (`args`; a spare has none yet). All
    clones have been one machine. One that was saved serves another sandbox from here on. Raises LaunchError."""
    serves = instance.id if saved is None else saved.manifest.sandbox
    try:
        # Many that begin at once share few processors, and none of them is dead for that.
        connect = partial(made.connect, timeout_s=wait_s)
        client = await AgentClient.connect(connect, sandbox=serves, open_timeout_s=wait_s)
    except DsecError as error:
        raise LaunchError(f"the agent of a clone does not answer: {error.message}", step="agent") from error
    try:
        await client.reseed(secrets.token_bytes(_SEED_BYTES), another=saved is not None)
        await client.clock(paused_s=0.0, wall_s=time.time())
        if args is not None:
            await client.claim(args)
    finally:
        client.close()


def check_same(had: Sized, spec: SandboxSpec) -> None:
    """Raises InvalidArgumentError for a machine that goes on from a snapshot as another one than it was."""
    if spec.network is not NetworkMode.NONE and not had.network:
        raise InvalidArgumentError(
            "a machine that goes on from a snapshot without a network card has none", hint="use network='none'"
        )
    asked = (
        processors_of(spec),
        memory_of(spec),
        had.disk_bytes if spec.disk_bytes is None else disk_of(spec.disk_bytes),
    )
    if asked != (had.processors, had.memory_bytes, had.disk_bytes):
        raise InvalidArgumentError(
            "a machine that goes on from a snapshot has the processors, the memory and the disk that it had",
            hint=f"cpu {had.processors}, memory {format_size(had.memory_bytes)}, disk {format_size(had.disk_bytes)}",
        )


def check_network(spec: SandboxSpec, networks: Collection[NetworkMode]) -> None:
    """Raises UnsupportedError."""
    if spec.network not in networks:
        raise UnsupportedError(f"machines here have no network mode {spec.network.value!r}", hint="use network='none'")


def processors_of(spec: SandboxSpec) -> int:
    return max(1, min(_PROCESSORS_MAX, math.ceil(spec.cpu)))


def memory_of(spec: SandboxSpec) -> int:
    return -(-spec.memory_bytes // (2 * MIB)) * 2 * MIB


def disk_of(disk_bytes: int) -> int:
    return -(-disk_bytes // MIB) * MIB
