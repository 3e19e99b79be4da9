"""What an operator may set for microvms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm import firecracker, kernel, qemu
from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import GIB

MONITORS: Final = ("auto", "qemu", "firecracker")
MEMORIES: Final = ("mapped", "served")
LAYER_DEVICES: Final = ("blk", "pmem")
ACCELERATORS: Final = ("auto", "kvm", "tcg")
# sun_path holds 108 bytes; "<run>/vm/<sandbox id>/agent" takes 39 of them.
RUN_DIR_BYTES_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class MicrovmConfig:
    run_dir: Path  # sockets; gone after a reboot
    state_dir: Path  # templates, and what sandboxes write
    id_dir: Path = Path("/run/dsec/ids")  # shared by all node daemons of the host
    cache_dir: Path = Path("/var/cache/dsec/vm")  # kernels, shared by all node daemons of the host
    cgroup_parent: str = "dsec"  # below the root of each hierarchy; the node's id is added
    monitor: str = "auto"  # "firecracker", "qemu", "auto": Firecracker where it is and works
    firecracker: str = firecracker.PROGRAM
    memory: str = "mapped"  # of clones under Firecracker: "mapped" from the template, "served" page by page
    diff_snapshots: bool = False  # Firecracker notes what guests write: snapshots stop them less; they are slower
    qemu: str = qemu.PROGRAM
    accelerator: str = "auto"  # "kvm", "tcg" (emulated: slow, and no security boundary of the same quality), "auto"
    kernel: str = kernel.PACKAGE  # Debian package
    disk_bytes: int = 10 * GIB  # of a sandbox that asks for no other; only what is written takes room
    templates: Path | None = None  # directory of templates, if not in the state directory
    proxied: bool = True  # network `proxied`, where the kernel can
    templates_max: int = 16  # kept; those that were not used for longest go
    layer_device: str = "blk"  # or "pmem": guests share the pages of layers; QEMU, or Firecracker 1.14
    page_out: bool = True  # memory of paused ones goes to swap, where the host has any
    boot_s: float = 120.0  # for a template to come up

    @property
    def machines_dir(self) -> Path:
        return self.run_dir / "vm"

    @property
    def sandboxes_dir(self) -> Path:
        return self.state_dir / "vm" / "sandboxes"

    @property
    def templates_dir(self) -> Path:
        return self.templates or self.state_dir / "vm" / "templates"

    @property
    def images_dir(self) -> Path:
        return self.state_dir / "vm" / "images"

    def __post_init__(self) -> None:
        if len(str(self.run_dir)) > RUN_DIR_BYTES_MAX:
            raise InvalidArgumentError(
                f"the run directory {self.run_dir} is longer than {RUN_DIR_BYTES_MAX} bytes",
                hint="UNIX socket paths are short; choose a shorter one",
            )
        for name, allowed in (
            ("accelerator", ACCELERATORS),
            ("monitor", MONITORS),
            ("memory", MEMORIES),
            ("layer_device", LAYER_DEVICES),
        ):
            if (value := getattr(self, name)) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise InvalidArgumentError(f"{name} must be one of {choices}, not {value!r}")
