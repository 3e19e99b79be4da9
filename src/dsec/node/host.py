"""A few facts of the machine that decisions need."""

from __future__ import annotations

import os
from pathlib import Path

from dsec.core.errors import HostError


def boot_id() -> str:
    """Another value means that the machine was started again. Raises HostError."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError("the machine's boot id cannot be read", hint="is /proc mounted?") from error


def memory_total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
