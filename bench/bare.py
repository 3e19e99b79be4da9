"""The least that a clone can take: its monitor with nothing of ours around it, and nothing that is asked of its guest.
QEMU is started, the state of a template is loaded, and the machine goes on.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from dsec.backends.vm.qcow2 import write_overlay
from dsec.backends.vm.qmp import Monitor, MonitorError
from dsec.backends.vm.templates import STATE

_START_S: Final = 30.0
_JAILED: Final = ("/template/", "/layers/")  # where a clone sees what it only reads
_LOOK_S: Final = 0.001


class Bare:
    """As the clone `pid`, which runs: the same arguments, the same files, a disk of its own."""

    def __init__(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}/root")
        self._argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]

    def measure(self) -> float:
        """Milliseconds until its guest runs."""
        with tempfile.TemporaryDirectory(prefix="dsec-bare-", dir="/run") as name:
            directory = Path(name)
            argv = [self._outside(word, directory) for word in self._argv]
            size = (self._root / "template" / "disk.raw").stat().st_size
            write_overlay(
                directory / "disk.qcow2",
                backing=str(self._root / "template/disk.raw"),
                backing_format="raw",
                size_bytes=size,
            )
            began = time.perf_counter()
            with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
                try:
                    asyncio.run(self._go_on(directory))
                    return (time.perf_counter() - began) * 1000
                finally:
                    process.kill()

    def _outside(self, word: str, directory: Path) -> str:
        for place in _JAILED:
            word = word.replace(place, f"{self._root}{place}")
        return word.replace("/disk/", f"{directory}/").replace("/vm/", f"{directory}/")

    async def _go_on(self, directory: Path) -> None:
        async with asyncio.timeout(_START_S):
            monitor = await self._monitor(directory / "qmp")
            try:
                ignored = [{"capability": "x-ignore-shared", "state": True}]
                await monitor.execute("migrate-set-capabilities", {"capabilities": ignored})
                with (self._root / "template" / STATE).open("rb") as state:
                    await monitor.give("state", state.fileno())
                await monitor.execute("migrate-incoming", {"uri": "fd:state"})
                await self._until_loaded(monitor)
                await monitor.execute("cont")
            finally:
                monitor.close()

    async def _monitor(self, socket: Path) -> Monitor:
        while True:
            try:
                return await Monitor.connect(socket, timeout_s=_START_S, owner=0)
            except MonitorError:
                await asyncio.sleep(_LOOK_S)

    async def _until_loaded(self, monitor: Monitor) -> None:
        while True:
            answer = await monitor.execute("query-migrate")
            status = answer.get("status") if isinstance(answer, dict) else None
            if status == "completed":
                return
            if status == "failed":
                raise SystemExit(f"bench: a bare clone does not go on: {answer}")
            await asyncio.sleep(_LOOK_S)
