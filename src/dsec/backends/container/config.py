"""What an operator may set for containers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.container.view import CHOICES
from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import GIB, MIB, PREPARED_MAX

DISKS: Final = ("auto", "project", "image", "directory", "tmpfs")
# sun_path holds 108 bytes; "<run>/sb/<sandbox id>.sock" takes 38 of them.
RUN_DIR_BYTES_MAX = 60


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    run_dir: Path  # sockets and the launcher's own files; gone after a reboot
    state_dir: Path  # writable layers of the sandboxes
    id_dir: Path = Path("/run/dsec/ids")  # shared by all node daemons of the host
    cgroup_parent: str = "dsec"  # below the root of each hierarchy; the node's id is added
    launch_binary: Path | None = None  # None: the one that belongs to this package
    agent_binary: Path | None = None
    # How a limit on the disk is enforced: "auto" (the cheapest that works here), "project" (quota of ext4 or xfs),
    # "image" (a file system of its own in a file), "directory" (not at all), "tmpfs" (all: in memory, counted so)
    disk: str = "auto"
    shm_bytes: int = 64 * MIB
    resource_view: str = (
        "auto"  # "live" (needs lxcfs) | "static" | "host"; "auto": live where it can be had, else static
    )
    prepared: int = 0  # containers that are made ahead, as far as that goes without knowing what will run in them
    light_from: int = 64  # sandboxes there are, from which on new ones begin without what costs most while idle
    keep_cgroups_from: int = 256  # sandboxes there are, from which on processor cgroups of ended ones serve new ones
    pids_kept_for_host: int = 4096
    memory_kept_for_host: int = GIB  # what all sandboxes together leave; at most a quarter of the machine
    proxied: bool = True  # network `proxied`, where the kernel can
    launcher_start_s: float = 10.0

    @property
    def sandboxes_dir(self) -> Path:
        return self.state_dir / "sandboxes"

    def __post_init__(self) -> None:
        if len(str(self.run_dir)) > RUN_DIR_BYTES_MAX:
            raise InvalidArgumentError(
                f"the run directory {self.run_dir} is longer than {RUN_DIR_BYTES_MAX} bytes",
                hint="UNIX socket paths are short; choose a shorter one",
            )
        if self.resource_view not in CHOICES:
            choices = ", ".join(map(repr, CHOICES))
            raise InvalidArgumentError(f"resource_view must be one of {choices}, not {self.resource_view!r}")
        for name in ("light_from", "keep_cgroups_from"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.prepared <= PREPARED_MAX:
            raise InvalidArgumentError(f"prepared must be between 0 and {PREPARED_MAX}, not {self.prepared}")
        if self.disk not in DISKS:
            raise InvalidArgumentError(f"disk must be one of {', '.join(map(repr, DISKS))}, not {self.disk!r}")
