"""What a sandbox is shown of the machine: which kind of view this host can give, and of what share.

Pure but for `find_lxcfs`.
docs/internals/resources.md tells what programs see, and what stays a gap.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsec.core.errors import HostError
from dsec.core.spec import SandboxSpec
from dsec.density.cgroups import CgroupHost
from dsec.wire.launch import ResourceView

LIVE, STATIC, HOST = "live", "static", "host"
AUTO = "auto"
CHOICES = (AUTO, LIVE, STATIC, HOST)

_PLACES = "/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/sbin"  # not PATH: it runs as root
_FUSE = Path("/dev/fuse")


@dataclass(frozen=True, slots=True)
class ViewChoice:
    """What this host can give; `lxcfs` is None where no live view is."""

    kind: str
    lxcfs: Path | None = None
    reason: str = ""  # why it is no better


def find_lxcfs() -> Path | None:
    found = shutil.which("lxcfs", path=_PLACES)
    return Path(found) if found and os.access(_FUSE, os.R_OK | os.W_OK) else None


def choose_view(wanted: str, host: CgroupHost, lxcfs: Path | None) -> ViewChoice:
    if wanted in (STATIC, HOST):
        return ViewChoice(wanted, reason="chosen by resource_view")
    reason = _no_live_view(host, lxcfs)
    return ViewChoice(LIVE, lxcfs) if reason is None else ViewChoice(STATIC, reason=reason)


def require_view(wanted: str, choice: ViewChoice) -> None:
    """Raises HostError when the operator insists on a live view that this host cannot give."""
    if wanted == LIVE and choice.kind != LIVE:
        hint = "install lxcfs, or set resource_view = 'static' in the section for containers"
        raise HostError(f"no live view of resources: {choice.reason}", hint=hint)


def _no_live_view(host: CgroupHost, lxcfs: Path | None) -> str | None:
    if lxcfs is None:
        return "lxcfs is not installed, or there is no /dev/fuse"
    if host.limits("memory") != "v1":
        # lxcfs tells what the cgroup of a sandbox's pid 1 uses. On v2 that is agent/, which commands are not in.
        return "lxcfs tells the truth only where memory is counted by cgroup v1"
    return None


def view_of(kind: str, spec: SandboxSpec) -> ResourceView | None:
    """A part of a processor counts as one: with none, programs would start no thread."""
    if kind == HOST:
        return None
    return ResourceView(cpus=max(1, math.ceil(spec.cpu)), memory_bytes=spec.memory_bytes, live=kind == LIVE)
