"""Paths of /proc and /sys that a sandbox does not see or cannot write. Those that a kernel lacks are skipped."""

from __future__ import annotations

from typing import Final

# Kernel memory layout, keys, host-wide timing, hardware, and counts of what others do.
# kpagecgroup once crashed a kernel by being read (DSEC.md).
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
    "/sys/fs/bpf",
    "/sys/fs/cgroup",
    "/sys/kernel/debug",
    "/sys/kernel/mm/damon",
    "/sys/kernel/security",
    "/sys/kernel/slab",
    "/sys/kernel/tracing",
)

READONLY: Final = ("/proc/bus", "/proc/irq", "/proc/sys")
