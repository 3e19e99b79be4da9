"""What the journal keeps of a microvm."""

from __future__ import annotations

from dsec.backends.vm import record
from dsec.backends.vm.record import MachineRecord


class MicrovmRecord(MachineRecord, frozen=True, kw_only=True):
    monitor: str = "qemu"  # or "firecracker": whose sockets are there


def parse_record(data: bytes) -> MicrovmRecord:
    """Raises StorageError for a record of a later version or of nothing that we know."""
    return record.parse_record(data, MicrovmRecord)
