"""Processor cgroups of ended containers, kept with their limits for the next ones: version 1, beside many sandboxes.

To write a quota the kernel walks all processor cgroups of the machine with a lock held (`tg_set_cfs_bandwidth`), which
takes 2 ms beside 3,200. One that has the quota already is renamed, which takes microseconds; version 2 cannot rename.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.container.record import ContainerRecord
from dsec.core.limits import CGROUPS_KEPT_MAX
from dsec.density.cgroups import CgroupHost
from dsec.wire.launch import DestroyArgs, LaunchPlan

_CPU: Final = "cpu"
_QUOTA: Final = "cpu.cfs_quota_us"
_AS_NEW: Final = {"cpu.shares": "1024", "cpu.idle": "0"}  # what nobody has asked for otherwise, where the kernel has it
_PREFIX: Final = "kept-"


class KeptCgroups:
    """Of one node. A name is handed out once, and whoever has it renames the directory or sees that it is gone."""

    def __init__(self, host: CgroupHost, parent: str):
        fits = host.limits(_CPU) == "v1" and host.v2 is not None  # which counts the time, so that none is passed on
        self._directory = host.v1[_CPU] / parent if fits else None
        self._numbers = itertools.count(1)
        self._kept: defaultdict[str, deque[str]] = defaultdict(deque)  # quota → paths
        self.clear()  # what a process before has left

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def use(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan, with a directory that has its limits where there is one: the launch's from now on, or to `lose`."""
        wanted = plan.cgroup1_files.get(_CPU, {})
        kept = self._kept.get(wanted.get(_QUOTA, ""))
        if not kept or len(wanted) != 1:
            return plan
        return msgspec.structs.replace(plan, cgroup1_from={_CPU: kept.popleft()})

    def keep(self, record: ContainerRecord) -> DestroyArgs:
        """How to destroy it so that its directory is kept where it can be: then `add` or `lose` its `cgroup1_to`."""
        args = record.destroy_args()
        directory = self._directory
        if directory is None or _CPU not in record.cgroup1 or len(self) >= CGROUPS_KEPT_MAX:
            return args
        if Path(record.cgroup1[_CPU]).parent != directory:
            return args  # of a node that was configured otherwise
        return msgspec.structs.replace(args, cgroup1_to={_CPU: str(directory / f"{_PREFIX}{next(self._numbers)}")})

    def add(self, paths: dict[str, str]) -> None:
        """They are there now, with the limits that the kernel says they have."""
        for path in paths.values():
            try:
                quota = (Path(path) / _QUOTA).read_text().strip()
                as_new = all(_reads(Path(path) / name, value) for name, value in _AS_NEW.items())
            except OSError:
                continue  # it was not there any more, and has not been renamed
            if as_new:
                self._kept[quota].append(path)
            else:
                self.lose({_CPU: path})

    def lose(self, paths: dict[str, str]) -> None:
        """Nobody knows whether they are there; they are not afterwards."""
        for path in paths.values():
            with contextlib.suppress(OSError):
                Path(path).rmdir()

    def clear(self) -> None:
        self._kept.clear()
        if self._directory is not None and self._directory.is_dir():
            for path in self._directory.glob(f"{_PREFIX}*"):
                self.lose({_CPU: str(path)})


def _reads(path: Path, value: str) -> bool:
    try:
        return path.read_text().strip() == value
    except FileNotFoundError:
        return True
