"""Processor time: of the service, of its launcher with all that it has started, and of this process."""

from __future__ import annotations

import os
from pathlib import Path

import dsec

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost:
    """Milliseconds of processor time since it was made. A launcher's children count once they have ended."""

    def __init__(self, client: dsec.Client) -> None:
        run_dir = Path(client.url.removeprefix("unix://")).parent
        launcher = int((run_dir / "launch.pid").read_text())
        self._processes = {"service": client.health().pid, "launcher and sandboxes": launcher}
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        own = os.times()
        read = {name: _process_ms(pid) for name, pid in self._processes.items()}
        return {**read, "caller": (own.user + own.system) * 1000}

    def per(self, count: int) -> dict[str, float]:
        """What one of `count` things took, by process."""
        spent = {name: (now - self._before[name]) / count for name, now in self._read().items()}
        return {name: round(value, 2) for name, value in {**spent, "all": sum(spent.values())}.items()}


def _process_ms(pid: int) -> float:
    # The name may hold blanks; user, system and both of reaped children are fields 14 to 17.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) * 1000 / _TICKS_PER_S
