"""What the journal keeps of a microvm."""

from __future__ import annotations

from dsec.backends.vm.record import MachineRecord


class MicrovmRecord(MachineRecord, frozen=True, kw_only=True):
    monitor: str = "qemu"  # or "firecracker": whose sockets are there
