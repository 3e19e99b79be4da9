"""A backend of microvms under QEMU in directories of its own, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.config import MicrovmConfig
from dsec.core.errors import UnsupportedError
from dsec.core.ids import new_node_id
from dsec.testing.launchers import remove_cgroups

B = TypeVar("B", bound=MicrovmBackend)


@asynccontextmanager
async def microvms_in(directory: Path, kind: Callable[..., B]) -> AsyncIterator[tuple[B, MicrovmConfig]]:
    """In a directory with a short name; machines that are left end with the block. Raises UnsupportedError where QEMU
    runs no guests."""
    node = new_node_id()
    config = MicrovmConfig(
        run_dir=directory / "run",
        state_dir=directory / "state",
        id_dir=directory / "ids",
        cgroup_parent=f"dsec-own-{node}",
        monitor="qemu",
    )
    backend = kind(config, node=node)
    try:
        probe = await backend.probe()
        if not probe.usable:
            raise UnsupportedError(f"microvm: {probe.reason}")
        yield backend, config
    finally:
        for instance in list(backend.instances.values()):
            await instance.destroy()
        await backend.close()
        await asyncio.to_thread(remove_cgroups, config.cgroup_parent)
