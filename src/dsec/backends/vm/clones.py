"""Clones: who each of them is, which the machine that they all were does not know; and how large they are."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Collection
from functools import partial
from typing import Any, Final, Protocol

from dsec.agent.client import AgentClient
from dsec.backends.base import InstanceSpec
from dsec.backends.vm.instance import MachineInstance
from dsec.backends.vm.saved import SavedMachine
from dsec.core.clock import SystemClock
from dsec.core.errors import CapacityError, DsecError, InvalidArgumentError, LaunchError, UnsupportedError
from dsec.core.ids import new_exec_id
from dsec.core.limits import MIB
from dsec.core.spec import NetworkMode, SandboxSpec
from dsec.core.units import format_size
from dsec.wire.agent import ClaimArgs, Exec

_PROCESSORS_MAX: Final = 64
_SEED_BYTES: Final = 64
_REHEARSED: Final = b"true"
_REHEARSALS: Final = 2  # an emulator translates the rest at the second: 20 ms of 250
_REHEARSED_S: Final = 10.0  # then its agent kills it: the image's shell is anybody's
_REHEARSED_BYTES_MAX: Final = 4096
_REHEARSAL_S: Final = 120.0  # of all of it, where many boot at once


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
    """Before anything of a user runs in it: its randomness, its clock, its name (`args`; a spare has none yet, and is
    rehearsed). All clones have been one machine. One that was saved serves another sandbox from here on. Raises
    LaunchError."""
    serves = instance.id if saved is None else saved.manifest.sandbox
    try:
        # Many that begin at once share few processors, and none of them is dead for that.
        connect = partial(made.connect, timeout_s=wait_s)
        client = await AgentClient.connect(connect, sandbox=serves, open_timeout_s=wait_s)
    except DsecError as error:
        raise LaunchError(f"the agent of a clone does not answer: {error.message}", step="agent") from error
    try:
        await client.reseed(secrets.token_bytes(_SEED_BYTES), another=saved is not None)
        await client.set_time(SystemClock(), paused_s=0.0)
        if args is not None:
            await client.claim(args)
        elif saved is None:  # what was saved stands still until it is claimed
            await rehearse(client)
    finally:
        client.close()


async def rehearse(client: AgentClient) -> None:
    """A command of the image's shell, in a machine that is nobody's yet: what the first one of a caller would wait for
    (the kernel's caches, and where it is emulated what is translated) is there then. Nothing of it is left, not even
    its name. An image without a shell, and an agent that was built before there were rehearsals, are as they are.
    Raises LaunchError when it does not end."""
    try:
        async with asyncio.timeout(_REHEARSAL_S):
            for _ in range(_REHEARSALS):
                await _rehearse_once(client)
    except (InvalidArgumentError, CapacityError):
        return
    except TimeoutError as error:
        raise LaunchError("a rehearsal in a machine does not end", step="agent") from error


async def _rehearse_once(client: AgentClient) -> None:
    id = new_exec_id()
    stream = await client.exec(
        Exec(id=id, shell=_REHEARSED, timeout_s=_REHEARSED_S, grace_s=0.0, output_bytes_max=_REHEARSED_BYTES_MAX)
    )
    async for _ in stream:
        pass
    await client.exit_ack(id)


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
