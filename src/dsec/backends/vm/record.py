"""What the journal keeps of a machine: enough to adopt it, or to remove every trace of it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dsec.core.errors import ProtocolError, StorageError
from dsec.wire.codec import pack, unpack

RECORD_VERSION = 1


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    version: int = RECORD_VERSION
    sandbox: str
    boot_id: str
    uid: int  # of its monitor: the first of its range
    sockets: str  # directory
    directory: str  # of its disk
    cgroup2: str | None
    cgroup1: dict[str, str]
    template: str = ""
    saved: str = ""  # id of the saved machine that its disk stands on
    asleep: str = ""  # id of the saved machine that it is: no monitor runs
    cpu: float = 1.0
    shape: dict[str, Any] = {}  # as its backend has it
    more: dict[str, Any] = {}  # what else its backend wants to know of it
    pid: int = 0  # 0: an intent, nothing may have been started
    start_ticks: int = 0

    @property
    def cgroups(self) -> list[str]:
        return [*([self.cgroup2] if self.cgroup2 else []), *self.cgroup1.values()]

    def to_bytes(self) -> bytes:
        return pack(self)


R = TypeVar("R", bound=MachineRecord)


def parse_record(data: bytes, type: type[R]) -> R:
    """Raises StorageError for a record of a later version or of nothing that we know."""
    try:
        record = unpack(data, type)
    except ProtocolError as error:
        raise StorageError(f"the journal's record of a machine is not readable: {error}") from error
    if record.version > RECORD_VERSION:
        raise StorageError(f"the record of {record.sandbox} is of version {record.version}, newer than this program")
    return record
