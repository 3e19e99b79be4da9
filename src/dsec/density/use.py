"""What one sandbox uses, as its cgroups tell."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from dsec.density.cgroups import read_keyed, read_number, read_pressure_s


class CgroupUse:
    """From its directories. None: this host cannot tell."""

    def __init__(self, v2: str | None, v1: Mapping[str, str]) -> None:
        self._v2 = v2
        self._v1 = v1
        self._peak_since_start = True

    def cpu_s(self) -> float | None:
        if self._v2 is not None:
            used_us = read_keyed(f"{self._v2}/cpu.stat").get("usage_usec")
            return None if used_us is None else used_us / 1e6
        directory = self._v1.get("cpuacct") or self._v1.get("cpu")
        used_ns = read_number(f"{directory}/cpuacct.usage") if directory else None
        return None if used_ns is None else used_ns / 1e9

    def memory_bytes(self) -> int | None:
        return self._first("memory.current", "memory", "memory.usage_in_bytes")

    def memory_peak_bytes(self) -> int | None:
        if not self._peak_since_start and "memory" not in self._v1:
            return None  # cgroup2 forgets a peak for whoever holds the file open, and for nobody else
        return self._first("memory.peak", "memory", "memory.max_usage_in_bytes")

    def forget_memory_peak(self) -> None:
        self._peak_since_start = False
        if (memory := self._v1.get("memory")) is not None:
            with contextlib.suppress(OSError):
                Path(memory, "memory.max_usage_in_bytes").write_text("0")

    def oom_kills(self) -> int | None:
        if (memory := self._v1.get("memory")) is not None:
            return read_keyed(f"{memory}/memory.oom_control").get("oom_kill")
        return read_keyed(f"{self._v2}/memory.events").get("oom_kill") if self._v2 is not None else None

    def pids(self) -> int | None:
        return self._first("pids.current", "pids", "pids.current")

    def pressure_s(self, resource: str) -> float | None:
        return read_pressure_s(f"{self._v2}/{resource}.pressure") if self._v2 is not None else None

    def _first(self, v2_name: str, controller: str, v1_name: str) -> int | None:
        """A controller is in one hierarchy: what has a directory in version 1 is not in version 2."""
        if (directory := self._v1.get(controller)) is not None:
            return read_number(f"{directory}/{v1_name}")
        return read_number(f"{self._v2}/{v2_name}") if self._v2 is not None else None
