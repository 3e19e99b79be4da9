"""Paths of /proc and /sys that a sandbox does not see or cannot write. Those that a kernel lacks are skipped."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

# Kernel memory layout, keys, host-wide timing, hardware, and counts of what others do.
# kpagecgroup once crashed a kernel by being read (DSEC.md). Not the places of sysfs where the host mounts other file
# systems (/sys/fs/cgroup, /sys/fs/bpf, /sys/kernel/debug, …): of a sysfs that is mounted anew they are empty.
HIDDEN: Final = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/diskstats",
    "/proc/driver",
    "/proc/fs",
    "/proc/interrupts",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/modules",
    "/proc/partitions",
    "/proc/pressure",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/swaps",
    "/proc/sys/fs/file-nr",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/kernel/mm/damon",
    "/sys/kernel/slab",
)

READONLY: Final = ("/proc/bus", "/proc/irq", "/proc/sys")


def needed(root: Path = Path("/")) -> tuple[str, ...]:
    """Those of HIDDEN that somebody in a sandbox could open on this host.

    A file for the host's root alone is none: its owner has no id inside, so no right there reaches it. Each mask costs
    every sandbox a mount and an inode. What a kernel lacks stays in the list: a module may bring it.
    """
    return tuple(path for path in HIDDEN if not _is_for_root_alone(root / path[1:]))


def _is_for_root_alone(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == 0 and not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
