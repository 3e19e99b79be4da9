"""Images that full machines begin as: shared by node, API, SDK and CLI."""

from __future__ import annotations

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.core.machines import Agent, Bus, Firmware
from dsec.core.spec import check_path


class MachineImport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A disk in a file of the node. What it is must be said: nothing is guessed from what is in it."""

    name: str
    path: str
    format: str  # raw | qcow2
    firmware: Firmware = Firmware.BIOS  # bios | uefi
    agent: Agent = Agent.NONE  # which agent runs inside: dsec | qga | none
    bus: Bus = Bus.VIRTIO  # virtio | sata
    boot_wait_s: float = 0.0  # it is saved as a template so long after power on, or after its agent's first answer

    def __post_init__(self) -> None:
        parse_name(self.name, "image name")
        if not self.path.startswith("/") or "\0" in self.path or len(self.path) > limits.PATH_BYTES_MAX:
            raise InvalidArgumentError("the path of a disk must be absolute")
        if self.firmware is Firmware.KERNEL:
            raise InvalidArgumentError(
                "a disk is imported with bios or uefi", hint="kernels are those of `dsec vm build`"
            )
        if not 0.0 <= self.boot_wait_s <= limits.MACHINE_BOOT_WAIT_S_MAX:
            raise LimitError(f"boot_wait_s must be between 0 and {limits.MACHINE_BOOT_WAIT_S_MAX:g}")


class DiskExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The disk of an image, or of a snapshot of a machine, as a file of the node that is not there yet."""

    image: str | None = None
    snapshot: str | None = None  # by name or id
    path: str
    format: str  # raw | qcow2

    def __post_init__(self) -> None:
        if (self.image is None) == (self.snapshot is None):
            raise InvalidArgumentError("a disk is exported of an image or of a snapshot")
        parse_name(self.image or self.snapshot or "", "name of what is exported")
        check_path(self.path)
        if not self.path.startswith("/") or self.path.rpartition("/")[2] in ("", ".", ".."):
            raise InvalidArgumentError("the path of a disk must be absolute, and name a file")


class DiskFile(msgspec.Struct, frozen=True, kw_only=True):
    """A disk that has become a file of the node."""

    path: str
    format: str
    disk_bytes: int  # to a machine
    used_bytes: int  # on the node's disk


class MachineRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One image, by whose name sandboxes of backend "fullvm" are created."""

    name: str
    format: str
    firmware: str
    agent: str
    bus: str
    boot_wait_s: float
    disk_bytes: int
    used_bytes: int  # on the node's disk
    sha256: str
    created_at: float
    layers: tuple[str, ...] = ()  # of its disk, lowest first; above a file of its own, where there is one
    digest: str | None = None  # of the record in a store, of one that has just been pushed


class MachinePage(msgspec.Struct, frozen=True):
    machines: list[MachineInfo] = []
