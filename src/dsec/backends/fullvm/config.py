"""What an operator may set for full machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm import kernel, qemu
from dsec.core.errors import InvalidArgumentError

ACCELERATORS: Final = ("auto", "kvm", "tcg")
# sun_path holds 108 bytes; "<run>/full/<sandbox id>/agent" takes 41 of them.
RUN_DIR_BYTES_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class FullvmConfig:
    run_dir: Path  # sockets; gone after a reboot
    state_dir: Path  # images, templates, and what sandboxes write
    id_dir: Path = Path("/run/dsec/ids")  # shared by all node daemons of the host
    cache_dir: Path = Path("/var/cache/dsec/vm")  # kernels to try KVM with, shared by all node daemons of the host
    cgroup_parent: str = "dsec"  # below the root of each hierarchy; the node's id is added
    qemu: str = qemu.PROGRAM
    accelerator: str = "auto"  # "kvm", "tcg" (emulated: slow, and no security boundary of the same quality), "auto"
    kernel: str = kernel.PACKAGE  # Debian package
    uefi: Path = Path("/usr/share/OVMF")  # firmware of machines that want UEFI
    images: Path | None = None  # directory of machine images, if not in the state directory
    templates: Path | None = None  # directory of templates, if not in the state directory
    proxied: bool = True  # network `proxied`, where the kernel can
    templates_max: int = 8  # kept; those that were not used for longest go
    boot_s: float = 600.0  # for a template to come up

    @property
    def machines_dir(self) -> Path:
        return self.run_dir / "full"

    @property
    def sandboxes_dir(self) -> Path:
        return self.state_dir / "fullvm" / "sandboxes"

    @property
    def images_dir(self) -> Path:
        return self.images or self.state_dir / "fullvm" / "images"

    @property
    def templates_dir(self) -> Path:
        return self.templates or self.state_dir / "fullvm" / "templates"

    def __post_init__(self) -> None:
        if len(str(self.run_dir)) > RUN_DIR_BYTES_MAX:
            raise InvalidArgumentError(
                f"the run directory {self.run_dir} is longer than {RUN_DIR_BYTES_MAX} bytes",
                hint="UNIX socket paths are short; choose a shorter one",
            )
        if self.accelerator not in ACCELERATORS:
            choices = ", ".join(map(repr, ACCELERATORS))
            raise InvalidArgumentError(f"accelerator must be one of {choices}, not {self.accelerator!r}")
