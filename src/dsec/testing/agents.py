"""The real agent on a plain socket, confined by nothing: for tests of what it says and does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.binaries import find_binary
from dsec.core.errors import HostError, SandboxFaultError
from dsec.testing.processes import descendants

START_S: Final = 10.0
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class RealAgent:
    """`connect` has the form of `Instance.connect`."""

    pid: int
    path: Path

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        try:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(factory, str(self.path))
        except OSError as error:
            raise SandboxFaultError(f"the agent at {self.path} cannot be reached: {error}") from error
        return transport


@asynccontextmanager
async def running_agent(directory: Path, *, binary: Path | None = None) -> AsyncIterator[RealAgent]:
    """An agent that listens in `directory` (a short path). It and all that it started are gone afterwards.

    Raises HostError when the program has not been built, or does not start.
    """
    path = directory / "agent.sock"
    process = await asyncio.create_subprocess_exec(
        binary or find_binary("dsec-agent"), "--listen", path, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        await _wait_until_listening(path, process)
        yield RealAgent(process.pid, path)
    finally:
        await _end(process)
        with suppress(FileNotFoundError):
            path.unlink()


async def _wait_until_listening(path: Path, process: asyncio.subprocess.Process) -> None:
    until_s = time.monotonic() + START_S
    while not _listens(path):
        if process.returncode is not None:
            raise HostError(f"the agent exited with {process.returncode} at its start")
        if time.monotonic() >= until_s:
            raise HostError(f"the agent does not listen at {path} after {START_S:g} s")
        await asyncio.sleep(_POLL_S)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


async def _end(process: asyncio.subprocess.Process) -> None:
    """The agent is the subreaper of what it starts: while it lives, nothing escapes from below it.

    It is stopped first, so that nothing new appears while its descendants are killed.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            below = list(descendants(frozenset({process.pid})).values())
            for info in below:
                if info.state != "Z":
                    with suppress(ProcessLookupError):
                        os.kill(info.pid, signal.SIGKILL)
            process.kill()
    await process.wait()
