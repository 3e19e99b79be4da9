"""`dsec node --leave`: a machine that has left its cluster keeps no sandbox, no launcher, no mount and no identity."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from dsec.core.errors import ConflictError
from dsec.core.states import ENDED, EndCause
from dsec.node.supervisor import Supervisor
from dsec.serve.config import ServeConfig
from dsec.serve.identity import NODE, Identity, remove_identity
from dsec.serve.lock import RunLock
from dsec.serve.parts import NodePart
from dsec.serve.retire import retire_launcher

_AT_ONCE: Final = 16


def leave(config: ServeConfig, *, destroy: bool) -> int:
    """How many sandboxes were destroyed. Environments, volumes and snapshots stay where they are.

    Raises ConflictError while the node runs, and when sandboxes live that are not to be destroyed: then all is as it
    was. Done again after a failure, it goes on.
    """
    run_dir, directory = Path(config.run_dir), Path(config.cluster.identity)
    if (directory / NODE).exists():
        Identity.load(directory).check_role(node=True)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = RunLock.acquire(run_dir)
    try:
        ended = asyncio.run(_end(config, destroy=destroy))
    finally:
        lock.release()
    if (directory / NODE).exists():  # of an API replica on this machine nothing is taken
        remove_identity(directory)
    return ended


async def _end(config: ServeConfig, *, destroy: bool) -> int:
    run_dir, state_dir = Path(config.run_dir), Path(config.state_dir)
    ended = 0
    if config.node.config(state_dir=state_dir, run_dir=run_dir).journal_path.exists():
        async with AsyncExitStack() as stack:
            node = await NodePart(config, stack).start()
            for sandbox in list(node.registry):
                await node.adoption.settled(sandbox.id)
            living = [sandbox for sandbox in node.registry if sandbox.row.state not in ENDED]
            _check(len(living), destroy=destroy)
            turn = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(_destroy(sandbox, turn) for sandbox in living))
            ended = len(living)
    if held := await retire_launcher(run_dir):
        raise ConflictError(f"dsec-launch still holds {held} sandboxes", hint="ask again; the log says what keeps them")
    return ended


def _check(living: int, *, destroy: bool) -> None:
    if living and not destroy:
        raise ConflictError(
            f"{living} sandbox{'' if living == 1 else 'es'} of this node live",
            hint="`dsec cluster drain` the node and wait, or give --destroy",
        )


async def _destroy(sandbox: Supervisor, turn: asyncio.Semaphore) -> None:
    async with turn:
        await sandbox.destroy(EndCause.DESTROYED, "its node has left the cluster")
